"""What recording adds to a body, in processor time and in memory: bare and measured, in turns.

    python -m benchmarks recording_cost [--repeat 3] [--large] [--output FILE.md]

Each row is a body that runs in a process of its own, once bare and once measured, in turns. Shown
are medians: the seconds and the growth of the resident memory's peak from just before the body to
the end of its analysis, and what measuring adds to each. The first test of a process is the first
time that a body is measured there; a small test is the median of those after it. A run before them
leaves Python's compiled files. ``--large`` adds 2,000,000 tiny operators, run once: that takes
minutes and some gigabytes.

Where there is a GPU the steps run on it. On a simulated one (``torchmem simulate``) kernels take no
time: that ratio is the one of host time, the least favourable.

The last line is what the installed plugin adds to a run of pytest that does not use it: the
processor time to collect and run one empty test in a new process that loads no other plugin.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path

import torch
from tabulate import tabulate
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name everybody knows

from pytest_torchmem.measuring.body_measurement import BodyMeasurement


def small_test() -> Callable[[], object]:
    model, x = nn.Linear(64, 64), torch.ones(8, 64)
    return lambda: model(x).sum().backward()


def small_test_beside_transformers() -> Callable[[], object]:
    importlib.import_module("transformers").GPT2LMHeadModel  # noqa: B018 - it is imported when asked for
    return small_test()


def tiny_operators(count: int) -> Callable[[], object]:
    x = torch.ones(3)

    def body() -> None:
        for _ in range(count):
            x + 1

    return body


def an_import() -> Callable[[], object]:
    def body() -> None:
        torch.ones(3)
        importlib.import_module("scipy.stats")
        importlib.import_module("sklearn.ensemble")

    return body


def training_steps() -> Callable[[], object]:
    """Ten steps of the GPT that `analysis_speed` measures, four times as wide, after three more."""
    from benchmarks.analysis_speed import GPT

    torch.manual_seed(0)
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = GPT(layers=12, width=256, vocabulary=1000).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, 1000, (4, 128), device=device)

    def steps(count: int = 10) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()

    steps(3)
    return steps


def a_compilation() -> Callable[[], object]:
    return lambda: torch.compile(nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))


BODIES = {
    "first small test": (small_test, 0),
    "small test": (small_test, 20),
    "small test, transformers imported": (small_test_beside_transformers, 20),
    **{f"{n:,} tiny operators": (partial(tiny_operators, n), 0) for n in (20_000, 100_000)},
    "ten steps of a GPT of twelve layers": (training_steps, 0),
    "import of scipy.stats and sklearn.ensemble": (an_import, 0),
    "first torch.compile": (a_compilation, 0),
}
LARGE = {"2,000,000 tiny operators": (partial(tiny_operators, 2_000_000), 0)}


def run(name: str, measured: bool) -> tuple[float, float]:
    """Return the seconds of a body in this process, and the MiB that its peak of memory rose by."""
    make, warmups = (BODIES | LARGE)[name]
    body = make()
    seconds = []
    before = _peak_mib()
    for _ in range(1 + warmups):
        begin = time.process_time()
        if measured:
            measurement = BodyMeasurement("cuda" if torch.cuda.is_available() else "cpu")
            measurement.start()
            body()
            measurement.stop()
        else:
            body()
        seconds.append(time.process_time() - begin)
    return statistics.median(seconds[1:] or seconds), _peak_mib() - before


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def apart(name: str, measured: bool) -> tuple[float, float]:
    """Return what `run` does in a new process."""
    command = [sys.executable, "-W", "ignore", __file__, "--only", name]
    done = subprocess.run(
        command + ["--measured"] * measured,
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""},
    )
    seconds, mib = json.loads(done.stdout.splitlines()[-1])
    return seconds, mib


def table(repeat: int, large: bool) -> str:
    rows = []
    # Else the first run alone would compile our files.
    apart("first small test", True)
    for name in BODIES | (LARGE if large else {}):
        times = 1 if name in LARGE else repeat
        runs = [(apart(name, False), apart(name, True)) for _ in range(times)]
        (bare, bare_mib), (full, full_mib) = (
            [statistics.median(values) for values in zip(*side, strict=True)]
            for side in zip(*runs, strict=True)
        )
        ratio = statistics.median(m[0] / b[0] for b, m in runs)
        added = f"{1000 * (full - bare):+,.0f} ms"
        rows.append(
            [
                name,
                f"{1000 * bare:,.1f} ms",
                added,
                f"{ratio:,.1f}x",
                f"+{full_mib - bare_mib:,.0f} MiB",
            ]
        )
    return tabulate(rows, ["body", "bare", "measured", "ratio", "peak RSS"], "github")


def unused(repeat: int) -> str:
    """Return what the plugin adds to pytest's start where no test uses it."""
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    plugins = {"without": (), "with": ("-p", "pytest_torchmem.plugin.hooks")}
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test_empty.py").write_text("def test_empty(): pass\n")
        Path(folder, "pytest.ini").touch()
        for _ in range(repeat):
            for name, arguments in plugins.items():
                command = [sys.executable, "-m", "pytest", "-q", *arguments, folder]
                before = _seconds_of_children()
                subprocess.run(command, check=True, capture_output=True, env=alone)
                seconds[name].append(_seconds_of_children() - before)
    without, loaded = (1000 * statistics.median(of) for of in seconds.values())
    return f"A run that does not use the plugin: {without:,.0f} ms, {loaded - without:+,.0f} ms."


def _seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description="What recording adds to a body")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--only", choices=BODIES | LARGE)
    parser.add_argument("--measured", action="store_true")
    options = parser.parse_args()
    if options.only:
        print(json.dumps(run(options.only, options.measured)))
        return
    text = "\n".join(
        [
            "# What recording adds to a body",
            "",
            f"torch {torch.__version__}, Python {sys.version.split()[0]}, {os.cpu_count()} cores, "
            f"{date.today()}. Made by `python -m benchmarks recording_cost "
            f"--repeat {options.repeat}{' --large' * options.large}`.",
            "",
            table(options.repeat, options.large),
            "",
            unused(5 * options.repeat),
            "",
        ]
    )
    print(text)
    if options.output:
        options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
