"""--torchmem-report-timelines."""

import pytest

from pytest_torchmem.store.run_reports import read_run

TESTS = """
@pytest.mark.memory_budget("1MiB")
def test_over():
    use(3 * MiB)

@pytest.mark.memory_budget("9MiB")
def test_under():
    use(2 * MiB)
"""


def timelines(path):
    drawn = [t for t in read_run(path).tests if t.windows[0].picture]
    return {measured.test.partition("::")[2] for measured in drawn}


@pytest.mark.parametrize(
    ("which", "report", "expected"),
    [
        ("", "run.json", {"test_over", "test_under"}),
        ("", "out", {"test_over"}),
        ("all", "out", {"test_over", "test_under"}),
        ("failed", "run.json", {"test_over"}),
        ("none", "run.json", set()),
    ],
)
def test_which_tests_have_a_timeline(project, which, report, expected):
    project.write(TESTS)
    options = [f"--torchmem-report-timelines={which}"] if which else []
    project.run(f"--torchmem-report={report}", *options)
    path = project.path / report
    assert timelines(path / "results.json" if path.is_dir() else path) == expected


def test_a_word_without_meaning_is_a_usage_error(project):
    project.write(TESTS)
    result = project.run("--torchmem-report-timelines=some")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*'some' is not one of all, failed, none *"])


def test_the_ini_twin_counts_where_nothing_is_typed(project):
    project.write(TESTS)
    project.ini("torchmem_report_timelines = none")
    project.run("--torchmem-report=run.json")
    assert timelines(project.path / "run.json") == set()
    project.run("--torchmem-report=run.json", "--torchmem-report-timelines=all")
    assert len(timelines(project.path / "run.json")) == 2
