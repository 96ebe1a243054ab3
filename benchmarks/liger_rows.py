"""The memory rows of Liger-Kernel's benchmark table, run again on simulated GPUs.

    python -m benchmarks liger_rows CHECKOUT [--kernel NAME ...] [--then] [--answers FILE]
        [--output FILE.md]

Others measured the rows on GPUs of six kinds, from 2024 on. CHECKOUT is a clone with its history:
each row is run by the script of the commit that brought it, with the torch that is installed here.
A process of theirs measured many rows, and timed them first: with `--then` the whole script runs,
with the torch that was the newest that day. A row is equal where the peak is that of the table to
the last digit that it has. All rows take hours: FILE keeps the answers, and the page is made of all
that it has. `--packages FOLDER` puts older packages before the installed ones, such as a
transformers of the time of a commit.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Final

import torch
from tabulate import tabulate

TABLE: Final = "benchmark/data/all_benchmark_data.csv"
GPUS: Final = {
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H100 PCIe": "H100-PCIE",
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA GeForce RTX 4090": "RTX4090",
    "NVIDIA GeForce RTX 3090": "RTX3090",
    "NVIDIA B200": "B200",
}
#: Scripts that stand for a kernel and are not named after it.
SCRIPTS: Final = {
    "tiled_geglu": "tiled_mlp",
    "tiled_swiglu": "tiled_mlp",
    "fused_linear_cpo_loss": "cpo_loss",
    "fused_linear_orpo_loss": "orpo_loss",
    "fused_linear_simpo_loss": "simpo_loss",
    "fused_linear_grpo_loss_token": "grpo_loss",
    "fused_linear_grpo_loss_sequence": "grpo_loss",
}
#: What a script is run with once more, for other rows.
MORE: Final = {"fused_moe": ("--sweep-dim=num_experts",)}
#: In the table the peaks before and after the commit are the same, and it removes a copy: it was
#: measured with the kernels of the commit before.
MEASURED_BEFORE: Final = {"fused_linear_cross_entropy"}
#: The newest release of torch from a day on; of its patches, one.
RELEASES: Final = {
    "2024-07-24": "2.4.1",
    "2024-10-17": "2.5.1",
    "2025-01-29": "2.6.0",
    "2025-04-23": "2.7.0",
    "2025-08-06": "2.8.0",
    "2025-10-15": "2.9.1",
    "2026-01-21": "2.10.0",
    "2026-03-23": "2.11.0",
    "2026-05-13": "2.12.1",
    "2026-07-08": "2.13.0",
}
#: A row waits for `ptxas` above all.
PATIENCE_S: Final = 900
NEWEST: Final = "kernels of the newest commit"
#: What is behind the name of answers that whole scripts gave.
THEN: Final = " then"
Row = dict[str, str]

# A script hands the function that measures a row to `run_benchmarks`. We call it ourselves, or let
# the script do all that it does.
RUNNER: Final = """
import gc, json, runpy, signal, sys, torch, torch.distributed.tensor

script, rows, patience_s, whole, places = sys.argv[1:6]
rows, patience_s = json.load(open(rows)), int(patience_s)
sys.path[:0] = json.loads(places)
import triton.testing, utils

def late(*_):
    raise TimeoutError(f"takes more than {patience_s} s")
signal.signal(signal.SIGALRM, late)
def measure(function, given):
    signal.alarm(patience_s)
    try:
        return function(given)
    finally:
        signal.alarm(0)
def why(error):
    return f"{type(error).__name__}: {str(error)[:80]}"
def number_of(x):
    try:
        return int(float(x))
    except ValueError:
        return x

# No peak depends on the weights.
for name in ("kaiming_uniform_", "normal_", "uniform_"):
    setattr(torch.nn.init, name, lambda tensor, *_, **how: tensor)
# Of ten equal repetitions three are enough for a median.
measured = utils._test_memory
utils._test_memory = lambda func, _iter=10, **how: measured(func, _iter=min(_iter, 3), **how)
# A timing calls hundreds of times, in which young garbage is collected; Triton's flush is there.
def timed(fn, *_, grad_to_none=None, quantiles=None, **how):
    fn()
    cache = torch.empty(256_000_000, dtype=torch.int8, device="cuda")
    for tensor in grad_to_none or ():
        tensor.grad = None
    fn()
    gc.collect(1)
    return [1.0] * len(quantiles) if quantiles else 1.0
triton.testing.do_bench = timed

found, last, run_all = {}, None, utils.run_benchmarks
def note(bench_test_fn, metric_name, kernel_name=None, **how):
    global last
    if metric_name == "memory":
        found[kernel_name] = last = bench_test_fn
    if not whole:
        return
    def tell(given):
        out = measure(bench_test_fn, given)
        config = json.dumps(given.extra_benchmark_config, cls=utils.CustomEncoder)
        mode = given.kernel_operation_mode or ""
        key = (kernel_name, given.kernel_provider, mode, number_of(given.x), config)
        for number, row in enumerate(rows):
            names = ("kernel_name", "kernel_provider", "kernel_operation_mode")
            own = (*(row[name] for name in names), number_of(row["x_value"]))
            if metric_name == "memory" and (*own, row["extra_benchmark_config_str"]) == key:
                print("ROW", number, json.dumps(out.y_50), flush=True)
        return out
    run_all(bench_test_fn=tell, metric_name=metric_name, kernel_name=kernel_name, **how)
utils.run_benchmarks = note
if whole:
    utils.update_benchmark_data_csv = utils.print_benchmark_data = lambda *_, **how: None
sys.argv = [script, *sys.argv[6:]]
try:
    runpy.run_path(script, run_name="__main__")
except BaseException as error:
    if whole or not found:
        sys.exit(why(error))
types = {"torch.float32": torch.float32, "torch.bfloat16": torch.bfloat16,
         "torch.float16": torch.float16}
for number, row in enumerate([] if whole else rows):
    config = json.loads(row["extra_benchmark_config_str"])
    config = {k: types.get(v, v) if isinstance(v, str) else v for k, v in config.items()}
    function = found.get(row["kernel_name"], last)
    try:
        answer = measure(function, utils.SingleBenchmarkRunInput(
            x=number_of(row["x_value"]), kernel_provider=row["kernel_provider"],
            kernel_operation_mode=row["kernel_operation_mode"], extra_benchmark_config=config)).y_50
    except Exception as error:
        answer = why(error)
    print("ROW", number, json.dumps(answer), flush=True)
    if isinstance(answer, str):
        break  # what failed may hold its tensors
    gc.collect()
    torch.cuda.empty_cache()
"""


def git(checkout: Path, *arguments: str) -> str:
    command = ["git", "-C", str(checkout), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def commit_of(checkout: Path, timestamp: str) -> str:
    """Return the commit that brought the rows of a time."""
    since = f"--since={timestamp.split()[0]}"
    for commit in git(checkout, "log", "--reverse", "--format=%H", since, "--", TABLE).split():
        if timestamp in git(checkout, "show", f"{commit}:{TABLE}"):
            return commit
    return git(checkout, "rev-parse", "HEAD").strip()


def release_of(day: str) -> str:
    """Return the newest release of torch of a day."""
    return RELEASES[max(first for first in RELEASES if first <= day)]


class Script:
    """The script of a commit that measures a kernel's rows, in a folder with kernels to measure."""

    def __init__(self, checkout: Path, commit: str, of_kernels: str, row: Row, place: str) -> None:
        folder = Path(place)
        for source, part in ((commit, ("benchmark/scripts", "test/*.py")), (of_kernels, ("src",))):
            command = ["git", "-C", str(checkout), "archive", source, *part]
            archive = subprocess.run(command, capture_output=True, check=True)
            subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
        # It asks for its own release.
        version = row["liger_version"]
        facts = folder / "src" / f"liger_kernel-{version}.dist-info" / "METADATA"
        facts.parent.mkdir()
        facts.write_text(f"Metadata-Version: 2.1\nName: liger_kernel\nVersion: {version}\n")
        (folder / "runner.py").write_text(RUNNER)
        name = SCRIPTS.get(row["kernel_name"], row["kernel_name"])
        self.path = folder / "benchmark" / "scripts" / f"benchmark_{name}.py"
        self.folder = folder
        self.gpu = GPUS[row["gpu_name"]]

    def run(
        self, rows: list[Row], packages: Sequence[str], release: str = "", more: Sequence[str] = ()
    ) -> tuple[dict[int, float | str], str]:
        """Return what a process says of each row's number, and its last words.

        With a ``release`` of torch the whole script runs, with ``more`` arguments.
        """
        given = self.folder / "rows.json"
        given.write_text(json.dumps(rows))
        places = (*packages, str(self.path.parent), str(self.folder / "src"), str(self.folder))
        chosen = ("--torch", release) if release else ()
        simulate = (sys.executable, "-m", "pytest_torchmem", "simulate", "--gpu", self.gpu, *chosen)
        runner = (sys.executable, str(self.folder / "runner.py"), str(self.path), str(given))
        how = (str(PATIENCE_S), "whole" if release else "", json.dumps(places), *more)
        try:
            done = subprocess.run(
                [*simulate, "--", *runner, *how],
                cwd=self.path.parent,
                capture_output=True,
                text=True,
                check=False,
                timeout=PATIENCE_S * max(10, len(rows)),
                env={**os.environ, "THP_MEM_ALLOC_ENABLE": "1"},  # weights are made on the host
            )
            out, end = done.stdout, (done.stderr.strip().splitlines() or [""])[-1][:100]
        except subprocess.TimeoutExpired as error:
            out, end = (error.stdout or b"").decode(), f"takes more than {PATIENCE_S} s"
        lines = [line.split(" ", 2) for line in out.splitlines() if line.startswith("ROW ")]
        return {int(number): json.loads(answer) for _, number, answer in lines}, end


def run_then(
    checkout: Path, commit: str, rows: list[Row], packages: Sequence[str]
) -> tuple[list[float | str], str]:
    """Return what each row's whole script measures with the torch of its day, and which that is."""
    release = release_of(rows[0]["timestamp"][:10])
    kernel = rows[0]["kernel_name"]
    of_kernels = f"{commit}^" if kernel in MEASURED_BEFORE else commit
    answers: dict[int, float | str] = {}
    with tempfile.TemporaryDirectory() as folder:
        script = Script(checkout, commit, of_kernels, rows[0], folder)
        for more in ((), *((each,) for each in MORE.get(kernel, ()))):
            found, end = script.run(rows, packages, release, more)
            answers |= found
    return [answers.get(number, end) for number in range(len(rows))], release


def run_here(
    checkout: Path, commit: str, rows: list[Row], packages: Sequence[str]
) -> tuple[list[float | str], str]:
    """Return each row's peak in MiB on its GPU, simulated, or why it has none; and how it ran.

    Kernels that need libraries of their time are taken from the newest commit.
    """
    how = ", ".join(f"with {Path(folder).name}" for folder in packages)
    answers = run_alone(checkout, commit, commit, rows, packages)
    if any(isinstance(answer, float) for answer in answers):
        return answers, how
    newest = run_alone(checkout, commit, "HEAD", rows, packages)
    if any(isinstance(answer, float) for answer in newest):
        return newest, NEWEST
    return answers, how


def run_alone(
    checkout: Path, commit: str, of_kernels: str, rows: list[Row], packages: Sequence[str]
) -> list[float | str]:
    """Measure each row alone, by the script of a commit and with the kernels of one."""
    answers: list[float | str] = []
    with tempfile.TemporaryDirectory() as folder:
        script = Script(checkout, commit, of_kernels, rows[0], folder)
        if not script.path.exists():
            return [f"no script {script.path.name}"] * len(rows)
        while len(answers) < len(rows):
            found, end = script.run(rows[len(answers) :], packages)
            answers += found.values()
            if not found:  # it fails before the first of them
                answers += [end] * (len(rows) - len(answers))
    return answers


def is_equal(row: Row, peak: float) -> bool:
    return bool(torch.tensor(peak) == torch.tensor(float(row["y_value_50"])))


@dataclass(frozen=True, slots=True)
class Answered:
    """A row with its peaks in MiB, or why it has none: alone, and in a script of its time."""

    row: Row
    here: float | str
    how: str
    then: float | str = ""
    release: str = ""

    @property
    def counted(self) -> float | str:
        """The one that the row is judged by: its own time's, where the script measures the row."""
        return self.then if isinstance(self.then, float) else self.here


def page(answered: Iterable[Answered]) -> str:
    """Return the Markdown: a line for each kernel, provider and kind of GPU."""
    groups: dict[tuple[str, str, str], list[Answered]] = defaultdict(list)
    for each in answered:
        row = each.row
        groups[row["kernel_name"], row["kernel_provider"], GPUS[row["gpu_name"]]].append(each)
    lines, total = [], Counter[str]()
    for key, rows in sorted(groups.items()):
        ran = [(each.row, each.counted) for each in rows if isinstance(each.counted, float)]
        here = sum(isinstance(each.here, float) and is_equal(each.row, each.here) for each in rows)
        equal = sum(is_equal(row, peak) for row, peak in ran)
        off = [peak / float(row["y_value_50"]) - 1 for row, peak in ran if not is_equal(row, peak)]
        reasons = Counter(each.counted for each in rows if isinstance(each.counted, str))
        spread = f"{min(off):+.2%} to {max(off):+.2%}" if off else ""
        reason = next(iter(reasons), rows[0].how)[:75]
        releases = ", ".join(sorted({each.release for each in rows if each.release}))
        then = str(equal) if releases else ""
        lines.append((*key, len(rows), len(ran), here, releases, then, spread, reason))
        total.update(rows=len(rows), ran=len(ran), here=here, equal=equal)
    own = ".".join(torch.__version__.split(".")[:2])
    headers = (
        *("kernel", "provider", "GPU", "rows", "ran", f"equal, alone, {own}"),
        *("torch of then", "equal, in its script", "others", "why not run, or how"),
    )
    share = f"{total['equal'] / max(1, total['ran']):.0%}"
    return (
        "# Liger-Kernel's benchmark table on simulated GPUs\n\n"
        f"torch {torch.__version__}, {date.today()}. Made by `python -m benchmarks liger_rows`. "
        f"Of {total['rows']} rows {total['ran']} ran, and {total['equal']} of these ({share}) have "
        f"the peak of the table to its last digit; {total['here']} have it alone, with the torch "
        "that is installed here.\n\n"
        + tabulate(lines, headers, tablefmt="github", disable_numparse=True)
        + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--kernel", action="append", help="only this one; may be repeated")
    parser.add_argument("--then", action="store_true", help="whole scripts, the torch of their day")
    parser.add_argument("--packages", action="append", default=[], help="goes before the installed")
    parser.add_argument("--answers", type=Path, help="has the answers of earlier runs, takes these")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    table = csv.DictReader(io.StringIO(git(options.checkout, "show", f"HEAD:{TABLE}")))
    # One process ran all modes of a day: a workspace of one is there in the next.
    groups: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in table:
        if row["metric_name"] == "memory":
            groups[row["kernel_name"], row["gpu_name"], row["timestamp"][:10]].append(row)
    kept: dict[str, tuple[list[float | str], str]] = {}
    if options.answers and options.answers.exists():
        kept = json.loads(options.answers.read_text(encoding="utf-8"))
    run, kind = (run_then, THEN) if options.then else (run_here, "")
    for key, rows in groups.items():
        if options.kernel and key[0] in options.kernel:
            commit = commit_of(options.checkout, rows[0]["timestamp"])
            kept[" ".join(key) + kind] = run(options.checkout, commit, rows, options.packages)
            if options.answers:
                options.answers.write_text(json.dumps(kept, indent=1), encoding="utf-8")
            print(*key, len(rows), file=sys.stderr, flush=True)
    answered: list[Answered] = []
    for key, rows in groups.items():
        here, how = kept.get(" ".join(key), (["not tried"] * len(rows), ""))
        then, release = kept.get(" ".join(key) + THEN, ([""] * len(rows), ""))
        for row, alone, whole in zip(rows, here, then, strict=True):
            answered.append(Answered(row, alone, how, whole, release))
    text = page(answered)
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    print(text)
