"""A simulated GPU beside recordings that others made on real ones.

Two published repositories hold programs and the snapshots of the allocator that they left on a GPU
(``torch.cuda.memory._dump_snapshot``). Each program is run again on a simulated GPU, with the
release of torch that it was written for, and both snapshots are compared event by event:

    git clone https://github.com/NiuHuangxiaozi/assignment2-systems a
    git clone https://github.com/Wedsonlin/assignment2-systems b
    torchmem simulate --fetch --torch 2.6.0; torchmem simulate --fetch --torch 2.11.0
    python benchmarks/simulated_gpu.py a b --output benchmarks/results/simulated-gpu.md

What the programs import (einops, jaxtyping) has to be installed. Nothing of theirs is kept here but
the numbers.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tabulate import tabulate

from pytest_torchmem.analysis.caching_allocator import Request
from pytest_torchmem.store.snapshots import load_snapshot
from pytest_torchmem.values.results import Counters

MIB = 2**20
PAGE = """# A simulated GPU beside recordings from real ones

Recorded by others; simulated by `benchmarks/simulated_gpu.py`, which says how. Peaks are those of
the recorded part. The programs are those of `NiuHuangxiaozi/assignment2-systems` (4 layers) and
`Wedsonlin/assignment2-systems` (24 layers), simulated as an A100 and as a B200: the size of the
recorded workspaces fits both, and the repositories do not name the model. Both histories are
replayed by the allocator's rules for *allocated*, and each of their addresses is met. Where a
figure is not equal, the driver of that GPU kept addresses for itself (2, 2, 240 and 8 MiB, in which
the recording has no segment): a simulated GPU that leaves out the same addresses has both figures
equal, too.

"""


@dataclass(frozen=True)
class Recorded:
    """A program, its arguments, and the snapshot that it left on a real GPU."""

    shown: str
    torch: str
    gpu: str
    program: str
    arguments: tuple[str, ...]
    snapshot: str
    left: str


def small_models() -> Iterator[Recorded]:
    """Four layers, three steps, histories from the first byte."""
    folder = "cs336_systems/profile_memory"
    for mode, name in (("forward", "forward"), ("train", "forward_and_backward")):
        for length in (100, 150, 200):
            left = f"{name}_memory_snapshot_{length}.pickle"
            yield Recorded(
                f"4 layers, {mode}, {length} tokens",
                *("2.6.0", "A100", f"{folder}/profile_memory.py"),
                ("--mode", mode, "--context_length", str(length)),
                *(f"{folder}/{left}", left),
            )
        left = f"{name}_memory_snapshot_200_mixed_precision.pickle"
        yield Recorded(
            f"4 layers, {mode}, 200 tokens, autocast",
            *("2.6.0", "A100", f"{folder}/profile_mixprecision_memory.py"),
            ("--mode", mode, "--context_length", "200", "--use_mixed_precision"),
            *(f"{folder}/{left}", left),
        )


def medium_models() -> Iterator[Recorded]:
    """24 layers, one step after five that were not recorded."""
    for pattern, name in (("forward-only", "inference"), ("full-training-step", "training")):
        for length in (128, 256, 512, 1024):
            casts = length == 512 or (length == 1024 and name == "training")
            snapshot = f"results/medium_{length}_{name}_memory_snapshot.pickle"
            yield Recorded(
                f"24 layers, {name}, {length} tokens" + (", autocast" if casts else ""),
                *("2.11.0", "B200", "cs336_systems/nsys_profile.py"),
                (
                    *("--d_model", "1024", "--d_ff", "4096", "--num_layers", "24"),
                    *("--num_heads", "16", "--context_length", str(length)),
                    *("--memory-profiler", "pytorch", "--pattern", pattern),
                    *("--model_name", "medium", "--autocast", str(casts).lower()),
                ),
                *(snapshot, f"../{snapshot}"),
            )


@dataclass(frozen=True)
class History:
    """What a snapshot tells: the bytes of each allocation in order, and peaks in bytes.

    A snapshot does not say how many bytes the block of an allocation has. The allocator's rules do:
    the history is replayed by them, and counts only where each block lies where torch put it.
    """

    allocations: list[int]
    peak: Counters


def history(path: Path) -> History:
    """Read a snapshot."""
    snapshot = load_snapshot(path, 0)
    requests = snapshot.history.requests
    sizes = requests.size_bytes[requests.kind == Request.ALLOC].tolist()
    return History(sizes, replace(snapshot.replay.peak, estimated=snapshot.misplaced_count > 0))


def simulated(recorded: Recorded, repository: Path) -> History:
    """Run a program on a simulated GPU and read what it leaves."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "work"
        work.mkdir()
        (Path(folder) / "results").mkdir()
        program = work / "program.py"
        source = (repository / recorded.program).read_text(encoding="utf-8")
        # One of them needs Python 3.12 for the quotes in its file names, and for nothing else.
        program.write_text(re.sub(r'config\["(\w+)"\]\}', r"config['\1']}", source))
        paths = [
            str(repository),
            str(repository / "cs336-basics"),
            os.environ.get("PYTHONPATH", ""),
        ]
        command = ["simulate", "--gpu", recorded.gpu, "--torch", recorded.torch, "--"]
        subprocess.run(
            [
                *(sys.executable, "-m", "pytest_torchmem", *command),
                *(sys.executable, str(program), *recorded.arguments),
            ],
            cwd=work,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        found = sorted(Path(folder).rglob("*.pickle"))
        return history(found[0])


def row(recorded: Recorded, repository: Path) -> tuple[str, ...]:
    there = history(repository / recorded.snapshot)
    here = simulated(recorded, repository)
    pairs = zip(there.allocations, here.allocations, strict=False)
    equal = sum(one == other for one, other in pairs)
    peaks = zip(_figures(there.peak), _figures(here.peak), strict=True)
    compared = (text for one, other in peaks for text in (f"{one / MIB:,.1f}", _apart(other, one)))
    return (
        recorded.shown + (" (not replayed exactly)" if _is_estimated(there, here) else ""),
        recorded.torch,
        f"{equal:,} of {len(there.allocations):,}",
        *compared,
    )


def _figures(peak: Counters) -> tuple[int, int, int]:
    return peak.requested, peak.allocated, peak.reserved


def _is_estimated(*histories: History) -> bool:
    return any(history.peak.estimated for history in histories)


def _apart(here: int, there: int) -> str:
    return "equal" if here == there else f"{here - there:+,} B ({(here / there - 1):+.3%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("small", type=Path, help="the clone with the models of 4 layers")
    parser.add_argument("medium", type=Path, help="the clone with the models of 24 layers")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    chosen = [(recorded, options.small.resolve()) for recorded in small_models()]
    chosen += [(recorded, options.medium.resolve()) for recorded in medium_models()]
    rows = []
    for recorded, repository in chosen:
        rows.append(row(recorded, repository))
        print(*rows[-1], sep=" | ", flush=True)
    headers = ["program", "torch", "allocations equal, in order"]
    for figure in ("requested", "allocated", "reserved"):
        headers += [f"{figure}, MiB", "simulated"]
    align = ["left", "left", "right"] + 3 * ["right", "left"]
    table = tabulate(rows, headers, tablefmt="github", colalign=align, disable_numparse=True)
    if options.output:
        options.output.write_text(
            PAGE + table + "\n",
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
