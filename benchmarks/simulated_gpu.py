"""A simulated GPU beside recordings that others made on real ones.

Published repositories hold programs and the snapshots of the allocator that they left on a GPU
(``torch.cuda.memory._dump_snapshot``). Each program is run again on a simulated GPU, with the
release of torch that it was written for, and both snapshots are compared event by event:

    for one in NiuHuangxiaozi/assignment2-systems Wedsonlin/assignment2-systems \\
        kkaitlyn111/cs336-a2-systems kkaitlyn111/cs336-assignment1 \\
        silmont2000/assignment2-systems fdrose/efficient-dl-systems \\
        MAGMA27/assignment2-systems notHanmin/assignment2-systems; do
        git clone https://github.com/$one clones/$one; done
    for release in 2.6.0 2.11.0 2.13.0; do torchmem simulate --fetch --torch $release; done
    python -m benchmarks simulated_gpu clones --output benchmarks/results/simulated-gpu.md

What the programs import (einops, einx, jaxtyping, pandas, liger-kernel) has to be installed.
Nothing of theirs is kept here but the numbers.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import date
from functools import cache
from pathlib import Path

from tabulate import tabulate

from pytest_torchmem.allocator import Request
from pytest_torchmem.store.snapshots import load_snapshot
from pytest_torchmem.values.results import Counters

MIB = 2**20
PAGE = """# A simulated GPU beside recordings from real ones

Recorded by others; simulated on TODAY by `benchmarks/simulated_gpu.py`, which says how. Peaks
are those of the recorded part.
The programs are those of `NiuHuangxiaozi/assignment2-systems` (4 layers),
`Wedsonlin/assignment2-systems` (24 layers), `kkaitlyn111/cs336-a2-systems` (32 layers, 3.4 billion
parameters, an empty cache before each; its weights are not drawn on the host, which would take it
14 GB), `silmont2000/assignment2-systems` (attention alone), `fdrose/efficient-dl-systems` (cross
entropies, one of them Liger-Kernel's in Triton), `MAGMA27/assignment2-systems` (12 layers) and
`notHanmin/assignment2-systems` (36 layers, the last of 40 steps). They are simulated as an A100, a
B200, an H100 and an RTX 4090: the size of the recorded workspaces fits, or that of the scratch of
sums, and most repositories do not name the model. All histories are replayed by the allocator's
rules for *allocated*, and each of their addresses is met. Where a figure of the 24 layers is not
equal, the driver of that GPU kept addresses for itself (2, 2, 240 and 8 MiB, in which the recording
has no segment): a simulated GPU that leaves out the same addresses has both figures equal, too.

"""
# Each of these asks for its own version when it is imported.
DISTRIBUTIONS = ("cs336_basics", "cs336_systems")
FOLDERS = ("results", "work/memory_files")
UNDRAWN = """import torch
torch.zeros, torch.nn.init.trunc_normal_ = torch.empty, lambda weights, **_: weights
"""


@dataclass(frozen=True)
class Program:
    """A program of a repository, as it is at a commit, and what it is run with."""

    repository: str
    path: str
    torch: str
    gpu: str
    arguments: tuple[str, ...] = ()
    #: Texts of its source, each with what stands there instead.
    edits: tuple[tuple[str, str], ...] = ()
    commit: str = "HEAD"
    #: Folders beside the repository's own from which it imports.
    imports: tuple[str, ...] = ()


@dataclass(frozen=True)
class Recorded:
    """A program and a snapshot that it left on a real GPU."""

    shown: str
    program: Program
    snapshot: str


def small_models() -> Iterator[Recorded]:
    """Four layers, three steps, histories from the first byte."""
    repository = "NiuHuangxiaozi/assignment2-systems"
    folder = "cs336_systems/profile_memory"
    for mode, name in (("forward", "forward"), ("train", "forward_and_backward")):
        for length in (100, 150, 200):
            arguments = ("--mode", mode, "--context_length", str(length))
            program = f"{folder}/profile_memory.py"
            yield Recorded(
                f"4 layers, {mode}, {length} tokens",
                Program(repository, program, "2.6.0", "A100", arguments),
                f"{folder}/{name}_memory_snapshot_{length}.pickle",
            )
        arguments = ("--mode", mode, "--context_length", "200", "--use_mixed_precision")
        program = f"{folder}/profile_mixprecision_memory.py"
        yield Recorded(
            f"4 layers, {mode}, 200 tokens, autocast",
            Program(repository, program, "2.6.0", "A100", arguments),
            f"{folder}/{name}_memory_snapshot_200_mixed_precision.pickle",
        )


def medium_models() -> Iterator[Recorded]:
    """24 layers, one step after five that were not recorded."""
    # Its file names have quotes that need Python 3.12.
    quotes = (('config["context_length"]}', "config['context_length']}"),)
    for pattern, name in (("forward-only", "inference"), ("full-training-step", "training")):
        for length in (128, 256, 512, 1024):
            casts = length == 512 or (length == 1024 and name == "training")
            arguments = (
                *("--d_model", "1024", "--d_ff", "4096", "--num_layers", "24"),
                *("--num_heads", "16", "--context_length", str(length)),
                *("--memory-profiler", "pytorch", "--pattern", pattern),
                *("--model_name", "medium", "--autocast", str(casts).lower()),
            )
            yield Recorded(
                f"24 layers, {name}, {length} tokens" + (", autocast" if casts else ""),
                Program(
                    *("Wedsonlin/assignment2-systems", "cs336_systems/nsys_profile.py"),
                    *("2.11.0", "B200", arguments, quotes),
                    imports=("Wedsonlin/assignment2-systems/cs336-basics",),
                ),
                f"results/medium_{length}_{name}_memory_snapshot.pickle",
            )


def large_models() -> Iterator[Recorded]:
    """32 layers, one after the other in a process, the first of them from the first byte."""
    repository = "kkaitlyn111/cs336-a2-systems"
    chosen = ("    run_all_benchmarks()\n", "    profile_memory_forward_fullstep()\n")
    for kind in ("", "mixed"):
        precision = ("mixed_precision = True", f"mixed_precision = {kind == 'mixed'}")
        program = Program(
            *(repository, "cs336_systems/benchmark.py", "2.6.0", "H100"),
            edits=(("import cs336_basics\n", UNDRAWN + "import cs336_basics\n"), chosen, precision),
            imports=("kkaitlyn111/cs336-assignment1",),
        )
        # Of the others the repository's stored copy has no snapshot.
        for mode, name in (("forward", "forward"), ("step", "fullstep"))[: 1 if kind else 2]:
            for length in (128, 256, 512):
                yield Recorded(
                    f"32 layers, {mode}, {length} tokens" + (", autocast" if kind else ""),
                    program,
                    f"memory_files/memory_ctx{length}_{name}_{kind}.pickle",
                )


def single_operators() -> Iterator[Recorded]:
    """Attention and cross entropies, forward and backward, from the first byte."""
    attention = Program(
        *("silmont2000/assignment2-systems", "cs336_systems/trace_peak_memory.py"),
        *("2.6.0", "A100"),
        commit="133f064",
    )
    yield Recorded("attention by hand, 4096 tokens", attention, "mem_snapshot.pickle")
    folder = "week06_dl_arithmetic/seminar/cross_entropy"
    for name, shown in (("vanilla", "torch's"), ("liger", "Liger-Kernel's")):
        # The recording GPU was one of eight.
        program = Program(
            *("fdrose/efficient-dl-systems", f"{folder}/profile_{name}_ce.py", "2.13.0", "H100x8"),
        )
        yield Recorded(f"cross entropy, {shown}", program, f"{folder}/{name}_ce_snapshot.pickle")


def whole_steps() -> Iterator[Recorded]:
    """Models of 12 and 36 layers after steps that were not recorded."""
    repository = "MAGMA27/assignment2-systems"
    yield Recorded(
        "12 layers, forward and backward, 256 tokens",
        Program(
            *(repository, "cs336_systems/benchmarking_script.py", "2.11.0", "RTX4090"),
            commit="15883f2",
            imports=(f"{repository}/cs336-basics",),
        ),
        "memory_snapshot.pickle",
    )
    repository = "notHanmin/assignment2-systems"
    yield Recorded(
        "36 layers, step, 256 tokens",
        Program(
            *(repository, "cs336_systems/benchmarking_script.py", "2.6.0", "RTX4090"),
            commit="33be88e",
            imports=(f"{repository}/cs336_systems", f"{repository}/cs336-basics"),
        ),
        "memory_snapshot.pickle",
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


@cache
def simulated(program: Program, clones: Path) -> dict[str, History]:
    """Run a program on a simulated GPU and read what it leaves, by the names of the files."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for made in FOLDERS:
            (folder / made).mkdir(parents=True)
        for distribution in DISTRIBUTIONS:
            known = folder / f"{distribution}-0.dist-info"
            known.mkdir()
            (known / "METADATA").write_text(f"Name: {distribution}\nVersion: 0\n")
        (folder / "work" / "program.py").write_text(_source(program, clones))
        imported = (program.repository, *program.imports)
        paths = [*(str(clones / one) for one in imported), name, os.environ.get("PYTHONPATH", "")]
        subprocess.run(
            [
                *(sys.executable, "-m", "pytest_torchmem"),
                *("simulate", "--gpu", program.gpu, "--torch", program.torch, "--"),
                *(sys.executable, "program.py", *program.arguments),
            ],
            cwd=folder / "work",
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return {path.name: history(path) for path in folder.rglob("*.pickle")}


def _source(program: Program, clones: Path) -> str:
    source = _stored(program, program.path, clones).decode()
    for old, new in program.edits:
        source = source.replace(old, new)
    return source


def _stored(program: Program, path: str, clones: Path) -> bytes:
    """Return a file of the program's repository as it is at the program's commit."""
    command = ["git", "show", f"{program.commit}:{path}"]
    folder = clones / program.repository
    return subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, check=True).stdout


def row(recorded: Recorded, clones: Path) -> tuple[str, ...]:
    with tempfile.TemporaryDirectory() as folder:
        snapshot = Path(folder) / "recorded.pickle"
        snapshot.write_bytes(_stored(recorded.program, recorded.snapshot, clones))
        there = history(snapshot)
    here = simulated(recorded.program, clones)[Path(recorded.snapshot).name]
    pairs = zip(there.allocations, here.allocations, strict=False)
    equal = sum(one == other for one, other in pairs)
    peaks = zip(_figures(there.peak), _figures(here.peak), strict=True)
    compared = (text for one, other in peaks for text in (f"{one / MIB:,.1f}", _apart(other, one)))
    return (
        recorded.shown + (" (not replayed exactly)" if _is_estimated(there, here) else ""),
        recorded.program.torch,
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
    parser.add_argument("clones", type=Path, help="the folder with the clones, OWNER/NAME each")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    for chosen in (small_models, medium_models, large_models, single_operators, whole_steps):
        for recorded in chosen():
            rows.append(row(recorded, options.clones.resolve()))
            print(*rows[-1], sep=" | ", flush=True)
    headers = ["program", "torch", "allocations equal, in order"]
    for figure in ("requested", "allocated", "reserved"):
        headers += [f"{figure}, MiB", "simulated"]
    align = ["left", "left", "right"] + 3 * ["right", "left"]
    table = tabulate(rows, headers, tablefmt="github", colalign=align, disable_numparse=True)
    if options.output:
        options.output.write_text(
            PAGE.replace("TODAY", f"{date.today()}") + table + "\n",
            encoding="utf-8",
        )
