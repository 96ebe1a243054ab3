"""What programs estimate beside what they measure, and what an estimate leaves behind.

Each program is run and estimated in one process, and measured in another one. After the estimate no
fake tensor may be alive, what the estimate could have changed is compared, and the program is run
again for real. Programs for CUDA are measured on a simulated GPU (`torchmem simulate --fetch`
once), without the workspaces of cuBLAS and cuDNN: with them a peak would be where all of them are.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch._subclasses.fake_tensor import FakeTensor
from workloads_estimated import Program

import pytest_torchmem

NEAR = 0.01
# A thousandth of a peak is no news.
NEGLIGIBLE = 0.001
# Numbers of Python become tensors of 4 or 8 bytes in C++, and a peak may hold dozens of them.
SCALARS_BYTES = 512
GPU = "H100"


@dataclass(frozen=True)
class Told:
    """What one process says: a peak in bytes or a refusal, and what it found afterwards."""

    peak: int = 0
    at_most: int | None = None
    refused: str = ""
    behind: str = ""
    notes: tuple[str, ...] = ()


def built(program: Program, device: str) -> Any:
    torch.manual_seed(0)
    step = program.build(device)
    with torch.set_grad_enabled(not program.no_grad):
        step()
    return step


def measured(program: Program, device: str) -> Told:
    """The peak of the second step."""
    from pytest_torchmem import Category, measure

    os.environ.pop("SIMULATED_CUDA_CUDNN", None)
    step = built(program, device)
    with torch.set_grad_enabled(not program.no_grad), measure(device=device) as window:
        held = step()
        if program.options["backward"] and isinstance(held, torch.Tensor) and held.requires_grad:
            (held if not held.dim() else held.sum()).backward()
    peak = window.result.peak
    return Told(peak.total - peak.at_peak[Category.WORKSPACE])


def estimated(program: Program) -> Told:
    """The estimate, or the refusal, and what is left of it."""
    from pytest_torchmem import estimate
    from pytest_torchmem.analysis.estimated.static import largest_possible
    from pytest_torchmem.values.errors import TorchmemError

    step = program.build("meta") if program.on_meta else built(program, "cpu")
    before = _state()
    found: dict[str, Any] = {}
    with torch.set_grad_enabled(not program.no_grad):
        try:
            result = estimate(step, device=program.device, **program.options)
            # What a GPU's libraries take is left out here as it is where it is measured.
            found = {"peak": result.peak.total, "at_most": largest_possible(result.run)}
            found["notes"] = (*result.blind_spots, *result.notes)
            del result
        except TorchmemError as error:
            found["refused"] = str(error)
        except Exception as error:
            found["behind"] = f"raw {type(error).__name__}: {error}"
    left = _left(before)
    if not left and not program.on_meta:
        with torch.set_grad_enabled(not program.no_grad):
            step()
            step()
    return Told(**{"behind": left, **found})


def _state() -> tuple[Any, ...]:
    gc.collect()
    # torch's compiler has its own.
    fakes = sum(issubclass(type(value), FakeTensor) for value in gc.get_objects())
    cast = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
    return (fakes, torch.get_rng_state().sum().item(), torch.is_grad_enabled(), *cast)


def _left(before: tuple[Any, ...]) -> str:
    after = _state()
    if after[0] > before[0]:
        return f"{after[0] - before[0]} fake tensors"
    return "" if after[1:] == before[1:] else "another state of torch"


def told_by(script: str, names: Sequence[str], part: str, *prefix: str) -> dict[str, Told]:
    """Run a part of a script for programs, in as many processes as there are processors.

    Each line goes to standard error as it comes, so that a long run that is cut leaves them.
    """
    lines: list[str] = []

    def run(some: Sequence[str]) -> None:
        command = [*prefix, sys.executable, script, "--part", part, *some]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for line in process.stdout or ():
                print(line, end="", file=sys.stderr, flush=True)
                lines.append(line)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)

    count = min(len(names), os.cpu_count() or 1)
    with ThreadPoolExecutor(max(1, count)) as pool:
        list(pool.map(run, [names[start::count] for start in range(count)]))
    said = [json.loads(line) for line in lines if line.startswith("{")]
    return {line.pop("name"): Told(**line) for line in said}


def load() -> None:
    """Import once what the forks need."""
    import torch._dynamo
    import transformers

    assert torch._dynamo.config  # the first optimizer of a process imports it
    assert pytest_torchmem.estimate
    assert pytest_torchmem.measure
    for name in ("GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM", "MixtralForCausalLM"):
        getattr(transformers, name)


def told(program: Program, part: str) -> Told:
    return estimated(program) if part == "estimate" else measured(program, program.device)


def tell(name: str, program: Program, part: str) -> None:
    """Print what a program tells."""
    print(json.dumps({"name": name, **asdict(told(program, part))}), flush=True)


def tell_apart(name: str, program: Program, part: str) -> None:
    """Print what a program tells in a process of its own; what ends that is left behind."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.write(writing, json.dumps(asdict(told(program, part))).encode())
        # As a program ends: what was damaged is torn down.
        sys.exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    line = json.loads(said) if said else {}
    if status:
        line["behind"] = f"the process ended with {status}"
    print(json.dumps({"name": name, **line}), flush=True)


def row(name: str, device: str, here: Told, there: Told) -> tuple[str, ...]:
    if here.behind or there.behind:
        return name, device, "", "", "**fails**", here.behind or f"measured: {there.behind}"
    if here.refused:
        return name, device, "", "", "refused", here.refused
    error = here.peak / there.peak - 1 if there.peak else 0.0
    outcome = f"off by {error:+.1%}"
    if abs(here.peak - there.peak) <= SCALARS_BYTES:
        outcome = "exact"
    elif here.at_most is not None and here.peak < there.peak <= here.at_most:
        outcome = f"within, {error:+.1%}"
    elif abs(error) <= NEAR:
        outcome = f"near, {error:+.2%}"
    interval = f"{here.peak:,}"
    if here.at_most is not None and here.at_most > here.peak * (1 + NEGLIGIBLE):
        interval += f" to {here.at_most:,}"
    return name, device, f"{there.peak:,}", interval, outcome, "; ".join(here.notes)


def compare(programs: Mapping[str, Program], script: str, title: str, *, apart: bool) -> None:
    """Run a script's command line: print rows, and write a page. ``apart``: a process for each."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("programs", nargs="*", default=list(programs))
    parser.add_argument("--part", choices=["estimate", "measure"], help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.part:
        warnings.simplefilter("ignore")
        if apart:
            load()
        # Collections are then about what programs make.
        gc.freeze()
        for name in options.programs:
            (tell_apart if apart else tell)(name, programs[name], options.part)
        return
    here = told_by(script, options.programs, "estimate")
    simulate = (sys.executable, "-m", "pytest_torchmem", "simulate", "--gpu", GPU, "--")
    simulate = ("env", "CUBLAS_WORKSPACE_CONFIG=:0:0", *simulate)
    there: dict[str, Told] = {}
    for device, prefix in (("cpu", ()), ("cuda", simulate)):
        names = [n for n in here if programs[n].device == device and here[n].peak]
        there |= told_by(script, names, "measure", *prefix)
    rows = [
        row(name, programs[name].device, here[name], there.get(name, Told()))
        for name in options.programs
    ]
    for cells in rows:
        print(*cells, sep=" | ")
    if options.output:
        again = {cells[0] for cells in rows}
        kept = [cells for cells in rows_of(options.output) if cells[0] not in again]
        options.output.write_text(page([*kept, *rows], script, title), encoding="utf-8")


def rows_of(written: Path) -> list[tuple[str, ...]]:
    """Return the rows that a page has: what is not run again stays as it is."""
    lines = written.read_text(encoding="utf-8").splitlines() if written.exists() else []
    table = [line[1:-1].split(" | ") for line in lines if line.startswith("| ")]
    return [tuple(cell.strip() for cell in cells) for cells in table[1:]]


def page(rows: list[tuple[str, ...]], script: str, title: str) -> str:
    kinds = [cells[4].partition(",")[0].partition(" by")[0].strip("*") for cells in rows]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    what = title.split()[0].lower()
    headers = [what[:-1], "for", "measured, B", "estimated, B", "outcome", "notes, or the refusal"]
    return (
        f"# {title}\n\n"
        f"`python benchmarks/{Path(script).name}`, torch {torch.__version__}; for CUDA measured "
        f"on a simulated {GPU}. {len(rows)} {what}: {counts}. None may end its process, raise "
        "what is not ours or leave a fake tensor behind: such a one would be said to fail. "
        "*Within*: the estimate is an interval, and has what was measured. Rows of programs that "
        "were not run again are those of an earlier run.\n\n"
        + tabulate(rows, headers, tablefmt="github", disable_numparse=True)
        + "\n"
    )
