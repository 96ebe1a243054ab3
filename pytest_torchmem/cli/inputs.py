"""Files of every kind are read as the same: measurements by test; recordings as runs of one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pytest_torchmem.analysis.gpu_questions import GpuQuestions
from pytest_torchmem.analysis.pipeline import analyze_trace
from pytest_torchmem.analysis.sampling import sketch
from pytest_torchmem.analysis.snapshot import Snapshot
from pytest_torchmem.report.viewers.memory_viz import pickled
from pytest_torchmem.report.viewers.perfetto import chrome_trace
from pytest_torchmem.store.baseline_file import read_any
from pytest_torchmem.store.file_kinds import (
    Recording,
    beginning_of,
    foreign_kind,
    recording_kind,
)
from pytest_torchmem.store.run_reports import KIND, RunReport, parse_run, read_json
from pytest_torchmem.store.snapshots import load_snapshot, load_snapshots
from pytest_torchmem.store.traces import load_trace
from pytest_torchmem.values.baseline import BaselineEntry
from pytest_torchmem.values.errors import BaselineError, ReportError
from pytest_torchmem.values.measured import MeasuredTest, Window
from pytest_torchmem.values.units import format_size, one_line

_BASELINE_FOLDER: Final = "__torchmem__"
_RESULTS: Final = KIND.encode()


@dataclass(frozen=True, slots=True)
class Key:
    """The name of a measurement: environment, test module, and the test within it."""

    environment: str
    module: str
    entry: str

    def __str__(self) -> str:
        return one_line(f"{self.module}::{self.entry}" if self.entry else self.module)


@dataclass(frozen=True, slots=True)
class Measurements:
    """The measurements of one input.

    Attributes:
        name: The input as it was typed.
        run: The run they come from; None for baselines.
        estimated: Those whose numbers were not measured.
        windows: What a run measured of each; nothing for baselines.
    """

    name: str
    entries: Mapping[Key, BaselineEntry]
    run: RunReport | None = None
    estimated: frozenset[Key] = frozenset()
    windows: Mapping[Key, Window] = field(default_factory=dict)

    def size(self, key: Key, size_bytes: int) -> str:
        """Return a size of one of the measurements, with the word where it is estimated."""
        return format_size(size_bytes) + (" (estimated)" if key in self.estimated else "")

    @property
    def environments(self) -> list[str]:
        return sorted({key.environment for key in self.entries})


def read_measurements(path: Path, unjudged: bool = False, device: str = "") -> Measurements:
    """Return what is in a results file, a baseline file, a folder of either, or a snapshot.

    ``unjudged`` adds what a run measured and held against nothing, which is not for comparing.
    ``device`` is of a snapshot the only one to look at. Raises `ReportError` where it is none of
    these.
    """
    if path.is_dir():
        runs = _results_folder(path)
        measurements = _measurements(str(path), runs, unjudged) if runs else None
        return measurements or Measurements(str(path), dict(_folder(path)))
    if recording_kind(path) is Recording.SNAPSHOT:
        # Two snapshots are compared with each other, whatever their files are called.
        return _measurements(str(path), [run_of(path, "snapshot", device)], unjudged)
    data = _parsed(path)
    if isinstance(data, dict) and data.get("kind") == KIND:
        return _measurements(str(path), [parse_run(data, str(path))], unjudged)
    if not isinstance(data, dict) or "entries" not in data:
        foreign = foreign_kind(path)
        other = f"; it is {foreign}" if foreign else ""
        raise ReportError(f"{path} is neither a results file nor a baseline{other}")
    module = f"{path.stem}.py" if path.suffix == ".json" else path.name
    return Measurements(str(path), dict(_baseline(path, module)))


def _results_folder(folder: Path) -> list[RunReport]:
    """Return the runs in a folder of results files, such as those of the ranks of one job."""
    paths = _json_files(folder.rglob("*.json"))
    if not any(_RESULTS in beginning_of(path)[:256] for path in paths):
        return []
    if stored := next((path for path in paths if _BASELINE_FOLDER in path.parts), None):
        problem = f"{folder} has results and baselines, such as {stored}; name the files or folders"
        raise ReportError(f"{problem} of one kind")
    return [parse_run(_parsed(path), str(path)) for path in paths]


def _json_files(paths: Iterable[Path]) -> list[Path]:
    return sorted(path for path in paths if not path.name.startswith(".") and _may_be_ours(path))


def _may_be_ours(path: Path) -> bool:
    """False for JSON of other programs, such as a timeline for Perfetto."""
    begin = beginning_of(path)[:256]
    is_marked = any(mark in begin for mark in (_RESULTS, b'"environment"', b'"entries"'))
    return is_marked or _BASELINE_FOLDER in path.parts or not begin.strip(b"{ \n")


def _measurements(name: str, runs: list[RunReport], unjudged: bool) -> Measurements:
    """Return what some runs measured; ranks are told apart by their environment."""
    windows = [pair for run in runs for pair in windows_of(run, unjudged)]
    results = [(key, window.result) for key, window in windows]
    return Measurements(
        name,
        {key: BaselineEntry.whole(result) for key, result in results},
        runs[0] if len(runs) == 1 else None,
        frozenset(key for key, result in results if result.estimated),
        dict(windows),
    )


def read_reports(path: Path, device: str = "") -> list[RunReport]:
    """Return the runs in a results file, a folder of these or a recording. Raises `ReportError`."""
    if path.is_dir():
        if runs := _results_folder(path):
            return runs
        raise ReportError(
            f"there is no results file in the folder {path}; `--torchmem-report=x.json` writes one"
        )
    if recording_kind(path) is not None:
        return [run_of(path, path.name, device)]
    return [parse_run(_parsed(path), str(path))]


def _parsed(path: Path) -> object:
    if recording_kind(path) is not None:
        raise ReportError(
            f"{path} is a recording; torchmem report, fits and reserved read it, and explain "
            "and show --operators a trace, but this command needs results or baselines"
        )
    try:
        return read_json(path)
    except ReportError:
        if _may_be_ours(path) or not (foreign := foreign_kind(path)):
            raise
        raise ReportError(f"{path} is no results and no baseline; it is {foreign}") from None


def windows_of(run: RunReport, unjudged: bool = False) -> Iterator[tuple[Key, Window]]:
    """Yield each window of a run; the body of a test that did not come to its end is named so."""
    for test in run.tests:
        environment = _environment(test.environment)
        for window in (*test.windows, *(test.unjudged if unjudged else ())):
            module, _, function = test.test.partition("::")  # a script's has no module
            entry = "::".join(filter(None, (function, window.result.name)))
            ended = bool(test.raised) and not window.result.name
            yield Key(environment, module, f"{entry} (unfinished)" if ended else entry), window


def _folder(folder: Path) -> Iterator[tuple[Key, BaselineEntry]]:
    files = _json_files(folder.rglob("*.json"))
    if not files:
        raise ReportError(f"there is no baseline in {folder}")
    for path in files:
        parts = path.relative_to(folder.parent).with_suffix(".py").parts
        if _BASELINE_FOLDER in parts:
            at = parts.index(_BASELINE_FOLDER)
            parts = (*parts[:at], *parts[at + 2 :])
        if parts[:1] == (folder.name,):
            parts = parts[1:]
        yield from _baseline(path, "/".join(parts))


def _baseline(path: Path, module: str) -> Iterator[tuple[Key, BaselineEntry]]:
    try:
        environment, entries = read_any(path)
        for name in entries.lines:
            key = Key(_environment(environment), module, name)
            yield key, entries.entry(name, path)
    except BaselineError as error:
        raise ReportError(error.sentence) from None


def _environment(environment: Mapping[str, str]) -> str:
    """Return an environment in words: ``cpu, torch 2.13``."""
    others = {name: value for name, value in sorted(environment.items()) if name != "device"}
    settings = (f"{name} {value}" for name, value in others.items() if value)
    return ", ".join(filter(None, [environment.get("device", ""), *settings]))


def read_recordings(path: Path, device: str = "") -> list[tuple[str, GpuQuestions]]:
    """Return a recording, analysed, with the name of its device.

    A trace has the one it was recorded for; of a snapshot it is each one, the fullest first, unless
    ``device`` names one. Raises `TraceError`, and `SnapshotError` for a snapshot.
    """
    if recording_kind(path) is not Recording.SNAPSHOT:
        profile = analyze_trace(load_trace(path), device or None)
        return [(profile.result().device, profile)]
    return [(snapshot.name, snapshot) for snapshot in _snapshots(path, device)]


def _snapshots(path: Path, device: str) -> list[Snapshot]:
    return [load_snapshot(path, device)] if device else load_snapshots(path)


def run_of(path: Path, name: str, device: str = "") -> RunReport:
    """Return a recording as a run of one test called ``name``, with its timeline.

    A snapshot has a test for each of its devices, unless ``device`` names one.
    """
    if recording_kind(path) is Recording.SNAPSHOT:
        snapshots = _snapshots(path, device)
        measured_devices = [(snapshot.result(), snapshot.picture()) for snapshot in snapshots]
    else:
        profile = analyze_trace(load_trace(path), device or None)
        measured_devices = [(profile.result(), sketch(profile))]
    several = len(measured_devices) > 1
    return RunReport(
        tuple(
            MeasuredTest(
                f"{name} on {result.device}" if several else name,
                "",
                {"device": result.device},
                (Window(result, picture=picture),),
            )
            for result, picture in measured_devices
        )
    )


def converted(trace: Path, output: Path) -> bytes | None:
    """Return the content of ``output`` if its name asks for a viewer's format, otherwise None.

    ``.perfetto.json`` is for Perfetto, ``.pickle`` for memory_viz. Raises `TraceError`.
    """
    if output.name.endswith(".perfetto.json"):
        return json.dumps(chrome_trace(analyze_trace(load_trace(trace)))).encode()
    if output.suffix == ".pickle":
        return pickled(analyze_trace(load_trace(trace)))
    return None
