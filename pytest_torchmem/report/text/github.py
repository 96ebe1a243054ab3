"""Annotations for GitHub's view of a change: workflow commands, for failed tests and grown lines.

https://docs.github.com/actions/reference/workflow-commands-for-github-actions
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Final

from pytest_torchmem.store.run_reports import RunReport
from pytest_torchmem.values.measured import MeasuredTest
from pytest_torchmem.values.units import one_line

ANNOTATIONS: Final = 10
"""GitHub shows no more than this many of one kind for a step."""

LINES: Final = 9
"""Lines are warnings; the tenth is left for missing baselines."""


def error_commands(run: RunReport) -> list[str]:
    """Return the workflow commands for a run: an error for each test that failed over memory."""
    commands = []
    for test in _failed(run)[:ANNOTATIONS]:
        title = f"{_subject(test)}: {test.test.partition('::')[2]}"
        properties = {"file": test.file, "line": str(test.line or ""), "title": title}
        commands.append(_command("error", properties, test.sentence))
    return commands


def line_commands(run: RunReport, checked_out: Mapping[str, str]) -> list[str]:
    """Return a warning for each line that the failed tests name as a cause, the first ones first.

    ``checked_out`` has the files in which GitHub can show a line, by the names that causes have.
    """
    tests_by_line: dict[tuple[str, int], list[MeasuredTest]] = defaultdict(list)
    for test in _failed(run):
        for file, line in cause_lines(test):
            if file in checked_out:
                tests_by_line[checked_out[file], line].append(test)
    commands = []
    for (file, line), (first, *others) in list(tests_by_line.items())[:LINES]:
        more = f" (and {len(others)} more)" if others else ""
        properties = {"file": file, "line": str(line), "title": f"{_subject(first)} here"}
        text = f"{first.test}{more}: {first.sentence}"
        commands.append(_command("warning", properties, text))
    return commands


def shrunk_commands(run: RunReport) -> list[str]:
    """Return a notice for each test that needs less than its baseline: it can be tightened."""
    commands = []
    for test in run.tests:
        for window in test.windows:
            if window.notice and not window.sentence:
                properties = {"file": test.file, "line": str(test.line or "")}
                properties["title"] = f"memory shrunk: {test.test.partition('::')[2]}"
                commands.append(_command("notice", properties, window.notice))
    return commands[:ANNOTATIONS]


def cause_lines(test: MeasuredTest) -> tuple[tuple[str, int], ...]:
    """Return the files and lines that a failed test names as its causes, each once."""
    causes = (cause for window in test.failed_windows for cause in window.causes)
    places = ((c.source.file, c.source.line) for c in causes if c.source and c.source.line)
    return tuple(dict.fromkeys(places))


def _failed(run: RunReport) -> list[MeasuredTest]:
    failed_tests = (test for test in run.ranked() if test.failed_windows or test.problem)
    return [test for test in failed_tests if test.status == "failed"]


def _subject(test: MeasuredTest) -> str:
    kinds = [kind for window in test.failed_windows for kind in window.kinds]
    return f"memory {kinds[0].value}" if kinds else "memory"


def _command(name: str, properties: Mapping[str, str], text: str) -> str:
    encoded = ((key, _data(value)) for key, value in properties.items() if value)
    pairs = (f"{key}={value.replace(':', '%3A').replace(',', '%2C')}" for key, value in encoded)
    return f"::{name} {','.join(pairs)}::{_data(text)}"


def _data(text: str) -> str:
    return "%0A".join(one_line(line).replace("%", "%25") for line in text.splitlines())
