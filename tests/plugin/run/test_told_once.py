"""One edit is one story: its cause is told whole once, and every other test that it made fail names
that one."""

from __future__ import annotations

import pytest

TESTS = """
@pytest.mark.memory_budget("1MiB")
def test_a():
    use(4 * MiB, operator="aten::exp", line=7)

@pytest.mark.memory_budget("1MiB")
def test_b():
    use(9 * MiB, operator="aten::exp", line=7)

@pytest.mark.memory_budget("1MiB")
def test_c():
    use(5 * MiB, operator="aten::mul", line=30)
"""
SAME = (
    "memory peaked at 9.0 MiB, +8.0 MiB (+800 %) over the limit of 1.0 MiB, "
    "by fake_measure.py:7 as in test_it.py::test_a"
)
STORY = "fake_measure.py:7 made 2 tests fail"


def test_the_first_failure_of_a_cause_is_told_whole_and_the_others_in_a_line(project):
    project.write(TESTS)
    result = project.run("-p", "no:randomly")
    result.assert_outcomes(failed=3)
    told = result.stdout.str()
    assert told.count("live at the peak") == 2  # of test_a and test_c
    assert "_ test_b _" not in told
    result.stdout.fnmatch_lines(["FAILED test_it.py::test_b - Failed: memory peaked at 9.0 MiB*"])
    assert f"\n{STORY}\n" in told
    assert "fake_measure.py:30 made" not in told


def test_a_failure_that_printed_something_has_its_section(project):
    project.write(TESTS.replace("use(9 *", "print('said'); use(9 *"))
    result = project.run()
    result.stdout.fnmatch_lines(["*_ test_b _*", SAME, "said", "FAILED *"])


def test_one_cause_of_six_tests_is_one_page(project):
    tests = "".join(
        f"@pytest.mark.memory_budget('1MiB')\ndef test_{n}(): use({n} * MiB, line=7)\n"
        for n in range(2, 8)
    )
    project.write(tests)
    result = project.run("-q")
    result.assert_outcomes(failed=6)
    assert len(result.outlines) <= 25


def test_each_is_told_whole_where_the_run_is_asked_for_everything(project):
    project.write(TESTS)
    told = project.run("-vv").stdout.str()
    assert told.count("live at the peak") == 3
    assert SAME not in told


def test_workers_tell_one_story_as_well(project):
    project.write(TESTS)
    result = project.run("-p", "xdist", "-n1")
    result.assert_outcomes(failed=3)
    assert result.stdout.str().count("live at the peak") == 2
    assert f"\n{STORY}\n" in result.stdout.str()


def test_tests_that_grew_are_told_with_their_growth(project, monkeypatch: pytest.MonkeyPatch):
    sized = TESTS.replace('memory_budget("1MiB")', "memory_baseline").replace("MiB,", "MiB * SIZE,")
    project.write("import os\nSIZE = int(os.environ['SIZE'])\n" + sized)
    monkeypatch.setenv("SIZE", "1")
    project.update()
    monkeypatch.setenv("SIZE", "2")
    told = project.run("--torchmem-report=out.md").stdout.str()
    story = "fake_measure.py:7 made 2 tests grow: +9.0 MiB, +4.0 MiB"
    assert f"\n{story}\n" in told
    comment = (project.path / "out.md").read_text(encoding="utf-8")
    assert comment.index(story.replace("_", "\\_")) < comment.index("| test |")
    assert comment.count("<details>") == 2
