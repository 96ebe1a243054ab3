"""The memory rows of Liger-Kernel's benchmark table, run again on simulated GPUs.

    python -m benchmarks liger_rows CHECKOUT [--kernel NAME ...] [--answers FILE] [--output FILE.md]

Others measured the rows on GPUs of six kinds, from 2024 on. CHECKOUT is a clone with its history:
each row is run by the script of the commit that brought it, with the torch that is installed here.
A row is equal where the peak is that of the table to the last digit that it has. All rows take
hours: FILE keeps the answers, and the page is made of all that it has. `--packages FOLDER` puts
older packages before the installed ones, such as a transformers of the time of a commit.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable
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
#: A row waits for `ptxas` above all.
PATIENCE_S: Final = 240
NEWEST: Final = "kernels of the newest commit"
Row = dict[str, str]

# A script hands the function that measures a row to `run_benchmarks`, and we call it ourselves.
RUNNER: Final = """
import gc, json, runpy, signal, sys, torch, torch.distributed.tensor

script, rows, patience_s = sys.argv[1], json.load(open(sys.argv[2])), int(sys.argv[3])
sys.path[:0] = sys.argv[4:]
import utils

found, last = {}, None
def note(bench_test_fn, metric_name, kernel_name=None, **_):
    global last
    if metric_name == "memory":
        found[kernel_name] = last = bench_test_fn
utils.run_benchmarks = note
# Of ten equal repetitions three are enough for a median.
measured = utils._test_memory
utils._test_memory = lambda func, _iter=10, **how: measured(func, _iter=min(_iter, 3), **how)
sys.argv = [script]
try:
    runpy.run_path(script, run_name="__main__")
except BaseException:
    if not found:
        raise
def late(*_):
    raise TimeoutError(f"takes more than {patience_s} s")
signal.signal(signal.SIGALRM, late)
types = {"torch.float32": torch.float32, "torch.bfloat16": torch.bfloat16,
         "torch.float16": torch.float16}
for number, row in enumerate(rows):
    config = json.loads(row["extra_benchmark_config_str"])
    config = {k: types.get(v, v) if isinstance(v, str) else v for k, v in config.items()}
    x = row["x_value"]
    try:
        x = int(float(x))
    except ValueError:
        pass
    measure = found.get(row["kernel_name"], last)
    signal.alarm(patience_s)
    try:
        made = measure(utils.SingleBenchmarkRunInput(
            x=x, kernel_provider=row["kernel_provider"],
            kernel_operation_mode=row["kernel_operation_mode"], extra_benchmark_config=config))
        answer = made.y_50
    except Exception as error:
        answer = f"{type(error).__name__}: {str(error)[:80]}"
    signal.alarm(0)
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


def run_rows(
    checkout: Path, commit: str, rows: list[Row], packages: tuple[str, ...]
) -> tuple[list[float | str], str]:
    """Return each row's peak in MiB on its GPU, simulated, or why it has none; and how it ran.

    Kernels that need libraries of their time are taken from the newest commit.
    """
    how = ", ".join(f"with {Path(folder).name}" for folder in packages)
    answers = run_with(checkout, commit, commit, rows, packages)
    if any(isinstance(answer, float) for answer in answers):
        return answers, how
    newest = run_with(checkout, commit, "HEAD", rows, packages)
    if any(isinstance(answer, float) for answer in newest):
        return newest, NEWEST
    return answers, how


def run_with(
    checkout: Path, commit: str, of_kernels: str, rows: list[Row], packages: tuple[str, ...]
) -> list[float | str]:
    """Run the scripts of a commit with the kernels of one."""
    name = SCRIPTS.get(rows[0]["kernel_name"], rows[0]["kernel_name"])
    with tempfile.TemporaryDirectory() as folder:
        for source, part in ((commit, ("benchmark/scripts", "test/*.py")), (of_kernels, ("src",))):
            command = ["git", "-C", str(checkout), "archive", source, *part]
            archive = subprocess.run(command, capture_output=True, check=True)
            subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
        scripts = Path(folder, "benchmark", "scripts")
        script = scripts / f"benchmark_{name}.py"
        if not script.exists():
            return [f"no script benchmark_{name}.py"] * len(rows)
        # It asks for its own release.
        version = rows[0]["liger_version"]
        facts = Path(folder, "src", f"liger_kernel-{version}.dist-info", "METADATA")
        facts.parent.mkdir()
        facts.write_text(f"Metadata-Version: 2.1\nName: liger_kernel\nVersion: {version}\n")
        given = Path(folder, "rows.json")
        runner = Path(folder, "runner.py")
        runner.write_text(RUNNER)
        gpu = GPUS[rows[0]["gpu_name"]]
        simulate = [sys.executable, "-m", "pytest_torchmem", "simulate", "--gpu", gpu, "--"]
        places = (*packages, str(scripts), str(Path(folder, "src")), folder)
        arguments = (str(script), str(given), str(PATIENCE_S), *places)
        answers: list[float | str] = []
        while len(answers) < len(rows):
            given.write_text(json.dumps(rows[len(answers) :]))
            command = [*simulate, sys.executable, str(runner), *arguments]
            left_s = PATIENCE_S * (len(rows) - len(answers))
            try:
                done = subprocess.run(
                    command,
                    cwd=scripts,
                    capture_output=True,
                    text=True,
                    check=False,
                    timeout=left_s,
                )
                out, end = done.stdout, (done.stderr.strip().splitlines() or [""])[-1][:100]
            except subprocess.TimeoutExpired as error:
                out, end = (error.stdout or b"").decode(), f"takes more than {PATIENCE_S} s"
            told = [line.split(" ", 2)[2] for line in out.splitlines() if line.startswith("ROW ")]
            answers += map(json.loads, told)
            if not told:  # it fails before the first of them
                answers += [end] * (len(rows) - len(answers))
    return answers


def is_equal(row: Row, peak: float) -> bool:
    return bool(torch.tensor(peak) == torch.tensor(float(row["y_value_50"])))


def page(found: Iterable[tuple[Row, float | str]]) -> str:
    """Return the Markdown: a line for each kernel, provider and kind of GPU."""
    groups: dict[tuple[str, str, str], list[tuple[Row, float | str]]] = defaultdict(list)
    for row, peak in found:
        key = (row["kernel_name"], row["kernel_provider"], GPUS[row["gpu_name"]])
        groups[key].append((row, peak))
    lines, total = [], Counter[str]()
    for (kernel, provider, gpu), rows in sorted(groups.items()):
        ran = [(row, peak) for row, peak in rows if isinstance(peak, float)]
        equal = sum(is_equal(row, peak) for row, peak in ran)
        off = [peak / float(row["y_value_50"]) - 1 for row, peak in ran if not is_equal(row, peak)]
        reasons = Counter(peak for _, peak in rows if isinstance(peak, str))
        spread = f"{min(off):+.2%} to {max(off):+.2%}" if off else ""
        reason = next(iter(reasons), rows[0][0]["how"])[:75]
        lines.append((kernel, provider, gpu, len(rows), len(ran), equal, spread, reason))
        total.update(rows=len(rows), ran=len(ran), equal=equal)
    headers = ("kernel", "provider", "GPU", "rows", "ran", "equal", "others", "why not run, or how")
    share = f"{total['equal'] / max(1, total['ran']):.0%}"
    return (
        "# Liger-Kernel's benchmark table on simulated GPUs\n\n"
        f"torch {torch.__version__}, {date.today()}. Made by `python -m benchmarks liger_rows`. "
        f"Of {total['rows']} rows {total['ran']} ran, and {total['equal']} of these ({share}) have "
        "the peak of the table to its last digit.\n\n"
        + tabulate(lines, headers, tablefmt="github", disable_numparse=True)
        + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--kernel", action="append", help="only this one; may be repeated")
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
    for key, rows in groups.items():
        if options.kernel and key[0] in options.kernel:
            commit = commit_of(options.checkout, rows[0]["timestamp"])
            packages = tuple(options.packages)
            kept[" ".join(key)] = run_rows(options.checkout, commit, rows, packages)
            if options.answers:
                options.answers.write_text(json.dumps(kept, indent=1), encoding="utf-8")
            print(*key, len(rows), file=sys.stderr, flush=True)
    found: list[tuple[Row, float | str]] = []
    for key, rows in groups.items():
        answers, how = kept.get(" ".join(key), (["not tried"] * len(rows), ""))
        found += [({**row, "how": how}, peak) for row, peak in zip(rows, answers, strict=True)]
    text = page(found)
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    print(text)
