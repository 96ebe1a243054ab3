"""A run as a file."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_torchmem.report.text.github import error_commands
from pytest_torchmem.report.writing import page_name
from pytest_torchmem.store.run_reports import (
    RunReport,
    merged,
    read_run,
    render_run,
)
from pytest_torchmem.values.baseline import Change
from pytest_torchmem.values.errors import ReportError
from pytest_torchmem.values.findings import CodeLines, Finding, FindingKind
from pytest_torchmem.values.measured import STATUSES, BaselineChange
from tests.report.sample_run import report_of, sample_run, window


@pytest.fixture
def stored(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(render_run(sample_run()), encoding="utf-8")
    return path


def rewrite(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_what_is_written_is_read_back(stored):
    assert read_run(stored) == sample_run()


def test_each_test_has_a_line_of_its_own(stored):
    lines = stored.read_text().splitlines()
    assert sum('"test": ' in line for line in lines) == len(sample_run().tests)


def test_every_number_is_an_integer(stored):
    def refuse(text):
        raise AssertionError(text)

    json.loads(stored.read_text(), parse_float=refuse)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "cannot be read: it is no JSON: Expecting property name"),
        ("[]", "is no results file"),
        ('{"entries": {}}', "is no results file"),
        (
            '{"kind": "torchmem-results", "format": 99}',
            "was written by another version: record it again",
        ),
        (
            '{"kind": "torchmem-results", "format": "1"}',
            "was written by another version: record it again",
        ),
        ('{"kind": "torchmem-results"}', "is damaged: it does not say its format"),
        ('{"kind": "torchmem-results", "format": 1}', "is damaged: 'tests' is missing"),
        (
            '{"kind": "torchmem-results", "format": 1, "tests": 3}',
            "is damaged: expected a list, found 3",
        ),
    ],
)
def test_another_file_is_refused_with_the_reason(tmp_path, text, reason):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ReportError, match=reason):
        read_run(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ReportError, match="No such file"):
        read_run(tmp_path / "x.json")


def test_a_damaged_test_is_refused(stored):
    rewrite(stored, tests=[{"test": "a"}])
    with pytest.raises(ReportError, match="is damaged"):
        read_run(stored)


def test_each_status_has_its_test():
    statuses = {test.status for test in sample_run().tests}
    assert statuses == set(STATUSES) - {"grown", "xfailed"}
    grown = report_of("a", window("a", Change.GROWN))
    assert grown.status == "grown"
    assert report_of("a", problem="unreadable").status == "failed"
    assert report_of("a", outcome="xfailed").status == "xfailed"
    assert report_of("a", problem="unreadable", outcome="xfailed").status == "failed"


def test_what_needs_a_reader_comes_first():
    ranked = [test.status for test in sample_run().ranked()]
    assert ranked == sorted(ranked, key=STATUSES.index)
    plain = [test.peak_bytes for test in sample_run().ranked() if test.status == "ok"]
    assert plain == sorted(plain, reverse=True)


def test_shards_become_one_run_and_a_test_counts_once():
    run = sample_run()
    one, two = replace(run, tests=run.tests[:4]), replace(run, tests=run.tests[2:])
    assert {t.test for t in merged([one, two]).tests} == {t.test for t in run.tests}
    later = replace(run.tests[0], outcome="passed")
    assert merged([run, replace(run, tests=(later,))]).tests.count(later) == 1


def test_nothing_merges_to_nothing():
    assert merged([]).tests == ()


def test_a_failure_that_was_expected_is_no_failure_of_the_run():
    over = window("a", Change.GROWN, "memory peaked")
    expected = report_of("a", over, outcome="xfailed")
    assert (expected.status, expected.sentence) == ("xfailed", "failed as expected: memory peaked")
    assert error_commands(RunReport((expected,))) == []
    assert report_of("a", over, outcome="failed").status == "failed"
    raised = report_of("a", outcome="xfailed", raised="ValueError: no")
    assert (raised.status, raised.sentence) == ("xfailed", "failed as expected: ValueError: no")


def test_the_page_of_a_test_is_named_after_its_file_and_its_own_name():
    test = sample_run().tests[0]
    names = ["tests/net/test_a.py::test_x[</b>]", "test_a.py::test_url[https://x.org/y]"]
    tests = [replace(test, test=name) for name in names]
    assert [page_name(test).rpartition("-")[0] for test in tests] == [
        "test-a-py-test-x-b",
        "test-a-py-test-url-https-x-org-y",
    ]


def test_of_equal_tests_the_one_that_grew_at_all_comes_first_and_then_the_largest():
    def sized(name, size, before):
        one = window(name, Change.SAME if before else Change.NOT_COMPARED)
        peak = replace(one.result.peak, total=size)
        return report_of(
            name, replace(one, result=replace(one.result, peak=peak), baseline_bytes=before)
        )

    grown, same, new = sized("c", 8, 7), sized("b", 90, 90), sized("a", 80, 0)
    names = [test.test for test in RunReport((new, same, grown)).ranked()]
    assert [name[-1] for name in names] == ["c", "b", "a"]


names = st.sets(st.sampled_from("abcdef"))
runs = st.builds(
    lambda tests, changes, problems: RunReport(
        tuple(map(report_of, sorted(tests))),
        changes=tuple(BaselineChange("f", key, Change.NEW) for key in sorted(changes)),
        problems=tuple(sorted(problems)),
    ),
    names,
    names,
    names,
)


@given(runs, runs, runs)
def test_parts_of_a_run_add_in_any_order(one, two, three):
    assert one + two == two + one
    assert (one + two) + three == one + (two + three)
    assert one + RunReport() == one == one + one


def test_an_empty_run_has_nothing_to_say():
    assert not RunReport().anything
    assert RunReport(problems=("broken",)).anything


def test_one_edit_is_one_story_where_tests_blame_different_lines_of_it():
    edit, line, apart = (CodeLines("net.py", *pair) for pair in ((8, 9), (9, 9), (10, 10)))
    places = (line, apart, edit, line, apart, replace(line, file="other.py"))
    finding = Finding(FindingKind.OVER_LIMIT, "total", "too much")
    blamed = [replace(finding, place=place) for place in places]
    run = RunReport(
        tuple(
            report_of(f"test_{n}", replace(window("body"), findings=(one,)), outcome="failed")
            for n, one in enumerate(blamed)
        )
    )
    stories = {story.cause: {test.test[-1] for test in story.tests} for story in run.stories}
    assert stories == {edit: {"0", "2", "3"}, apart: {"1", "4"}}
