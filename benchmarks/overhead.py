"""What measuring costs: the time of a body that is measured beside the bare body, in one run.

    python -m benchmarks overhead [--device cpu] [--clock wall|processor] [--repeat 15]
                                  [--output FILE.md]

The body is a training step of a 12-layer GPT. Within a round the ways take turns, and each ratio is
that of a round; shown are the medians. Only the body is timed, the bare one, too, after garbage
was collected: what is done before and after it (settling the device, reading the recording,
analysing it) is told apart.

* measured: all that `Recorder` does, which every category, line and module comes from.
* profiler alone: torch's profiler with shapes, memory and stacks, and nothing of ours beside it.

The step is small: a fast GPU waits for Python most of the time, and then the ratio is that of host
time, the least favourable one. On a CUDA device that is simulated (`torchmem simulate`) kernels
take no time at all, and the ratio is that of host time alone; ask for ``--clock processor`` there.

The last table is what the installed plugin adds to a run of pytest that does not use it: the
processor time to collect and run one empty test in a new process that loads no other plugin, with
ours and without.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from tabulate import tabulate
from torch.nn import functional as F  # noqa: N812 - the name everybody knows

from benchmarks.analysis_speed import GPT
from pytest_torchmem.analysis.pipeline import analyze_trace
from pytest_torchmem.record.devices import settle, synchronize
from pytest_torchmem.record.recorder import Recorder
from pytest_torchmem.record.torch_api import profiler

GOAL = 1.20
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


def training_step(device: torch.device) -> Callable[[], None]:
    """A step of the GPT that `analysis_speed` measures, four times as wide, warmed up."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = GPT(layers=12, width=256, vocabulary=1000).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, 1000, (4, 128), device=device)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()

    for _ in range(3):
        step()
    return step


class Clock:
    """Seconds of the body alone."""

    def __init__(self, device: torch.device, now: Callable[[], float]) -> None:
        self._device, self._now = device, now

    def time(self, body: Callable[[], None]) -> float:
        synchronize(self._device)
        start = self._now()
        body()
        synchronize(self._device)
        return self._now() - start


class Kinds:
    """Times a body in each way; ``around`` collects what is spent before and after it."""

    def __init__(self, device: torch.device, clock: Clock, body: Callable[[], None]) -> None:
        self._device, self._clock, self._body = device, clock, body
        self.around: dict[str, list[float]] = {"settle": [], "read": [], "analyse": []}

    def bare(self) -> float:
        # What is measured begins after a collection of garbage, with cold caches. So does this.
        gc.collect()
        settle(self._device)
        return self._clock.time(self._body)

    def profiler_alone(self) -> float:
        session = profiler.Session()
        session.start()
        seconds = self._clock.time(self._body)
        session.stop()
        return seconds

    def measured(self) -> float:
        recorder = Recorder(self._device)
        begin = time.process_time()
        recorder.start()
        started = time.process_time()
        seconds = self._clock.time(self._body)
        ended = time.process_time()
        trace = recorder.stop()
        read = time.process_time()
        analyze_trace(trace).result()
        self.around["settle"].append(started - begin)
        self.around["read"].append(read - ended)
        self.around["analyse"].append(time.process_time() - read)
        return seconds


def step_table(device: torch.device, clock: Clock, repeat: int) -> str:
    step = Kinds(device, clock, training_step(device))
    kinds = {"profiler alone": step.profiler_alone, "measured": step.measured}
    ratios: dict[str, list[float]] = {name: [] for name in kinds}
    bare = []
    for _ in range(repeat):
        before = step.bare()
        for name, timed in kinds.items():
            seconds = timed()
            after = step.bare()
            # The bare body right before and right after: a slow moment slows all three.
            ratios[name].append(2 * seconds / (before + after))
            bare.append(before := after)
    medians = {name: statistics.median(values) for name, values in ratios.items()}
    rows = [
        [name, f"{median:.3f}x", f"{min(ratios[name]):.3f}x", _goal(name, median)]
        for name, median in medians.items()
    ]
    lines = [tabulate(rows, ["", "median", "least", "goal"], "github"), ""]
    lines.append(f"The bare body takes {statistics.median(bare):.3f} s. Around a recorded one:")
    spent = {name: statistics.median(values) for name, values in step.around.items()}
    lines.append(", ".join(f"{name} {seconds:.3f} s" for name, seconds in spent.items()) + ".")
    return "\n".join(lines)


def _goal(name: str, ratio: float) -> str:
    if name != "measured":
        return ""
    return f"{GOAL:.2f}x, {'reached' if ratio <= GOAL else 'missed'}"


def start_table(repeat: int) -> str:
    """What the plugin adds to pytest's start when no test uses it; no other plugin is loaded."""
    times: dict[str, list[float]] = {"without": [], "with": []}
    plugins = {"without": (), "with": ("-p", "pytest_torchmem.plugin.hooks")}
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test_empty.py").write_text("def test_empty(): pass\n")
        Path(folder, "pytest.ini").touch()
        for _ in range(repeat):
            for name, arguments in plugins.items():
                command = [sys.executable, "-m", "pytest", "-q", *arguments, folder]
                times[name].append(_processor_seconds(command, alone))
    rows = []
    for name, chosen in (("median", statistics.median), ("least", min)):
        without, loaded = chosen(times["without"]), chosen(times["with"])
        added = f"{1000 * (loaded - without):.0f} ms"
        rows.append([name, f"{without:.3f} s", f"{loaded:.3f} s", added])
    return tabulate(rows, ["", "pytest without", "with the plugin", "added"], "github")


def _processor_seconds(command: list[str], environment: dict[str, str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


_SIMULATED = [
    "The device is simulated and runs no kernels. This is host time: what a step costs that a GPU "
    "finishes sooner than Python asks for it.",
    "",
]


def main() -> None:
    parser = argparse.ArgumentParser(description="What measuring costs")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--clock", choices=CLOCKS, help="default: processor for the CPU, else wall")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    clock = options.clock or ("processor" if device.type == "cpu" else "wall")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    text = "\n".join(
        [
            "# What measuring costs",
            "",
            f"torch {torch.__version__}, Python {sys.version.split()[0]}, {name}, "
            f"{date.today()}. Made by `python -m benchmarks overhead --device {options.device} "
            f"--clock {clock} --repeat {options.repeat}`.",
            "",
            *_SIMULATED * ("simulated" in name),
            step_table(device, Clock(device, CLOCKS[clock]), options.repeat),
            "",
            "Installed and not used:",
            "",
            start_table(options.repeat),
            "",
        ]
    )
    print(text)
    if options.output:
        options.output.write_text(text, encoding="utf-8")
