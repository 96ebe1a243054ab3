"""The tool that holds torch's own tests of CUDA against a list of those that fail."""

from functools import partial
from pathlib import Path

import pytest

from tools.torch_cuda_tests import SUITES, Outcomes, listed, page, surprises

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
        "TestA::test_left": "machine: left",
        "TestA::test_ok": "release: another text",
        "TestA::test_gone": "release: gone",
    }
    assert list(surprises(outcomes, reasons)) == [
        "failed, and is not on the list: ::test_cuda",
        "did not run, and is on the list: TestA::test_gone",
        "passed, and is on the list: TestA::test_ok",
    ]
    assert not list(surprises(outcomes, dict.fromkeys(outcomes.failed, "values")))


def test_the_page_counts_failures_by_their_reasons(outcomes, tmp_path, monkeypatch):
    path = tmp_path / "list.txt"
    path.write_text(
        "cuda TestA::test_bad values: large\n"
        "cuda,trees@2.10,2.15 TestA::test_left machine: left\n"
        "cuda@2.15 ::test_cuda open: why\n"
    )
    monkeypatch.setattr("tools.torch_cuda_tests.listed", partial(listed, path=path))
    results = {"2.10.0": {"cuda": outcomes, "trees": outcomes}, "2.13.1": {"cuda": outcomes}}
    assert [line for line in page(results) if line.startswith("| 2")] == [
        "| 2.10.0 | cuda | 5 | 1 | 1 | 0 | 1 | 1 | 0 | 0 | 1 |",
        "| 2.10.0 | trees | 5 | 1 | 1 | 0 | 0 | 1 | 0 | 0 | 2 |",
        "| 2.13.1 | cuda | 5 | 1 | 1 | 0 | 1 | 0 | 0 | 0 | 2 |",
    ]


def test_the_list_has_a_known_reason_for_each_test_of_a_suite(tmp_path):
    assert listed("2.13.0").keys() == SUITES.keys()
    (tmp_path / "list.txt").write_text("cuda TestA::test_bad because it fails\n")
    with pytest.raises(ValueError, match="TestA::test_bad: no reason begins with"):
        listed("2.13.0", tmp_path / "list.txt")


TESTS = """
import os, time
import pytest
import torch
held = []
@pytest.mark.parametrize("number", [1, 2])
def test_alone(number):
    held.append(number)
    assert held == [number]
def test_bad():
    assert held == [1]
def test_out():
    pytest.skip("no")
def test_crash():
    os._exit(7)
def test_hangs():
    time.sleep(60)
"""


def test_each_test_has_a_process_of_its_own(pytester, monkeypatch):
    pytest.importorskip("expecttest")  # torch's test case needs it
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    pytester.makeconftest("from tools import alone\nalone.LONGEST_S = 1\n")
    pytester.makepyfile(test_x=TESTS)
    report = pytester.path / "report.xml"
    # Within this process pytester would forget torch's modules, which register things only once.
    pytester.runpytest_subprocess(
        "-p", "tools.alone", "-p", "no:torchmem", f"--junitxml={report}", timeout=120
    )
    assert Outcomes.read(report) == Outcomes(
        frozenset({"::test_alone[1]", "::test_alone[2]"}),
        frozenset({"::test_bad", "::test_crash", "::test_hangs"}),
        frozenset({"::test_out"}),
    )
