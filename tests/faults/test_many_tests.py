"""Many tests in one run: nothing is lost, and what is said of them stays short."""

from __future__ import annotations

import resource

import pytest

from tests.project import Project

pytestmark = pytest.mark.slow

MODULE = """
@pytest.mark.memory_baseline
@pytest.mark.parametrize("number", range({count}))
def test_a(number): use(MiB + number)
"""


def whole(project: Project, modules: int, count: int) -> None:
    """Every baseline holds the number of every test, whole and readable."""
    for module in range(modules):
        totals = {key: entry["total"] for key, entry in project.entries(f"test_{module}").items()}
        assert totals == {f"test_a[{number}]": (1 << 20) + number for number in range(count)}


def written(project: Project, modules: int, count: int) -> None:
    for module in range(modules):
        project.write(MODULE.format(count=count), f"test_{module}")


@pytest.mark.parametrize("change", ["new", "grown", "shrunk", "unused"])
def test_a_long_list_of_changes_is_cut_with_a_count(project: Project, change: str) -> None:
    accept = "--torchmem-accept=new,grown,shrunk,unused"
    project.write(MODULE.format(count=30))
    result = project.update(accept)
    if change == "unused":
        project.write("@pytest.mark.memory_baseline\ndef test_b(): use(MiB)\n")
        result = project.update(accept)
    elif change != "new":
        size = {"grown": "9 * MiB", "shrunk": "MiB // 9"}[change]
        project.write(MODULE.format(count=30).replace("MiB + number", size))
        result = project.update(accept)
    told = [line for line in result.outlines if line.startswith(f"  {change}: test_a")]
    assert len(told) == 10
    end = ", removed" if change == "unused" else ""
    assert f"  ... and 20 more {change} entries{end}" in result.outlines


@pytest.mark.nightly
def test_ten_thousand_tests_in_one_run(project: Project) -> None:
    written(project, 2, 5_000)
    result = project.run_apart("-q", "--torchmem-update-baseline")
    result.assert_outcomes(passed=10_000)
    result.stdout.fnmatch_lines(["baseline updated: 10000 entries in 2 files"])
    assert len(result.outlines) < 200 + 10_000 // 70
    whole(project, 2, 5_000)
    again = project.run_apart("-q")
    again.assert_outcomes(passed=10_000)
    again.stdout.fnmatch_lines(["memory: 10000 ok*"])
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{used.ru_utime + used.ru_stime:.0f} s of processor time, {used.ru_maxrss >> 10} MiB")
    assert used.ru_maxrss >> 10 < 1_000


@pytest.mark.nightly
def test_two_workers_with_five_thousand_tests_each(project: Project) -> None:
    pytest.importorskip("xdist")
    written(project, 2, 5_000)
    result = project.run_in_workers(2, "-q", "--dist=loadfile", "--torchmem-update-baseline")
    result.assert_outcomes(passed=10_000)
    result.stdout.fnmatch_lines(["baseline updated: 10000 entries in 2 files"])
    whole(project, 2, 5_000)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{used.ru_utime + used.ru_stime:.0f} s of processor time, {used.ru_maxrss >> 10} MiB")
    assert used.ru_maxrss >> 10 < 1_000
