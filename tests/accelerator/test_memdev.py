"""The plugin on an accelerator that is neither CUDA nor a stand-in in Python; see memdev.cpp.

Building it takes about 10 seconds, once for all runs on a machine.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.accelerator import memdev

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.skipif(bool(memdev.missing()), reason=memdev.missing()),
]

INI = """
[pytest]
addopts = -p no:cacheprovider -p no:logging -otorchmem_device=memdev -rA
"""


@pytest.fixture(scope="session")
def library(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = getattr(pytestconfig, "cache", None)
    return memdev.build(cache.mkdir("memdev") if cache else tmp_path_factory.mktemp("memdev"))


class Project:
    """A folder with the bodies of one file, to be run with pytest in a process of its own."""

    def __init__(self, path: Path, library: Path) -> None:
        self.path = path
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(memdev.HERE), os.environ.get("PYTHONPATH", "")]),
            "MEMDEV_LIBRARY": str(library),
            "COLUMNS": "400",
        }
        (path / "pytest.ini").write_text(INI)
        (path / "conftest.py").write_text("import memdev_device\n")

    def add(self, bodies: str) -> None:
        source = memdev.HERE / f"bodies_{bodies}.py"
        (self.path / f"test_{bodies}.py").write_text(source.read_text(encoding="utf-8"))

    def run(self, *options: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options],
            cwd=self.path,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout + done.stderr


def test_numbers_are_those_of_the_devices_own_counters(library: Path, tmp_path: Path) -> None:
    project = Project(tmp_path, library)
    project.add("counted")
    said = project.run()
    assert re.search(r"=+ \d+ passed in", said), said


@pytest.fixture(scope="module")
def said(library: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What pytest said of bodies with limits, and of one with a baseline in two runs."""
    project = Project(tmp_path_factory.mktemp("limits"), library)
    project.add("limits")
    first = project.run("test_limits.py", "--torchmem-update-baseline")
    (stored,) = project.path.glob("__torchmem__/*/test_limits.json")
    assert stored.parent.name.startswith("memdev-torch2.")
    project.environment["GROWN"] = "1"
    return first + project.run("-k", "test_baseline", "test_limits.py")


LIMITS = {
    "training_within_its_limits": ("PASSED", ""),
    "too_much_activation": (
        "FAILED",
        "activation peaked at 28.0 KiB, +27.0 KiB (+2,700 %) over the limit of 1.0 KiB: "
        "largest 12.0 KiB from aten::ones (test_limits.py:",
    ),
    "something_is_kept": (
        "FAILED",
        "retained 40.0 KiB, +39.0 KiB (+3,900 %) over the limit of 1.0 KiB: "
        "largest 40.0 KiB of temporary from aten::ones (test_limits.py:",
    ),
    "growth": ("FAILED", "grew by 8.0 KiB per step, +8.0 KiB over the limit of 0 B"),
    "nothing_on_the_device": ("FAILED", "the body used no memory on memdev:0: the reading is 0 B"),
    "out_of_memory": ("FAILED", "memdev out of memory: tried to allocate 81920 bytes"),
    "a_counter_that_says_nothing": (
        "FAILED",
        "the limit of 1.0 MiB on active memory cannot be judged: the allocator of memdev:0 counted "
        "no active bytes at all [no-counter]",
    ),
    "baseline": (
        "FAILED",
        "memory peaked at 40.0 KiB, +20.0 KiB (+100 %) over the baseline of 20.0 KiB: ",
    ),
}


@pytest.mark.parametrize("body", LIMITS)
def test_limits_and_baselines_hold_on_the_device(said: str, body: str) -> None:
    outcome, sentence = LIMITS[body]
    assert re.search(
        rf"^{outcome} test_limits\.py::test_{body}\b.*{re.escape(sentence)}", said, re.M
    )


def test_what_was_live_when_memory_ran_out_is_told(said: str) -> None:
    assert (
        "ran out of memory on memdev:0 with 50.0 KiB live: largest 50.0 KiB of temporary from "
        "aten::ones (test_limits.py:"
    ) in said


def test_a_device_that_is_missing_skips_its_test(said: str) -> None:
    assert (
        "not measured: test_limits.py::test_a_device_that_is_missing: memdev:7 is not there"
    ) in said
