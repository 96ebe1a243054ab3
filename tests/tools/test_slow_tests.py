"""The tool that says which tests take long."""

import pytest

from tools.slow_tests import table

SPENDS = """
import time

def spend(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

def test_a(): spend(0.3)
def test_b(): pass
"""


def test_a_file_and_a_test_above_their_limits_are_listed_with_whether_they_are_marked():
    tests = {"a.py::x": 6.0, "b.py::x": 4.0, "b.py::y": 2.0, "c.py::x": 2.5, "d.py::x": 1.0}
    assert table(tests, {"a.py::x", "b.py::y", "d.py::x"}) == [
        "   15.5 s all, 6.5 s of them not slow",
        "    6.0 s a.py",
        "    6.0 s b.py (not marked)",
        "    1.0 s d.py (marked, and quick)",
        "    4.0 s b.py::x (not marked)",
        "    2.5 s c.py::x (not marked)",
    ]


@pytest.mark.parametrize("workers", [(), ("-p", "xdist", "-n1")])
def test_each_test_has_the_processor_time_that_it_took(pytester, monkeypatch, workers):
    monkeypatch.setenv("PYTEST_PLUGINS", "tools.slow_tests")
    monkeypatch.syspath_prepend(pytester._request.config.rootpath)
    pytester.makepyfile(SPENDS)
    # Where a folder has hooks of its own, pytest keeps its plugins in a set.
    pytester.mkdir("sub").joinpath("conftest.py").write_text("def pytest_runtest_setup(): pass\n")
    pytester.path.joinpath("sub", "test_c.py").write_text("def test_c(): pass\n")
    monkeypatch.setattr("tools.slow_tests.TEST_S", 0.25)
    result = pytester.runpytest_inprocess("-p", "tools.slow_tests", *workers)
    result.assert_outcomes(passed=3)
    result.stdout.re_match_lines([r" +0\.[3-9] s .*::test_a \(not marked\)"])
    result.stdout.no_re_match_line(r".*::test_b")
