"""A GPU beside its simulation: which of a program's allocations are not the same on both."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, islice, repeat, zip_longest
from pathlib import Path
from typing import Final

from pytest_torchmem.analysis.caching_allocator.requests import Request
from pytest_torchmem.simulate.process import entry_point_folder, variables
from pytest_torchmem.simulate.torch_builds import torch_build
from pytest_torchmem.store.snapshots import load_snapshot
from pytest_torchmem.values.contributors import Phase
from pytest_torchmem.values.errors import ReportError
from pytest_torchmem.values.json_values import (
    WRONG,
    JsonFields,
    JsonRow,
    parse_json,
    read_text,
    told_damage,
)
from pytest_torchmem.values.units import format_size

FORMAT: Final = 1
MOST_BYTES: Final = 50_000
"""The largest file: it is made to be attached to an issue."""
_PROGRAMS: Final = Path(__file__).parents[1] / "record" / "calibration_programs.py"
_KEEPS_HISTORY: Final = "kept_history:keep_history"
_BACKWARD: Final = "backward"
_NO_LINE: Final = "no line of Python"
_FEW: Final = 3
_MOST_COMPARED: Final = 100_000


@dataclass(frozen=True, slots=True)
class PlaceSizes(JsonRow):
    """The allocations of one operator at one line, in their order.

    Attributes:
        place: File and line; ``backward`` for what autograd's thread asked for, and
            ``no line of Python`` for what else none is known of.
        real: Their bytes on the GPU: ``512x3 1024`` for three of 512 and one of 1,024.
        simulated: The same on the simulated one.
    """

    operator: str
    place: str
    real: str
    simulated: str

    @property
    def differs(self) -> bool:
        return self.real != self.simulated

    def __str__(self) -> str:
        """The place, and the first allocations that differ: ``8519680, simulated 33554432``."""
        pairs = islice(zip_longest(_sizes(self.real), _sizes(self.simulated)), _MOST_COMPARED)
        others = [pair for pair in pairs if pair[0] != pair[1]]
        lines = (
            f"{'none' if real is None else real}, simulated {simulated or 'none'}"
            for real, simulated in others[:_FEW]
        )
        more = f"; {len(others) - _FEW} more" if others[_FEW:] else ""
        return f"{self.operator or '(no operator)'} at {self.place}: {'; '.join(lines)}{more}"


@dataclass(frozen=True, slots=True)
class CalibratedGpu(JsonFields):
    """One of the two, as it told of itself.

    Attributes:
        description: What decides its numbers, as ``--gpu`` takes it.
        releases: Of torch, CUDA and cuDNN.
        peaks: The allocator's peaks in bytes, by the name of the counter.
    """

    name: str
    description: str
    releases: Mapping[str, str]
    peaks: Mapping[str, int]

    def __str__(self) -> str:
        releases = (f"{name} {release}" for name, release in self.releases.items() if release)
        return f"{self.name} ({', '.join(releases)})"


@dataclass(frozen=True, slots=True)
class Calibration(JsonFields):
    """The allocations of a program on a GPU beside those on a simulated one.

    Attributes:
        count: How many allocations the real one had.
        first_other: The first allocation that is another one, counted from 1; 0 for none.
        places: All operators and lines, those that differ first.
        left_out: How many places had no room in a file.
    """

    real: CalibratedGpu
    simulated: CalibratedGpu
    count: int
    first_other: int
    places: tuple[PlaceSizes, ...]
    left_out: int = 0

    @property
    def is_equal(self) -> bool:
        return not self.first_other and self.real.peaks == self.simulated.peaks

    def lines(self) -> Iterator[str]:
        """Yield what there is to say."""
        yield f"{self.real} beside {self.simulated}"
        if self.first_other:
            number = f"number {self.first_other:,}"
            yield f"of {self.count:,} allocations {number} is the first that differs"
        else:
            yield f"all {self.count:,} allocations are equal, in their order"
        for name, real in self.real.peaks.items():
            by = self.simulated.peaks.get(name, 0) - real
            difference = f"simulated {by:+,} B" if by else "equal"
            yield f"  {name} at most {format_size(real)}, {difference}"
        differing = [place for place in self.places if place.differs]
        yield from (f"  {place}" for place in differing)
        if self.first_other and not differing:
            yield "  each operator and line has the same allocations, in another order"
        if self.left_out:
            yield f"{self.left_out} operators and lines had no room in the file"


def calibrate(command: Sequence[str], gpu: str = "") -> Calibration:
    """Run a command on the GPU that is here and on a simulated one, and compare them.

    Without a command the programs of the package are run. ``gpu`` names the one to simulate, by
    default as the real one describes itself. Only the first device is looked at. Raises
    `ReportError` where the command does not use a GPU or fails, and `SimulationError`.
    """
    with tempfile.TemporaryDirectory(prefix="torchmem-") as name:
        folder = Path(name)
        program = folder / _PROGRAMS.name
        shutil.copy(_PROGRAMS, program)  # lines of an installed package count as a library's
        started = [*command] or [sys.executable, str(program)]
        real, here = _run(started, folder / "real", {})
        added = variables(gpu or real.description, torch_build())
        simulated, there = _run(started, folder / "simulated", added)
    sizes: dict[tuple[str, str], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for side, allocations in enumerate((here, there)):
        for place, size_bytes in allocations:
            sizes[place][side].append(size_bytes)
    places = [PlaceSizes(*place, *map(_text, both)) for place, both in sizes.items()]
    pairs = enumerate(zip_longest(here, there), 1)
    first_other = next((number for number, (one, two) in pairs if one != two), 0)
    places.sort(key=lambda place: not place.differs)
    return Calibration(real, simulated, len(here), first_other, tuple(places))


def _run(
    command: Sequence[str], folder: Path, added: Mapping[str, str]
) -> tuple[CalibratedGpu, Sequence[tuple[tuple[str, str], int]]]:
    """Run the command; return its device, and operator, place and bytes of each allocation."""
    folder.mkdir()
    environment = {**os.environ, **added, "TORCHMEM_HISTORY": str(folder)}
    paths = [environment.get("PYTHONPATH", ""), str(entry_point_folder(_KEEPS_HISTORY))]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "1"
    done = subprocess.run(command, env=environment, check=False)
    where = "on the simulated GPU" if added else "here"
    if done.returncode:
        code = done.returncode
        end = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        raise ReportError(f"the command ended {end} {where}")
    if not (folder / "device.json").exists():
        raise ReportError(
            f"the command used no GPU {where}: its first process that imports torch is compared, "
            "if it uses CUDA and ends without `os._exit`"
        )
    snapshot = load_snapshot(folder / "snapshot.pickle", 0)
    if snapshot.begins_in_the_middle or snapshot.contradiction:
        raise ReportError(
            f"the command allocates more {where} than the allocator's history holds, and what came "
            "first is lost: compare a shorter one"
        )
    requests = snapshot.history.requests
    allocations = []
    for key, size_bytes in enumerate(requests.size_bytes[requests.kind == Request.ALLOC].tolist()):
        origin = snapshot.sites[key].origin
        place = str(origin.source) if origin.source else _NO_LINE
        if not origin.source and origin.phase is Phase.BACKWARD:
            place = _BACKWARD
        allocations.append(((origin.operator, place), size_bytes))
    gpu = CalibratedGpu.from_json(parse_json(read_text(folder / "device.json")))
    return gpu, allocations


def as_file(calibration: Calibration) -> str:
    """Return a comparison as text that has room in an issue; what is equal is left out first."""
    while True:
        text = (
            json.dumps({"torchmem calibration": FORMAT, **calibration.to_json()}, indent=0) + "\n"
        )
        if len(text.encode()) < MOST_BYTES or not calibration.places:
            return text
        places = calibration.places[: len(calibration.places) * 3 // 4]
        left_out = calibration.left_out + len(calibration.places) - len(places)
        calibration = replace(calibration, places=places, left_out=left_out)


def read_calibration(path: Path) -> Calibration:
    """Return what `as_file` wrote. Raises `ReportError`."""
    try:
        data = parse_json(read_text(path))
        if data.pop("torchmem calibration") != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        return Calibration.from_json(data)
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror or error}") from None
    except WRONG as error:
        raise ReportError(
            f"{path} is no file of `torchmem calibrate`: {told_damage(error)}"
        ) from None


def _text(sizes: Sequence[int]) -> str:
    runs = ((size_bytes, len([*same])) for size_bytes, same in groupby(sizes))
    return " ".join(f"{size}x{count}" if count > 1 else str(size) for size, count in runs)


def _sizes(text: str) -> Iterator[int]:
    parts = (part.partition("x") for part in text.split())
    return chain.from_iterable(repeat(int(size), int(count or 1)) for size, _, count in parts)
