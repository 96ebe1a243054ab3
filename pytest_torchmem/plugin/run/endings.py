"""The reports of a run: gathered in the one process that writes, written when it ends."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import pytest

from pytest_torchmem.report.text.github import cause_lines, error_commands, line_commands
from pytest_torchmem.report.text.markdown import step_summary
from pytest_torchmem.report.text.tables import ANY_WIDTH
from pytest_torchmem.store.provenance import checked_out
from pytest_torchmem.store.results import RunReport, TestReport
from pytest_torchmem.values.errors import ReportError
from pytest_torchmem.values.measured import MeasuredTest, RunSummary

_LOG_WIDTH: Final = 80


@dataclass(frozen=True, slots=True)
class _Ending:
    """The outcome of a test, and the line that defines it."""

    outcome: str
    line: int


class Endings:
    """Notes how each test ended, as its reports come in."""

    def __init__(self) -> None:
        self._endings: dict[str, _Ending] = {}

    def note(self, test: str, report: pytest.TestReport) -> None:
        """Take one report of a test. A new attempt replaces what an earlier one left."""
        before = self._endings.get(test)
        failed = before is not None and before.outcome == "failed"
        telling = report.when == "call" or not report.passed
        if report.when == "setup" or (telling and not failed):
            line = report.location[1]
            self._endings[test] = _Ending(_outcome(report), 0 if line is None else line + 1)

    def report_on(self, measured: MeasuredTest, file: str) -> TestReport:
        ending = self._endings.get(measured.test, _Ending("failed", 0))
        # The name of a file says something about the machine; only its place in the project stays.
        return TestReport(replace(measured, file=file), ending.outcome, ending.line, file)


def _outcome(report: pytest.TestReport) -> str:
    if hasattr(report, "wasxfail"):
        return "xfailed" if report.skipped else "xpassed"
    return report.outcome


def run_report(summary: RunSummary, endings: Endings, rootdir: Path) -> RunReport:
    """Return everything that is known of a run, but when and with what it was made."""
    start = checkout(rootdir)
    return RunReport(
        tests=tuple(endings.report_on(t, _within(start, rootdir, t)) for t in summary.tests),
        changes=summary.changes,
        problems=summary.problems,
    )


def checkout(rootdir: Path) -> Path:
    """Return the folder that files of reports are named from."""
    return Path(os.environ.get("GITHUB_WORKSPACE") or rootdir)


def _within(start: Path, rootdir: Path, measured: MeasuredTest) -> str:
    path = Path(measured.file)
    for folder in (start, rootdir):
        with contextlib.suppress(ValueError):
            return path.relative_to(folder).as_posix()
    return measured.test.partition("::")[0]


def on_ci() -> bool:
    """True where a service runs the tests: all that are known set ``CI``."""
    return os.environ.get("CI", "").lower() in ("true", "1")


def on_github() -> bool:
    return os.environ.get("GITHUB_ACTIONS") == "true"


def github_lines(run: RunReport, rootdir: Path) -> list[str]:
    """Return the workflow commands to print, after adding the run to the job's summary page."""
    if path := os.environ.get("GITHUB_STEP_SUMMARY"):
        try:
            with Path(path).open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(step_summary(run, file.tell()))
        except OSError as error:
            raise ReportError(f"the step summary {path} cannot be written: {error}") from None
    return [*error_commands(run), *line_commands(run, _grown_files(run, rootdir))]


def _grown_files(run: RunReport, rootdir: Path) -> dict[str, str]:
    """Return the files of causes that are checked out, each with its name for GitHub."""
    files = {file for test in run.tests for file, _ in cause_lines(test)}
    start, found = checkout(rootdir), {}
    for file in checked_out(rootdir, sorted(files)) if files else ():
        with contextlib.suppress(ValueError):
            found[file] = (rootdir / file).relative_to(start).as_posix()
    return found


def room(config: pytest.Config) -> int:
    """Return how many columns the text of a failure has: as many as it likes in a log."""
    writer = config.get_terminal_writer()
    narrow = writer.fullwidth < _LOG_WIDTH  # somebody said so
    return writer.fullwidth if narrow or writer.hasmarkup else ANY_WIDTH
