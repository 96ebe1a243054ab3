"""Measuring where pytest is not: scripts, unittest, child processes; and the page about it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from pytest_torchmem import MiB, load
from tests.documents import DOCS, blocks, run

pytestmark = pytest.mark.slow

PAGE = DOCS / "outside-pytest.md"


def run_script(folder: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(code, encoding="utf-8")
    return run(folder, "script.py", *arguments)


def test_a_script_measures_without_pytest_and_leaves_a_file(tmp_path):
    code = """
import sys

import torch

from pytest_torchmem import measure

with measure("work", device="cpu", output="mem.json") as work:
    kept = torch.ones(1 << 20)
assert "pytest" not in sys.modules and "_pytest" not in sys.modules
print(work.peak.total)
"""
    done = run_script(tmp_path, code)
    assert (done.stdout, done.stderr) == (f"{4 * MiB}\n", "")
    assert load(tmp_path / "mem.json")["work"].retained.total == 4 * MiB


def test_a_script_over_its_limit_ends_with_the_sentence(tmp_path):
    code = """
import torch

from pytest_torchmem import measure


@measure("work", "1MiB", device="cpu")
def work():
    torch.ones(1 << 20)


work()
"""
    done = run_script(tmp_path, code)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "pytest_torchmem.types.LimitError: in 'work', memory peaked at 4.0 MiB, +3.0 MiB (+300 %) "
        "over the "
        "limit of 1.0 MiB: largest 4.0 MiB of temporary from aten::ones at script.py:9 [over-limit]"
    )


def test_importing_measure_does_not_touch_a_device(tmp_path):
    code = """
import sys

from pytest_torchmem import measure


@measure(activation="1GiB")
def work(): ...


assert "torch" not in sys.modules
"""
    done = run_script(tmp_path, code)
    assert done.returncode == 0, done.stderr


def test_a_test_case_fails_where_a_limit_is_exceeded(tmp_path):
    (tmp_path / "test_case.py").write_text(
        """
import unittest

import torch

from pytest_torchmem import measure


class TestMemory(unittest.TestCase):
    def test_within(self):
        with measure(total="4MiB", device="cpu") as block:
            torch.ones(1 << 20)
        self.assertEqual(block.peak.total, 4 << 20)

    @measure(total="1MiB", device="cpu")
    def test_over(self):
        torch.ones(1 << 20)
""",
        encoding="utf-8",
    )
    done = run(tmp_path, "-m", "unittest", "test_case")
    assert "FAIL: test_over" in done.stderr
    assert (
        "in 'TestMemory.test_over', memory peaked at 4.0 MiB, +3.0 MiB (+300 %) over the limit of "
        "1.0 MiB: "
    ) in done.stderr
    assert done.stderr.endswith("FAILED (failures=1)\n")


def test_a_child_process_sends_its_result(tmp_path):
    code = """
import multiprocessing

import torch

from pytest_torchmem import measure
from pytest_torchmem.types import LimitError


def work(size):
    with measure("work", "4MiB", device="cpu") as block:
        torch.ones(size << 18)
    return block.result


if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        result = pool.apply(work, (3,))
        print(result.name, result.peak.total, result.peak.live[0].source)
        try:
            pool.apply(work, (5,))
        except LimitError as error:
            print(error.sentences[0])
"""
    done = run_script(tmp_path, code)
    assert done.stdout.splitlines() == [
        f"work {3 * MiB} script.py:12",
        "in 'work', memory peaked at 5.0 MiB, +1.0 MiB (+25 %) over the limit of 4.0 MiB: "
        "largest 5.0 MiB of temporary from aten::ones at script.py:12",
    ], done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_process_forked_within_a_measurement_is_told_so(tmp_path):
    code = """
import os

from pytest_torchmem import measure
from pytest_torchmem.values.errors import RecordingError

with measure(device="cpu"):
    child = os.fork()
    if not child:
        try:
            with measure(device="cpu"):
                pass
        except RecordingError as error:
            print(error, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
    done = run_script(tmp_path, code)
    assert done.stdout.startswith("this process was forked while its parent was measured"), (
        done.stderr
    )


def named(blocks_of_page: list[str]) -> dict[str, str]:
    """Return the examples by the file that their first line names."""
    return {re.match(r"# (\S+)\n", block)[1]: block for block in blocks_of_page}


@pytest.fixture(scope="module")
def examples(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    for name, code in named(blocks(PAGE, "python")).items():
        (folder / name).write_text(code, encoding="utf-8")
    return folder


def test_the_examples_of_the_page_run(examples):
    done = run(examples, "train.py")
    assert done.returncode == 0, done.stderr
    assert "memory peaked at" in done.stdout
    assert list(load(examples / "mem.json")) == ["train step", "train step::first"]  # type: ignore[arg-type]


@pytest.mark.nightly
def test_the_job_of_the_page_runs(examples):
    done = run(examples, "ranks.py")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"[01] \d+ \d+\n", done.stdout), done.stdout


def test_the_unittest_of_the_page_runs(examples):
    done = run(examples, "-m", "unittest", "test_unit")
    assert done.stderr.endswith("OK\n")


@pytest.mark.nightly
def test_the_commands_of_the_page_run(examples):
    (command,) = [
        line for block in blocks(PAGE, "sh") for line in block.splitlines() if "torchrun" in line
    ]
    words = command.partition("#")[0].split()
    assert words[0] == "torchrun"
    done = run(examples, "-m", "torch.distributed.run", *words[1:])
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in examples.glob("run-*")} == {"run-rank0.json", "run-rank1.json"}
