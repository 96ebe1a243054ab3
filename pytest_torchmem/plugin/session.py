"""The end of a run: gather what the tests measured, write the baselines, say what happened."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from pytest_torchmem.analysis.baseline import BaselineEntry, Change
from pytest_torchmem.errors import BaselineError, ReportError
from pytest_torchmem.plugin.baselines import Environment, entry_key, write_file
from pytest_torchmem.plugin.body import Run, relative_path
from pytest_torchmem.plugin.options import SummaryKind
from pytest_torchmem.plugin.reports import (
    Endings,
    github_lines,
    on_github,
    run_report,
)
from pytest_torchmem.plugin.workers import detach, ran_partially, reported_nodeid
from pytest_torchmem.report.summary import BaselineChange, MeasuredTest, RunSummary, Window
from pytest_torchmem.report.terminal import Detail, summary_lines
from pytest_torchmem.report.writing import write_run

_BY_VERBOSITY: Final = (
    Detail.PROBLEMS,
    Detail.COUNTS,
    Detail.SHORT,
    Detail.ALL,
    Detail.COMPOSITION,
)
"""What ``-qq``, ``-q``, nothing, ``-v`` and ``-vv`` ask for."""


class Collector:
    """Gathers reports, and acts once at the end.

    There is one in a run: in its only process, or in the controller of the workers. Nothing else
    writes baselines.
    """

    def __init__(self, config: pytest.Config, run: Run) -> None:
        self.config = config
        self.run = run
        self.summary = RunSummary()
        self._tests: dict[str, MeasuredTest] = {}
        self._seen: set[str] = set()
        self._passed: set[str] = set()
        self._failed: set[str] = set()
        self._partial = _selects(config)
        self._endings = Endings()
        self._lines: list[str] = []

    def add_problem(self, sentence: str) -> None:
        self.summary += RunSummary(problems=(sentence,))

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = reported_nodeid(report, self.config)
        self._seen.add(test)
        self._endings.note(test, report)
        if report.when == "setup":  # a rerun starts again: only its last attempt counts
            self._tests.pop(test, None)
            self._passed.discard(test)
            self._failed.discard(test)
        if report.when == "call" and report.passed:
            self._passed.add(test)
        elif not report.passed and not report.skipped:
            self._failed.add(test)
        if (measured := detach(report)) is not None:
            self._tests[test] = measured

    @pytest.hookimpl
    def pytest_deselected(self) -> None:
        self._partial = True

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        self._partial = self._partial or ran_partially(node)

    @pytest.hookimpl
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._partial = self._partial or bool(session.shouldstop or session.shouldfail)
        self.summary += RunSummary(tests=tuple(self._tests.values()))
        if self.run.settings.accepted:
            self._update()
        self._report()
        if self.summary.problems and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.summary.anything and not self._lines:
            return
        detail = _detail(self.run.settings.summary, terminalreporter.verbosity)
        width = self.config.get_terminal_writer().fullwidth
        lines = summary_lines(self.summary, detail, width)
        if lines or self._lines:
            terminalreporter.section("torchmem")
        for line in lines:
            terminalreporter.write_line(line.text, **dict.fromkeys(line.styles, True))
        for text in self._lines:
            terminalreporter.write_line(text)

    def _report(self) -> None:
        """Write the report that was asked for, and what GitHub shows when it runs this."""
        settings, github = self.run.settings, on_github() and self.summary.anything
        if settings.report is None and not github:
            return
        run = run_report(self.summary, self._endings, self.config.rootpath)
        try:
            if settings.report is not None:
                path = write_run(run, settings.report)
                shown = relative_path(path, self.config.invocation_params.dir)
                self._lines.append(f"report written: {shown}")
            self._lines += github_lines(run) if github else []
        except ReportError as error:
            self.add_problem(str(error))

    def _update(self) -> None:
        """Write the accepted changes, file by file; one that fails does not stop the others."""
        for path, accepted in self._accepted().items():
            shown = relative_path(path, self.config.invocation_params.dir)
            environment = accepted[0][0].environment
            entries = {window.key: BaselineEntry.of(window.result) for _, window in accepted}
            try:
                write_file(path, environment, entries)
            except BaselineError as error:
                self.add_problem(str(error))
            else:
                changes = tuple(_changed(shown, window) for _, window in accepted)
                self.summary += RunSummary(changes=changes)
        self.summary += RunSummary(changes=tuple(self._unused()))

    def _accepted(self) -> dict[Path, list[tuple[MeasuredTest, Window]]]:
        """Return what to write, by file: the wanted changes of tests that passed otherwise."""
        accepted: dict[Path, list[tuple[MeasuredTest, Window]]] = defaultdict(list)
        for measured, window in self.summary.windows:
            passed = measured.test in self._passed and measured.test not in self._failed
            if passed and window.change in self.run.settings.accepted:
                path = self.run.store.path(Path(measured.file), measured.environment)
                accepted[path].append((measured, window))
        return accepted

    def _unused(self) -> Iterator[BaselineChange]:
        """Yield the entries that no test asked for, of modules that ran as a whole.

        An entry whose test was skipped or failed may be asked for next time, so it is not unused.
        """
        if self._partial:
            return
        tests: dict[Path, set[str]] = defaultdict(set)
        for test in self._seen:
            tests[self.run.rootdir / test.partition("::")[0]].add(test)
        for module, ran in sorted(tests.items()):
            for environment in self._environments():
                yield from self._unused_in(module, ran, environment)

    def _environments(self) -> list[Environment]:
        found = {tuple(sorted(t.environment.items())) for t in self.summary.tests if t.environment}
        return [dict(environment) for environment in sorted(found)]

    def _unused_in(
        self, module: Path, ran: set[str], environment: Environment
    ) -> Iterator[BaselineChange]:
        path = self.run.store.path(module, environment)
        try:
            keys = self.run.store.keys(path, environment)
        except BaselineError:
            return  # the tests that use it have said so
        used = {window.key for _, window in self.summary.windows if _compares(window)}
        pending = [entry_key(t) for t in ran if t not in self._passed or t in self._failed]
        for key in sorted(keys - used):
            if not any(key == test or key.startswith(f"{test}::") for test in pending):
                shown = relative_path(path, self.config.invocation_params.dir)
                yield BaselineChange(shown, key, Change.UNUSED)


def _compares(window: Window) -> bool:
    return window.change is not Change.NOT_COMPARED


def _changed(shown: str, window: Window) -> BaselineChange:
    before, after = window.baseline_bytes, window.result.peak.total
    return BaselineChange(shown, window.key, window.change, before, after)


def _selects(config: pytest.Config) -> bool:
    """True when the command line picks tests out of their modules, or may stop in the middle."""
    picks = ("keyword", "markexpr", "lf", "deselect", "stepwise", "collectonly")
    if any(getattr(config.option, name, None) for name in picks):
        return True
    return any("::" in str(argument) for argument in config.args)


def _detail(kind: SummaryKind, verbosity: int) -> Detail:
    """Return how much is said: the whole table where it was asked for, else as pytest is told."""
    if kind is SummaryKind.OFF:
        return Detail.PROBLEMS
    detail = _BY_VERBOSITY[max(-2, min(2, verbosity)) + 2]
    if kind is SummaryKind.ALL and detail is not Detail.COMPOSITION:
        return Detail.ALL
    return detail
