"""Other projects' tests, each with a baseline: what the plugin changes, and what it costs.

    python -m benchmarks suites CHECKOUT tests/of/it [...] [--name NAME] [--output FILE.md]

Runs the tests six times in processes of their own: without the plugin; with it and no marker; with
every test marked with ``memory_baseline`` and its baseline written; compared with it in order,
shuffled, and on two workers. A run before these leaves Python's compiled files. Shown are the tests
whose outcome is another than without the plugin, which for a comparison are false alarms, the
processor time and the peak of the resident memory.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

import torch
from tabulate import tabulate

# Marks every test, and shuffles them where asked to.
PLUGIN = """
import os, random, pytest

def pytest_collection_modifyitems(items):
    if os.environ.get("SUITE_MARKED"):
        for item in items:
            item.add_marker(pytest.mark.memory_baseline)
    if os.environ.get("SUITE_SHUFFLED"):
        random.Random(0).shuffle(items)
"""
RUNS = {
    "without": ["-p", "no:torchmem"],
    "unused": [],
    "baselines written": ["--torchmem-update-baseline"],
    "compared": [],
    "compared, shuffled": [],
    "compared, two workers": ["-n", "2"],
}
# Where a project keeps its sources in a folder of its own.
_PATHS = [path for path in [os.environ.get("PYTHONPATH")] if path]


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a suite: outcomes by test, processor seconds, peak resident MiB of a process."""

    outcomes: dict[str, str]
    seconds: float
    peak_mib: float


def run(name: str, checkout: Path, tests: Sequence[str], folder: Path) -> Run:
    report = folder / "outcomes.xml"
    marked = name not in ("without", "unused")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), str(checkout), *_PATHS]),
        "SUITE_MARKED": "1" * marked,
        "SUITE_SHUFFLED": "1" * ("shuffled" in name),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "",
    }
    options = ["-q", "-p", "suite_plugin", "-p", "no:cacheprovider", f"--junitxml={report}"]
    if marked:
        options.append(f"-otorchmem_baseline_dir={folder / 'baselines'}")
    command = [sys.executable, "-W", "ignore", "-c", _TIMED, *options, *RUNS[name], *tests]
    done = subprocess.run(
        command, check=False, cwd=checkout, env=environment, capture_output=True, text=True
    )
    if not report.exists():
        raise SystemExit(f"{name}: no report\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    seconds, peak_kib = map(float, done.stderr.splitlines()[-1].split())
    outcomes = _outcomes(report)
    report.unlink()
    return Run(outcomes, seconds, peak_kib / 1024)


# Its own processor time and that of its workers; the peak is that of the largest process.
_TIMED = """
import resource, sys, pytest
code = pytest.main(sys.argv[1:])
kinds = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
usages = [resource.getrusage(kind) for kind in kinds]
seconds = sum(usage.ru_utime + usage.ru_stime for usage in usages)
print(f"\\n{seconds} {max(usage.ru_maxrss for usage in usages)}", file=sys.stderr)
"""


def _outcomes(report: Path) -> dict[str, str]:
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        bad = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        found[f"{case.get('classname')}::{case.get('name')}"] = bad[0] if bad else "passed"
    return found


def table(checkout: Path, tests: Sequence[str]) -> str:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "suite_plugin.py").write_text(PLUGIN)
        # Else the first run alone would compile every file that pytest rewrites, or all runs would.
        run("baselines written", checkout, tests, folder)
        runs = {name: run(name, checkout, tests, folder) for name in RUNS}
        shutil.rmtree(folder / "baselines", ignore_errors=True)
    bare, rows = runs["without"], []
    for name, one in runs.items():
        names = bare.outcomes.keys() | one.outcomes.keys()
        other = [n for n in names if bare.outcomes.get(n) != one.outcomes.get(n)]
        rows.append(
            [
                name,
                len(one.outcomes),
                len(other),
                f"{one.seconds:.1f} s",
                f"{one.seconds / bare.seconds:.2f}x",
                f"{one.peak_mib:,.0f} MiB",
                f"{one.peak_mib / bare.peak_mib:.2f}x",
            ]
        )
        for test in sorted(other)[:10]:
            was, now = bare.outcomes.get(test), one.outcomes.get(test)
            print(f"{name}: {test}: {was} -> {now}", file=sys.stderr)
    heads = ["run", "tests", "other outcome", "processor", "ratio", "peak RSS", "ratio"]
    return tabulate(rows, heads, "github", disable_numparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Other projects' tests, each with a baseline")
    parser.add_argument("checkout", type=Path)
    parser.add_argument("tests", nargs="+")
    parser.add_argument("--name", default="")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    name = options.name or options.checkout.name
    versions = f"torch {torch.__version__}, Python {sys.version.split()[0]}, {date.today()}"
    text = "\n".join(
        [
            f"## {name}: {' '.join(options.tests)}",
            "",
            f"{versions}.",
            "",
            table(options.checkout.resolve(), options.tests),
            "",
        ]
    )
    print(text)
    if options.output:
        with options.output.open("a", encoding="utf-8") as file:
            file.write("\n" + text)
