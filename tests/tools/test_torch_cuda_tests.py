"""The tool that holds torch's own tests of CUDA against a list of those that fail."""

import pytest

from tools.torch_cuda_tests import LIST, SUITES, Outcomes, listed, page, surprises

REPORT = """\
<testsuites><testsuite>
<testcase classname="test_cuda.TestA" name="test_ok"/>
<testcase classname="test_cuda.TestA" name="test_bad"><failure/></testcase>
<testcase classname="test_cuda.TestA" name="test_left"/>
<testcase classname="test_cuda.TestA" name="test_left"><error/></testcase>
<testcase classname="test_cuda.TestA" name="test_out"><skipped/></testcase>
<testcase classname="" name="test_cuda"><error/></testcase>
</testsuite></testsuites>
"""


@pytest.fixture
def outcomes(tmp_path):
    (tmp_path / "report.xml").write_text(REPORT)
    return Outcomes.read(tmp_path / "report.xml")


def test_a_test_failed_if_its_body_or_its_end_did(outcomes):
    assert outcomes == Outcomes(
        passed=frozenset({"TestA::test_ok"}),
        failed=frozenset({"TestA::test_bad", "TestA::test_left", "::test_cuda"}),
        skipped=frozenset({"TestA::test_out"}),
    )


def test_what_the_list_does_not_say_is_told(outcomes):
    reasons = {
        "TestA::test_bad": "values: large",
        "TestA::test_left": "order: left",
        "TestA::test_ok": "release: another text",
        "TestA::test_gone": "release: gone",
    }
    assert list(surprises(outcomes, reasons)) == [
        "failed, and is not on the list: ::test_cuda",
        "did not run, and is on the list: TestA::test_gone",
        "passed, and is on the list: TestA::test_ok",
    ]
    assert not list(surprises(outcomes, dict.fromkeys(outcomes.failed, "values")))


def test_the_page_counts_failures_by_their_reasons(outcomes):
    reasons = {"cuda": {"TestA::test_bad": "values: large", "TestA::test_left": "order: left"}}
    (row,) = (line for line in page({"cuda": outcomes}, reasons) if line.startswith("| cuda"))
    assert row == "| cuda | 5 | 1 | 1 | 0 | 1 | 0 | 1 | 0 | 0 | 1 |"


def test_the_list_has_a_known_reason_for_each_test_of_a_suite(tmp_path):
    assert listed(LIST).keys() == SUITES.keys()
    (tmp_path / "list.txt").write_text("cuda TestA::test_bad because it fails\n")
    with pytest.raises(ValueError, match="TestA::test_bad: no reason begins with"):
        listed(tmp_path / "list.txt")
