"""Lines for the terminal while a body runs, past what captures its output."""

import pytest

SAYS = """
import sys

@pytest.mark.memory_baseline
def test_a(capfd):
    print("the body's")
    fake_measure.say("the library is compiled")
    print("the body's, too")
    assert capfd.readouterr().out == "the body's\\nthe body's, too\\n"
"""


@pytest.mark.parametrize("capture", ["fd", "sys", "no"])
def test_a_line_is_on_the_terminal_and_not_in_the_bodys_output(project, capture):
    project.write(SAYS)
    result = project.run(f"--capture={capture}")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["torchmem: the library is compiled"])


def test_a_worker_without_a_terminal_goes_on(project):
    project.write(SAYS)
    project.run_in_workers(1).assert_outcomes(passed=1)
