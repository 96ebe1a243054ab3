"""Annotations for GitHub's view of a change: workflow commands, one for each failed test.

https://docs.github.com/actions/reference/workflow-commands-for-github-actions
"""

from __future__ import annotations

from typing import Final

from pytest_torchmem.store.results import RunReport, TestReport

ANNOTATIONS: Final = 10
"""GitHub shows no more than this many of one kind for a step."""


def error_commands(run: RunReport) -> list[str]:
    """Return the workflow commands for a run: an error for each test that failed over memory."""
    told = (test for test in run.ranked() if test.failed_windows or test.measured.problem)
    failed = [test for test in told if test.status == "failed"]
    return [_error(test) for test in failed[:ANNOTATIONS]]


def _error(test: TestReport) -> str:
    properties = {"file": test.file, "line": str(test.line) if test.line else ""}
    kinds = [kind for window in test.failed_windows for kind in window.kinds]
    subject = f"memory {kinds[0].value}" if kinds else "memory"
    properties["title"] = f"{subject}: {test.measured.test.partition('::')[2]}"
    given = ",".join(f"{name}={_property(value)}" for name, value in properties.items() if value)
    return f"::error {given}::{_data(test.sentence)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
