"""Updates that are killed: what is stored is always whole, and the next run cleans up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project import Project

pytestmark = pytest.mark.slow

MODULE = """
import os

SIZE = int(os.environ.get("SIZE", "1")) * MiB

@pytest.mark.memory_baseline
@pytest.mark.parametrize("number", range(60))
def test_a(number): use(SIZE)
"""

SAYS_WHEN_IT_ENDS = """
import pathlib

import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    if not hasattr(session.config, "workerinput"):
        pathlib.Path("finishing").touch()
"""


def killed(project: Project, kills: int, *arguments: str) -> dict[str, object]:
    for name in ("test_a", "test_b", "test_c"):
        project.write(MODULE, name)
    conftest = project.path / "conftest.py"
    conftest.write_text(conftest.read_text() + SAYS_WHEN_IT_ENDS)
    script = Path(__file__).with_name("killed_updates.py")
    seed = os.environ.get("TORCHMEM_KILLS_SEED", "0")
    done = subprocess.run(
        [sys.executable, script, project.path, str(kills), seed, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    print(said)
    return said


def check(said: dict[str, object], least_killed: int) -> None:
    assert said["last is whole"]
    assert said["litter"] == 0
    assert isinstance(said["killed"], int)
    assert said["killed"] >= least_killed


def test_three_updates_that_are_killed_leave_whole_baselines(project: Project) -> None:
    check(killed(project, 3), 1)


@pytest.mark.nightly
def test_updates_that_are_killed_with_their_workers_leave_whole_baselines(
    project: Project,
) -> None:
    pytest.importorskip("xdist")
    check(killed(project, 3, "-p", "xdist", "-n2"), 1)


@pytest.mark.nightly
def test_three_hundred_updates_that_are_killed_leave_whole_baselines(project: Project) -> None:
    check(killed(project, 270), 100)


@pytest.mark.nightly
def test_thirty_updates_that_are_killed_with_their_workers_leave_whole_baselines(
    project: Project,
) -> None:
    pytest.importorskip("xdist")
    check(killed(project, 30, "-p", "xdist", "-n2"), 10)


def test_a_baseline_of_two_runs_would_be_noticed(project: Project) -> None:
    from tests.faults.killed_updates import stored

    project.write(MODULE)
    project.update()
    assert list(stored(project.path / "__torchmem__")) == ["test_it.json"]
    text = project.baseline().read_text()
    line = next(line for line in text.splitlines() if '"test_a[7]", "work"' in line)
    name = '["test_a[7]", "'
    other = text.replace(line, line.replace("1048576", str(5 << 20)))
    other = other.replace(name + "1.0 MiB: activation 1.0", name + "5.0 MiB: activation 5.0")
    project.baseline().write_text(other)
    with pytest.raises(ValueError, match="is of the runs"):
        stored(project.path / "__torchmem__")
