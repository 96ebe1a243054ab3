"""What a simulated GPU costs: to start, for one large step, and for a suite of small tests.

    torchmem simulate --fetch            # once
    python -m benchmarks simulated_cost [start llama suite] [--output FILE.md]

Processor seconds of a process and all that it starts, the middle of three runs taken in turns, and
the most memory that one of them had. The suite is 200 tests, each with a limit, of a small training
step: on the CPU with the build for the CPU, and on a simulated GPU with torch's CUDA build.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import torch
from tabulate import tabulate

SIMULATE = (sys.executable, "-m", "pytest_torchmem", "simulate", "--gpu", "H100", "--")
# Says what a command took: a process counts its children once they have ended.
COUNT = """
import json, resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([used.ru_utime + used.ru_stime, used.ru_maxrss / 1024]))
"""
LLAMA = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=32000, hidden_size=4096, intermediate_size=11008,
                     num_hidden_layers=32, num_attention_heads=32)
with torch.device("meta"):
    model = LlamaForCausalLM(config).bfloat16()
model.to_empty(device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.zeros(1, 1024, dtype=torch.int64, device="cuda")
model(input_ids=tokens, labels=tokens).loss.backward()
optimizer.step()
print(torch.cuda.max_memory_allocated() / 2**30)
"""
TESTS = """
import pytest, torch
from torch import nn

@pytest.mark.parametrize("number", range(200))
@pytest.mark.memory_budget("128MiB")  # two workspaces of cuBLAS on a GPU
def test_a_step(torchmem, number):
    device = torchmem.device
    layers = [nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.ones(512, 256, device=device)
    model(x).square().mean().backward()
    optimizer.step()
"""


def counted(command: Sequence[str], folder: Path) -> tuple[float, float]:
    """Return the processor seconds and the MiB that a command took."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", COUNT, *command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    seconds, mib = json.loads(done.stdout.splitlines()[-1])
    return seconds, mib


def commands(part: str, folder: Path) -> dict[str, Sequence[str]]:
    """Return what is compared in a part of the table."""
    python = (sys.executable, "-c")
    if part == "start":
        load = "import torch; torch.zeros(1, device='{}')"
        return {
            "import torch, a tensor on the CPU": (*python, load.format("cpu")),
            "the same on a simulated GPU": (*SIMULATE, *python, load.format("cuda")),
        }
    if part == "llama":
        return {"Llama-7B in bf16, a step with AdamW": (*SIMULATE, *python, LLAMA)}
    (folder / "test_steps.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\n")
    run = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    simulated = (*run, "--torchmem-simulate=H100", "-otorchmem_device=cuda")
    return {"200 tests on the CPU": run, "the same on a simulated GPU": simulated}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=["start", "llama", "suite"])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for part in options.parts:
            compared = commands(part, Path(name))
            runs: dict[str, list[tuple[float, float]]] = {shown: [] for shown in compared}
            for _ in range(3):
                for shown, command in compared.items():
                    runs[shown].append(counted(command, Path(name)))
            for shown, found in runs.items():
                seconds = statistics.median(seconds for seconds, _ in found)
                rows.append((shown, f"{seconds:.1f}", f"{max(mib for _, mib in found):,.0f}"))
                print(*rows[-1], sep=" | ", flush=True)
    table = tabulate(rows, ["", "processor s", "most memory, MiB"], tablefmt="github")
    if options.output:
        options.output.write_text(
            "# What a simulated GPU costs\n\n"
            f"`python -m benchmarks simulated_cost`, torch {torch.__version__}, {date.today()}, "
            f"on {os.cpu_count()} cores with a load of {os.getloadavg()[2]:.0f}.\n\n"
            f"{table}\n",
            encoding="utf-8",
        )
