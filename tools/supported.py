"""Runs the quick tests with each supported release of torch, and writes down what was run.

    python tools/supported.py                # all of RELEASES: ten minutes each on two cores
    python tools/supported.py 2.13 2.15      # those with some releases of torch

Each row gets a virtual environment of its own, in a temporary folder. The table in CONTRIBUTING.md
has a row for each that was run, with the day and the commit; a row that is run again is replaced.
A row whose Python is not on the path is named and left out. pip takes torch from where it is
configured to: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu gives the builds for CPUs.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "CONTRIBUTING.md"
HEAD = "| torch | Python | pytest | numpy | quick tests | run |\n|---|---|---|---|---|---|\n"
CLOSING = re.compile(r"^(?=.*\bpassed\b).* in [\d.]+s\b.*$", re.MULTILINE)
OUTCOMES = ("passed", "failed", "error", "skipped")


class Releases(NamedTuple):
    """One row of the table, as the workflow's matrix has it: ``2.13`` is its newest patch."""

    torch: str
    python: str
    pytest: str
    numpy: str


RELEASES = (
    Releases("2.10", "3.11", "8.0", "1.24"),
    Releases("2.11", "3.12", "8.4", "2"),
    Releases("2.12", "3.13", "9", "2"),
    Releases("2.13", "3.11", "9", "2"),
    Releases("2.14", "3.14", "9", "2"),
    Releases("2", "3.14", "9", "2"),
)


def installed(python: Path, row: Releases) -> Releases:
    """Install a row into an environment, and return the releases that pip chose."""
    chosen = {"torch": row.torch, "pytest": row.pytest, "numpy": row.numpy}
    wanted = [f"{name}=={release}.*" for name, release in chosen.items()]
    pip = (python, "-m", "pip", "install", "-q", "--disable-pip-version-check")
    subprocess.run([*pip, "-e", f"{ROOT}[test]", *wanted], check=True)
    code = (
        "import platform; from importlib.metadata import version as v; "
        "print(v('torch'), platform.python_version(), v('pytest'), v('numpy'))"
    )
    told = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return Releases(*told.stdout.split())


def quick_tests(python: Path) -> str:
    """Run the quick tests and return what they came to; ``""`` where pytest came to no end."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONNOUSERSITE": "1"}
    ran = subprocess.run(
        [python, "-m", "pytest", "-n", "2", "-q", "-p", "no:cacheprovider", "-m", "not slow"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    print(ran.stdout[-4000:], flush=True)
    return told_outcomes(ran.stdout) if ran.returncode in (0, 1) else ""


def told_outcomes(printed: str) -> str:
    """Return the counts in pytest's closing line: ``1846 passed, 2 failed``; ``""`` without one."""
    found = CLOSING.findall(printed)
    counts = {name: re.search(rf"(\d+) {name}", found[-1]) for name in OUTCOMES} if found else {}
    return ", ".join(f"{count[1]} {name}" for name, count in counts.items() if count)


def with_rows(page: str, rows: Mapping[Releases, str]) -> str:
    """Return the page with these rows in its table; others stay, ordered by release."""
    begin = page.index(HEAD) + len(HEAD)
    end = re.compile(r"^(?!\|)", re.MULTILINE).search(page, begin)
    end_at = end.start() if end else len(page)
    known: dict[Releases, str] = {}
    for line in page[begin:end_at].splitlines():
        *releases, outcome, when = (cell.strip() for cell in line.strip("|").split("|"))
        known[Releases(*releases)] = f"{outcome} | {when}"
    known.update(rows)
    ordered = sorted(known, key=lambda row: [*map(_numbers, row)])
    lines = (f"| {' | '.join(releases)} | {known[releases]} |\n" for releases in ordered)
    return page[:begin] + "".join(lines) + page[end_at:]


def _numbers(release: str) -> list[int]:
    return [*map(int, re.findall(r"\d+", release.partition("+")[0]))]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("torch", nargs="*", help="releases of torch (default: all)")
    wanted = parser.parse_args(arguments).torch
    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    missing = 0
    for row in RELEASES:
        if wanted and row.torch not in wanted:
            continue
        interpreter = shutil.which(f"python{row.python}")
        outcome = ""
        if interpreter is None:
            print(f"torch {row.torch}: not run, there is no python{row.python} here")
        else:
            with tempfile.TemporaryDirectory() as folder:
                subprocess.run([interpreter, "-m", "venv", folder], check=True)
                python = Path(folder, "bin", "python")
                releases = installed(python, row)
                outcome = quick_tests(python)
        if outcome:
            told = {releases: f"{outcome} | {date.today()}, {commit.strip()}"}
            PAGE.write_text(with_rows(PAGE.read_text("utf-8"), told), encoding="utf-8")
        missing += not outcome
    return int(missing > 0)


if __name__ == "__main__":
    sys.exit(main())
