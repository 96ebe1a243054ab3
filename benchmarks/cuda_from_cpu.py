"""What a CPU tells of a GPU: the allocator simulated, from a recording of the same code on the CPU.

    python benchmarks/cuda_from_cpu.py [case ...] [--output FILE.md]                # on a GPU, or:
    torchmem simulate -- python benchmarks/cuda_from_cpu.py

Each case makes a model and its inputs and runs two training steps with AdamW. It is recorded on the
CPU, and the simulated allocator is given what was recorded; and it is run on the device, in a new
process with nothing of ours around it, and torch's own counters are read. ``workspace`` is what
cuBLAS keeps there, which a CPU has not. What else differs are kernels: dropout keeps a mask of
floats on the CPU and of bytes on a device. `estimate` knows those, and needs neither.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import torch
from estimate_accuracy import CASES, train
from tabulate import tabulate

from pytest_torchmem import estimate
from pytest_torchmem.measuring.body_measurement import BodyMeasurement
from pytest_torchmem.record.devices import workspace_bytes
from pytest_torchmem.values.units import format_size

# cuDNN is not there on a simulated device, and elsewhere its scratch is its own affair.
LEFT_OUT = ("conv_net",)


def steps(case: str, device: torch.device) -> None:
    """The whole program: a model, its inputs, two steps."""
    torch.manual_seed(0)
    model, inputs = CASES[case]()
    model.to(device)
    inputs = {name: value.to(device) for name, value in inputs.items()}
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(2):
        optimizer.zero_grad()
        train(model, inputs)
        optimizer.step()


def counted(case: str) -> dict[str, int]:
    """The caching allocator's own peaks over the program on a device; called in a new process."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        steps(case, torch.device("cuda", 0))
    stats = torch.cuda.memory_stats()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    kept = (
        stats["allocated_bytes.all.current"]
        - torch.cuda.memory_stats()["allocated_bytes.all.current"]
    )
    peaks = {name: stats[f"{name}_bytes.all.peak"] for name in ("requested", "reserved")}
    return {**peaks, "workspace": kept}


def predicted(case: str) -> dict[str, int]:
    """The same from the CPU."""
    measurement = BodyMeasurement("cpu")
    measurement.start()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        steps(case, torch.device("cpu"))
    measurement.stop()
    peak = measurement.simulate().peak
    return {"requested": peak.requested, "reserved": peak.reserved}


def estimated(case: str) -> int:
    """The requested bytes that `estimate` gives for the device; nothing runs."""
    torch.manual_seed(0)
    model, inputs = CASES[case]()
    optimizer = functools.partial(torch.optim.AdamW, foreach=False)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return estimate(model, **inputs, optimizer=optimizer, device="cuda").peak.total


def row_of(case: str) -> list[Any]:
    command = [sys.executable, __file__, "--count", case]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    there = json.loads(done.stdout.splitlines()[-1])
    here = predicted(case)
    own = {name: there[name] - there["workspace"] for name in ("requested", "reserved")}
    cells: list[Any] = [case]
    for name in ("requested", "reserved"):
        error = here[name] / own[name] - 1
        cells += [format_size(here[name]), format_size(own[name]), f"{error:+.2%}"]
    told = estimated(case)
    error = told / own["requested"] - 1
    return [*cells, format_size(told), f"{error:+.2%}", format_size(there["workspace"])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=[c for c in CASES if c not in LEFT_OUT])
    parser.add_argument("--count", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help="write the table to this file, too")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device to compare with")
    if options.count:
        print(json.dumps(counted(options.count)))
        return
    header = [
        "case",
        *(
            f"{n} {w}"
            for n in ("requested", "reserved")
            for w in ("from the CPU", "on the device", "error")
        ),
        "requested, estimated",
        "error",
        "workspace",
    ]
    table = tabulate([row_of(case) for case in options.cases], header, tablefmt="github")
    text = (
        "# The caching allocator on a device, told from a recording on the CPU\n\n"
        f"`{' '.join(['python benchmarks/cuda_from_cpu.py', *sys.argv[1:]])}`, "
        f"torch {torch.__version__} on {torch.cuda.get_device_name()}, {date.today()}. On the "
        "device without the workspaces of cuBLAS, "
        f"{format_size(workspace_bytes(torch.device('cuda', 0))[0])} for each thread.\n\n{table}\n"
    )
    print(text)
    if options.output:
        options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
