"""Bodies that end with an exception of their own: what was measured until then is not lost."""

import json

import pytest

from pytest_torchmem.plugin.item.sending import (
    is_failure,
    is_out_of_memory,
    out_of_memory_sentences,
    raised,
)
from pytest_torchmem.values.contributors import Category, CategoryBytes, Contributor, Phase
from pytest_torchmem.values.results import Peak, Result, Retained
from pytest_torchmem.values.units import MiB

FAILS = """
@pytest.mark.memory_baseline
def test_a(torchmem):
    with torchmem.measure("first"):
        use(3 * MiB)
    use(5 * MiB, "parameter")
    assert 1 == 2, "not the same"
"""
RUNS_OUT = """
@pytest.mark.memory_baseline
def test_a():
    use(30 * MiB, module="net.head", line=7)
    use(5 * MiB, "parameter", operator="")
    fake_measure.run_out()
"""


NOTHING = Result(
    "", "cpu", False, Peak(0, 0, CategoryBytes(), CategoryBytes()), Retained(0, CategoryBytes())
)


def reported(project):
    return json.loads((project.path / "run.json").read_text())["tests"]


def test_a_report_has_what_was_measured_until_an_assertion(project):
    project.write(FAILS)
    result = project.run("--torchmem-report=run.json")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["memory: 1 failed (1 ended by an exception)", "*not the same*"])
    (test,) = reported(project)
    assert test["windows"] == []
    assert test["raised"].startswith("AssertionError: not the same")
    body, region = test["unjudged"]
    assert [body["result"]["peak"]["total"], region["result"]["peak"]["total"]] == [
        8 << 20,
        3 << 20,
    ]
    assert body["picture"]["change_count"] == 3
    assert region["picture"]["change_count"] == 2
    assert "did not come to its end" in body["result"]["notes"][0]


def test_without_a_report_nothing_is_analysed_for_an_assertion(project):
    project.write(FAILS)
    project.pytester.makeconftest(
        "import fake_measure\n\nfake_measure.install()\n"
        "def stop(self): raise SystemExit('looked at')\n"
        "fake_measure.BodyMeasurement.stop = stop\n"
    )
    result = project.run()
    result.assert_outcomes(failed=1)
    assert "looked at" not in result.stdout.str()
    result.stdout.fnmatch_lines(["memory: 1 failed (1 ended by an exception)"])


def test_a_failed_test_has_its_page_and_its_recording(project):
    project.write(FAILS)
    project.run("--torchmem-report=out")
    assert sorted(path.suffix for path in (project.path / "out/tests").iterdir()) == [
        ".html",
        ".trace",
    ]


def test_running_out_of_memory_says_what_was_live_below_the_traceback(project):
    project.write(RUNS_OUT)
    result = project.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "E*OutOfMemoryError: out of memory. Tried to allocate 20.00 GiB.",
            "*Captured torchmem call*",
            "ran out of memory on cpu with 35.0 MiB live: largest 30.0 MiB of activation from "
            "aten::mm at fake_measure.py:7 in net.head",
            "live then:",
            "30.0 MiB*activation*aten::mm*net.head*",
        ]
    )


def test_running_out_of_memory_is_annotated_on_github(project, monkeypatch):
    project.write(RUNS_OUT)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    result = project.run()
    result.stdout.fnmatch_lines(["::error file=test_it.py,*::ran out of memory on cpu with 35.0*"])


def test_an_unfinished_body_changes_no_baseline(project):
    project.write("@pytest.mark.memory_baseline\ndef test_a():\n    use(9 * MiB)\n")
    project.update()
    before = project.baseline().read_text()
    project.write(FAILS)
    project.run(
        "--torchmem-update-baseline",
        "--torchmem-accept=new,grown,shrunk,unused",
        "--torchmem-report=run.json",
    )
    assert project.baseline().read_text() == before


def test_a_skipped_body_is_in_no_report(project):
    project.write(FAILS.replace("assert 1 == 2,", "pytest.skip(") + ")")
    project.write("@pytest.mark.memory_baseline\ndef test_b():\n    use(MiB)\n", "test_b")
    project.run("--torchmem-report=run.json").assert_outcomes(skipped=1, passed=1)
    assert [test["test"] for test in reported(project)] == ["test_b.py::test_b"]


def test_a_device_beyond_use_leaves_the_error_of_the_test_alone(project):
    project.write(FAILS)
    project.pytester.makeconftest(
        "import fake_measure\n\nfake_measure.install()\n"
        "def stop(self): raise RuntimeError('an illegal memory access was encountered')\n"
        "fake_measure.BodyMeasurement.stop = stop\n"
    )
    result = project.run("--torchmem-report=run.json")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E*AssertionError: not the same"])
    assert "illegal" not in result.stdout.str()


class OutOfMemoryError(RuntimeError):
    pass


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("a shape does not fit"), False),
        (AssertionError("DefaultCPUAllocator"), False),
    ],
)
def test_an_allocator_that_gave_up_is_told_by_its_exception(error, told):
    assert is_out_of_memory(error) is told


def test_a_skip_and_an_interrupt_are_no_failures():
    import unittest

    assert is_failure(AssertionError())
    assert is_failure(pytest.fail.Exception("no"))
    for error in (pytest.skip.Exception("x"), unittest.SkipTest("x"), KeyboardInterrupt()):
        assert not is_failure(error)


def test_an_exception_is_one_short_line():
    assert raised(ValueError("\n first\nsecond")) == "ValueError: first"
    assert raised(ValueError()) == "ValueError"
    assert raised(pytest.fail.Exception("said so")) == "failed: said so"
    assert len(raised(ValueError("x" * 5000))) == 200


def test_an_expected_failure_stays_one_when_its_fixtures_end_well(project):
    project.write("@pytest.mark.xfail\n" + FAILS.lstrip())
    project.run("--torchmem-report=run.json").assert_outcomes(xfailed=1)
    (test,) = reported(project)
    assert test["outcome"] == "xfailed"


def test_where_memory_ran_out_the_five_largest_are_named():
    live = tuple(
        Contributor(Category.ACTIVATION, n * MiB, 1, f"aten::op{n}", "", None, Phase.FORWARD)
        for n in range(9, 2, -1)
    )
    first, *others = out_of_memory_sentences(NOTHING, live)
    assert first.endswith("largest 9.0 MiB of activation from aten::op9")
    assert [text.rpartition("::")[2] for text in others] == ["op8", "op7", "op6", "op5"]
