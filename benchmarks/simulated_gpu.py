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
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

MIB = 2**20


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
    """What a snapshot tells: allocations in order, and peaks in bytes."""

    allocations: list[int]
    requested_bytes: int
    reserved_bytes: int


_RESERVES = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_REQUESTS = {"alloc": 1, "free_completed": -1}


def history(path: Path) -> History:
    """Read a snapshot. Totals run backwards from the end, which every snapshot knows."""
    with path.open("rb") as file:
        snapshot: dict[str, Any] = pickle.load(file)
    events = snapshot["device_traces"][0]
    segments = snapshot["segments"]
    blocks = [block for segment in segments for block in segment["blocks"]]
    live = [block for block in blocks if block["state"] == "active_allocated"]
    requested = sum(block.get("requested_size", block["size"]) for block in live)
    reserved = sum(segment["total_size"] for segment in segments)
    most_requested, most_reserved = requested, reserved
    for event in reversed(events):
        requested -= _REQUESTS.get(event["action"], 0) * event["size"]
        reserved -= _RESERVES.get(event["action"], 0) * event["size"]
        most_requested = max(most_requested, requested)
        most_reserved = max(most_reserved, reserved)
    allocations = [event["size"] for event in events if event["action"] == "alloc"]
    return History(allocations, most_requested, most_reserved)


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
    return (
        recorded.shown,
        recorded.torch,
        f"{equal:,} of {len(there.allocations):,}",
        f"{there.requested_bytes / MIB:,.1f}",
        _apart(here.requested_bytes, there.requested_bytes),
        f"{there.reserved_bytes / MIB:,.0f}",
        _apart(here.reserved_bytes, there.reserved_bytes),
    )


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
    headers = ["program", "torch", "allocations equal, in order", "requested, MiB", "simulated"]
    table = tabulate(rows, [*headers, "reserved, MiB", "simulated"], tablefmt="github")
    if options.output:
        options.output.write_text(
            "# A simulated GPU beside recordings from real ones\n\n"
            "Recorded by others; simulated by `benchmarks/simulated_gpu.py`, which says how. Peaks "
            "are those of the recorded part.\n\n" + table + "\n",
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
