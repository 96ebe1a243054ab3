"""Processor time of our tests, and whether they are marked ``slow``.

    python -m pytest -n 2 -p tools.slow_tests

prints the files that take more than `FILE_S` seconds of processor time and the tests that take more
than `TEST_S`, with their child processes, and says of each whether it is marked; and which files
are marked although they are quick. Wall time would tell more about what else the machine does.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import cast

import pytest

FILE_S = 5.0
TEST_S = 2.0
#: A marked file is called quick only well below the limit: machines and moments differ.
QUICK_S = 2.0
_PROPERTY = "processor_s"
Seconds = dict[str, float]
Report = Generator[None, pytest.TestReport, pytest.TestReport]


def processor_s() -> float:
    """Seconds of this process and of those of its children that have ended."""
    return sum(os.times()[:4])


@dataclass(eq=False)
class Costs:
    """What each phase of each test took; workers send it with their reports."""

    before_s: float = field(default_factory=processor_s)
    tests: Seconds = field(default_factory=lambda: defaultdict(float))
    slow: set[str] = field(default_factory=set)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Report:
        report = yield
        now_s = processor_s()
        report.user_properties.append((_PROPERTY, now_s - self.before_s))
        self.before_s = now_s
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.tests[report.nodeid] += cast("float", dict(report.user_properties)[_PROPERTY])
        if "slow" in report.keywords:
            self.slow.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("processor time")
        for line in table(self.tests, self.slow):
            terminalreporter.write_line(line)


def table(tests: Seconds, slow: set[str]) -> list[str]:
    """Return a line for all tests, one for each slow file and test, and one for each quick file."""
    files: Seconds = defaultdict(float)
    for test, seconds in tests.items():
        files[file_of(test)] += seconds
    whole = set(files) - {file_of(test) for test in set(tests) - slow}
    quick_s = sum(seconds for test, seconds in tests.items() if test not in slow)
    lines = [f"{sum(tests.values()):7.1f} s all, {quick_s:.1f} s of them not slow"]
    for file, seconds in _longest(files):
        if seconds > FILE_S:
            lines.append(f"{seconds:7.1f} s {file}{'' if file in whole else ' (not marked)'}")
        elif seconds < QUICK_S and file in whole:
            lines.append(f"{seconds:7.1f} s {file} (marked, and quick)")
    for test, seconds in _longest(tests):
        if seconds > TEST_S and test not in slow:
            lines.append(f"{seconds:7.1f} s {test} (not marked)")
    return lines


def _longest(seconds: Seconds) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda item: -item[1])


def file_of(test: str) -> str:
    return test.partition("::")[0]


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Costs(), "costs-of-our-tests")
