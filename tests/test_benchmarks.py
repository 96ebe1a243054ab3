"""One command for all benchmarks, which lists what there is."""

import importlib
import subprocess
import sys
from pathlib import Path

from benchmarks.__main__ import first_lines

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_each_benchmark_is_listed_with_a_line_of_its_own():
    listed = ran()
    assert listed.returncode == 1
    assert len(first_lines()) > 5
    assert all(f"  {name} " in listed.stderr and line for name, line in first_lines().items())
    assert "regressions" in first_lines()
    assert "workloads" not in first_lines()


def test_a_name_that_is_not_there_is_said():
    assert "there is no benchmark 'speed'" in ran("speed").stderr


def test_a_benchmark_gets_its_arguments():
    found = ran("scale", "--help")
    assert found.returncode == 0
    assert "usage: python -m benchmarks scale" in found.stdout
    assert "--entries" in found.stdout


def test_each_benchmark_has_what_the_command_calls():
    for name in first_lines():
        assert callable(importlib.import_module(f"benchmarks.{name}").main), name


def test_committed_results_are_few_enough_to_read():
    assert sum(file.stat().st_size for file in RESULTS.iterdir()) < 120_000
