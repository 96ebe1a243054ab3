"""Beside other plugins, in workers, and where a run ends early: nothing is lost, or it is said."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.project import Project

pytestmark = pytest.mark.slow

TESTS = """
import os

SIZE = int(os.environ.get("SIZE", "10")) * MiB

@pytest.mark.memory_baseline
@pytest.mark.parametrize("number", range(1, 5))
def test_a(number): use(number * SIZE)

class TestGroup:
    @pytest.mark.memory_baseline
    def test_b(self): use(10 * MiB)

    @pytest.mark.memory_budget("1GiB")
    def test_c(self, torchmem):
        with torchmem.measure("region") as region:
            use(MiB)
        torchmem.check(region)
"""
STORED = {
    **{f"test_a[{number}]": number * 10 for number in range(1, 5)},
    "TestGroup::test_b": 10,
    "TestGroup::test_c::region": 1,
}

PLUGINS = {
    "timeout by signal": ("pytest_timeout", "--timeout=100", "--timeout-method=signal"),
    "timeout by thread": ("pytest_timeout", "--timeout=100", "--timeout-method=thread"),
    "another order": ("pytest_randomly", "--randomly-seed=4"),
    "reruns": ("pytest_rerunfailures", "--reruns=2"),
    "async": ("pytest_asyncio.plugin", "--asyncio-mode=auto"),
    "coverage": ("pytest_cov.plugin", "--cov=.", "--cov-branch"),
    "load": ("xdist", "-n2", "--dist=load"),
    "scopes": ("xdist", "-n2", "--dist=loadscope"),
    "files": ("xdist", "-n2", "--dist=loadfile"),
    "groups": ("xdist", "-n2", "--dist=loadgroup"),
    "stealing": ("xdist", "-n2", "--dist=worksteal"),
}


def sizes(project: Project) -> dict[str, int]:
    return {key: entry["total"] >> 20 for key, entry in project.entries().items()}


def needs(plugin: str) -> None:
    if importlib.util.find_spec(plugin.partition(".")[0]) is None:
        pytest.skip(f"needs {plugin.partition('.')[0]}, which is not installed")


@pytest.mark.nightly("files", "groups", "load", "scopes")
@pytest.mark.parametrize("name", PLUGINS)
def test_the_same_is_stored_and_judged_beside_another_plugin(
    project: Project, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin, *arguments = PLUGINS[name]
    needs(plugin)
    project.write(TESTS)
    with monkeypatch.context() as before:
        before.setenv("SIZE", "5")
        project.update("-k", "1 or 4").assert_outcomes(passed=2, deselected=4)
    # In one run two tests are judged, and what has no baseline yet is stored.
    accept_new = ("--torchmem-update-baseline", "--torchmem-accept=new")
    result = project.run_apart("-p", plugin, *arguments, *accept_new)
    outcomes = result.parseoutcomes()
    assert (outcomes["failed"], outcomes["passed"]) == (2, 4)
    result.stdout.fnmatch_lines(
        [
            "*40.0 MiB *grown, +20.0 MiB (+100 %)*",
            "memory: 2 failed (2 over a limit or baseline), 4 *",
        ]
    )
    assert sizes(project) == {**STORED, "test_a[1]": 5, "test_a[4]": 20}


REPEATED = """
import os

SIZES = iter(map(int, os.environ["SIZES"].split()))

@pytest.mark.memory_baseline
@pytest.mark.parametrize("name", ["a-1"])
def test_a(name): use(next(SIZES) * MiB)

@pytest.mark.memory_baseline
def test_b(): use(10 * MiB)
"""
REPEATERS = {
    "repeat": ("pytest_repeat", "--count=3"),
    "flakefinder": ("pytest_flakefinder", "--flake-finder", "--flake-runs=3"),
}


@pytest.mark.parametrize("name", REPEATERS)
def test_the_repetitions_of_a_test_share_its_entry(
    project: Project, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin, *arguments = REPEATERS[name]
    needs(plugin)
    project.write(REPEATED)
    monkeypatch.setenv("SIZES", "10")
    project.update().assert_outcomes(passed=2)

    monkeypatch.setenv("SIZES", "10 30 10")
    result = project.run_apart("-p", plugin, *arguments)
    result.assert_outcomes(passed=5, failed=1)
    result.stdout.fnmatch_lines(
        [
            "*memory peaked at 30.0 MiB, +20.0 MiB (+200 %) over the baseline of 10.0 MiB*",
            "*pytest *::test_a[[]a-1[]]* --torchmem-update-baseline",
        ]
    )
    result.stdout.no_fnmatch_line("*unused*")


@pytest.mark.parametrize("name", REPEATERS)
def test_the_largest_repetition_is_stored(
    project: Project, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin, *arguments = REPEATERS[name]
    needs(plugin)
    project.write(REPEATED)
    monkeypatch.setenv("SIZES", "10 30 20")
    result = project.run_apart("-p", plugin, *arguments, "--torchmem-update-baseline")
    result.assert_outcomes(passed=6)
    assert sizes(project) == {"test_a[a-1]": 30, "test_b": 10}


def test_an_entry_stays_where_its_repetitions_raise(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("pytest_repeat")
    project.write(REPEATED)
    monkeypatch.setenv("SIZES", "10")
    project.update().assert_outcomes(passed=2)
    monkeypatch.setenv("SIZES", "")
    update = "--torchmem-update-baseline"
    result = project.run_apart("-p", "pytest_repeat", "--count=2", update)
    result.assert_outcomes(passed=2, failed=2)
    assert sizes(project) == {"test_a[a-1]": 10, "test_b": 10}


def test_each_of_two_workers_may_run_every_test(project: Project) -> None:
    pytest.importorskip("xdist")
    project.write(TESTS)
    arguments = ("-p", "xdist", "-n2", "--dist=each")
    result = project.run_apart(*arguments, "--torchmem-update-baseline")
    result.assert_outcomes(passed=12)
    assert sizes(project) == STORED


def test_tests_in_processes_of_their_own_are_measured(project: Project) -> None:
    needs("pytest_forked")
    project.write(TESTS)
    plain = project.run_apart("-p", "pytest_forked", "--forked", "-p", "no:torchmem")
    if plain.parseoutcomes().get("passed") != 6:
        pytest.skip("pytest-forked cannot send the reports of this pytest, without us either")
    result = project.run_apart("-p", "pytest_forked", "--forked", "--torchmem-update-baseline")
    result.assert_outcomes(passed=6)
    assert sizes(project) == STORED


MODULE = """
import torch

def branch(x):
    if x.sum() > 1:
        return [y * 2 for y in (x, x)]
    return x

class Net(torch.nn.Module):
    def forward(self, x):
        return branch(x)
"""
COVERED = """
import mod, pytest, torch

@pytest.mark.memory_budget("1GiB")
def test_first():
    mod.Net()(torch.zeros(4))
    assert mod.__name__

@pytest.mark.memory_baseline
def test_second():
    mod.Net()(torch.ones(4, requires_grad=True))[0].sum().backward()
    assert mod.torch

def test_third():
    assert mod.branch(torch.zeros(1)) is not None

@pytest.mark.memory_budget("1GiB")
def test_fourth():
    import late
    assert late.branch(torch.zeros(1)) is not None
"""


@pytest.mark.nightly("ctrace")
@pytest.mark.parametrize("core", ["ctrace", "sysmon"])
def test_coverage_has_the_lines_that_it_has_without_us(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, core: str
) -> None:
    needs("coverage")
    if core == "sysmon" and sys.version_info < (3, 12):
        pytest.skip("Python 3.12 brought sys.monitoring")
    pytester.makepyfile(mod=MODULE, late=MODULE, test_it=COVERED)
    monkeypatch.setenv("COVERAGE_CORE", core)
    beside, alone = (
        covered_lines(pytester, monkeypatch, plugins)
        for plugins in ("pytest_torchmem.plugin.hooks", "")
    )
    assert beside == alone
    assert (len(beside["mod.py"]), len(beside["late.py"])) == (8, 6)


def covered_lines(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, plugins: str
) -> dict[str, list[int]]:
    """Run the tests under coverage; return which lines of each file ran."""
    monkeypatch.setenv("PYTEST_PLUGINS", plugins)
    run = ("-m", "coverage", "run", "--include=mod.py,late.py,test_it.py", "-m", "pytest")
    result = pytester.run(sys.executable, *run)
    result.assert_outcomes(passed=4, warnings=0 if plugins else 3)
    assert any(line.startswith("memory:") for line in result.outlines) == bool(plugins)
    data = importlib.import_module("coverage").CoverageData(str(pytester.path / ".coverage"))
    data.read()
    return {Path(file).name: sorted(data.lines(file)) for file in data.measured_files()}


# --- a run that ends early ------------------------------------------------------------------------

SLOW = """
import time

@pytest.mark.memory_baseline
def test_hangs():
    use(MiB)
    time.sleep(100)
"""


def test_a_body_that_takes_too_long_loses_no_other(project: Project) -> None:
    needs("pytest_timeout")
    project.write(TESTS + SLOW)
    arguments = ("-p", "pytest_timeout", "--timeout=2", "--timeout-method=signal")
    result = project.run_apart(*arguments, "--torchmem-update-baseline")
    result.assert_outcomes(passed=6, failed=1)
    assert sizes(project) == STORED


def test_a_worker_that_a_timeout_ends_loses_no_other_test(project: Project) -> None:
    needs("pytest_timeout")
    pytest.importorskip("xdist")
    project.write(TESTS + SLOW)
    arguments = ("-p", "pytest_timeout", "--timeout=3", "--timeout-method=thread")
    result = project.run_in_workers(1, *arguments, "--torchmem-update-baseline")
    result.assert_outcomes(passed=6, failed=1)
    assert sizes(project) == STORED


ENDS = (
    "sys.exit(3)",
    "def f(): return f() + 1\n    f()",
    "raise MemoryError",
    "raise GeneratorExit",
    "assert 0",
)


def with_ends(project: Project, *statements: str) -> None:
    """Write tests that end with the statements, before others and after others."""
    body = f"import os, signal, sys\n{TESTS}\n"
    for number, statement in enumerate(statements):
        body += f"@pytest.mark.memory_baseline\ndef test_ends_{number}():\n"
        body += f"    use(99 * MiB)\n    {statement}\n\n"
    project.write(f"{body}@pytest.mark.memory_baseline\ndef test_z(): use(7 * MiB)\n")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_body_that_raises_loses_nothing_but_itself(project: Project, workers: int) -> None:
    with_ends(project, *ENDS)
    arguments = ("-p", "xdist", f"-n{workers}") if workers else ()
    result = project.run_apart(*arguments, "--torchmem-update-baseline")
    result.assert_outcomes(passed=7, failed=len(ENDS))
    assert sizes(project) == {**STORED, "test_z": 7}


@pytest.mark.nightly("os.kill(os.getpid(), signal.SIGSEGV)")
@pytest.mark.parametrize("statement", ["os._exit(3)", "os.kill(os.getpid(), signal.SIGSEGV)"])
def test_a_worker_that_dies_in_a_body_loses_nothing_but_that_test(
    project: Project, statement: str
) -> None:
    pytest.importorskip("xdist")
    with_ends(project, f"import time; time.sleep(0.5); {statement}")
    result = project.run_in_workers(1, "--torchmem-update-baseline")
    outcomes: dict[str, Any] = result.parseoutcomes()
    assert (outcomes["passed"], outcomes["failed"]) == (7, 1)
    assert sizes(project) == {**STORED, "test_z": 7}


@pytest.mark.nightly("1-exit", "1-exit as if all was well")
@pytest.mark.parametrize(
    ("statement", "code"),
    [("raise KeyboardInterrupt", 2), ("pytest.exit('enough', 5)", 5), ("pytest.exit('', 0)", 0)],
    ids=["interrupted", "exit", "exit as if all was well"],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_what_ran_before_a_run_was_ended_is_stored_and_nothing_removed(
    project: Project, statement: str, code: int, workers: int
) -> None:
    project.write(TESTS + "\n@pytest.mark.memory_baseline\ndef test_old(): use(MiB)\n")
    project.update("-k", "old").assert_outcomes(passed=1, deselected=6)
    with_ends(project, statement)
    accept = "--torchmem-accept=new,grown,shrunk,unused"
    arguments = ("-p", "xdist", f"-n{workers}") if workers else ()
    result = project.run_apart(*arguments, "--torchmem-update-baseline", accept)
    if not workers:
        assert result.ret == code
    stored = sizes(project)
    assert stored.pop("test_old") == 1
    if workers:
        assert stored.items() <= {**STORED, "test_z": 7}.items()
    else:
        assert stored == STORED


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_stops_at_the_first_failure_stores_what_ran(
    project: Project, workers: int
) -> None:
    with_ends(project, "assert 0")
    arguments = ("-p", "xdist", f"-n{workers}") if workers else ()
    result = project.run_apart(*arguments, "-x", "--torchmem-update-baseline")
    assert result.parseoutcomes()["failed"] == 1
    passed = result.parseoutcomes()["passed"]
    stored = sizes(project)
    assert stored.items() <= {**STORED, "test_z": 7}.items()
    assert len(stored) == passed
