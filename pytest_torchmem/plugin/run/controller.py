"""The end of a run: gather what the tests measured, write the baselines, say what happened."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

import pytest

from pytest_torchmem.measuring.ranks import environment_rank
from pytest_torchmem.plugin.item.body import Run
from pytest_torchmem.plugin.options.option_table import relative_path, typed_nodeid
from pytest_torchmem.plugin.options.settings import SummaryKind
from pytest_torchmem.plugin.run.asking import asked_about
from pytest_torchmem.plugin.run.endings import (
    Endings,
    github_lines,
    on_ci,
    on_github,
    room,
    run_report,
)
from pytest_torchmem.plugin.run.updates import (
    Outcomes,
    apply,
    baseline_folders,
    find_orphans,
    move,
    plan_updates,
    remove,
    texts,
)
from pytest_torchmem.plugin.run.workers import (
    Selection,
    detach,
    ran_partially,
    reported_nodeid,
    trace_with,
)
from pytest_torchmem.report.text.tables import (
    change_table,
    diff_lines,
    explained_lines,
    known_lines,
    notices,
    orphan_line,
    rename_lines,
    unguarded_line,
    unused_lines,
)
from pytest_torchmem.report.text.terminal import Detail, summary_lines
from pytest_torchmem.report.writing import write_run
from pytest_torchmem.simulate.gaps import simulated_here
from pytest_torchmem.store.provenance import stamped
from pytest_torchmem.store.results import RunReport
from pytest_torchmem.values.baseline import Change
from pytest_torchmem.values.errors import BaselineError, ReportError
from pytest_torchmem.values.measured import MeasuredTest, RunSummary

PATIENCE_S: Final = 1.0
"""Work that is over by then needs no progress."""

_REFRESH_S: Final = 0.1
_Item = TypeVar("_Item")

_BY_VERBOSITY: Final = (
    Detail.PROBLEMS,
    Detail.COUNTS,
    Detail.SHORT,
    Detail.ALL,
    Detail.COMPOSITION,
)
"""The detail of ``-qq``, ``-q``, nothing, ``-v`` and ``-vv``."""


_WHOLE: Final = (
    pytest.ExitCode.OK,
    pytest.ExitCode.TESTS_FAILED,
    pytest.ExitCode.NO_TESTS_COLLECTED,
)
"""The exit codes of a run that came to its end."""


class Collector:
    """Gathers reports, and acts once at the end.

    There is one in a run: in its only process, or in the controller of the workers. Nothing else
    writes baselines.
    """

    def __init__(self, config: pytest.Config, run: Run, selection: Selection) -> None:
        self.config = config
        self._selection = selection
        self.run = run
        self.summary = RunSummary()
        self._tests: dict[str, MeasuredTest] = {}
        self._traces: dict[str, bytes] = {}
        self._seen: set[str] = set()
        self._passed: set[str] = set()
        self._failed: set[str] = set()
        self._skipped: set[str] = set()
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
            self._traces.pop(test, None)
            self._passed.discard(test)
            self._failed.discard(test)
            self._skipped.discard(test)
        if report.when == "call" and report.passed:
            self._passed.add(test)
        elif not report.passed and not report.skipped:
            self._failed.add(test)
        if report.skipped and not hasattr(report, "wasxfail"):
            self._skipped.add(test)
        if (measured := detach(report)) is not None:
            self._tests[test] = measured
        if trace := trace_with(report):
            self._traces[test] = trace

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        self._partial = self._partial or ran_partially(node)

    @pytest.hookimpl
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._partial = self._partial or bool(session.shouldstop or session.shouldfail)
        self._partial = self._partial or self._selection.partial
        self._partial = self._partial or session.exitstatus not in _WHOLE
        self.summary += RunSummary(tests=tuple(self._tests.values()))
        self._update()
        self._lines += notices(self._as_typed().summary, self.run.settings.accepted)
        self._lines += known_lines(self.summary, self.run.settings.known_holders, self._whole)
        judged = self.run.settings.require_baseline or self.run.settings.accepted
        if on_ci() and not judged:
            unguarded = unguarded_line(self.summary)
            title = "::warning title=memory has no baseline::" if on_github() else ""
            self._lines += [title + unguarded] if unguarded else []
        written = self._report()
        self._tell_other_plugins(written)
        if self.summary.problems and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @property
    def _whole(self) -> bool:
        """True where every test of the project had its turn: nobody typed which to run."""
        return not self._partial and self.config.args_source is not pytest.Config.ArgsSource.ARGS

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.summary.anything and not self._lines:
            return
        detail = _detail(self.run.settings.summary, terminalreporter.verbosity)
        width = self.config.get_terminal_writer().fullwidth
        lines = summary_lines(self._as_typed(), detail, width, room(self.config))
        if lines or self._lines:
            terminalreporter.ensure_newline()  # or the first line of the table would see to it
            rank = environment_rank()  # of a job, each rank says its own
            told = [str(rank)] if rank.count > 1 else []
            told += [f"simulated {gpu}"] if (gpu := simulated_here()) else []
            terminalreporter.section(", ".join(["torchmem", *told]))
        for line in lines:
            terminalreporter.write_line(line.text, **dict.fromkeys(line.styles, True))
        for text in self._lines:
            terminalreporter.write_line(text)
        for name in self._unknown_fallbacks():
            text = f"--torchmem-baseline-from={name}: there is no baseline of that name"
            terminalreporter.write_line(text, yellow=True)

    def _as_typed(self) -> RunReport:
        """The run with the tests as pytest names them where it was started."""
        run = self._run_report()
        tests = (
            replace(
                t, measured=replace(t.measured, test=typed_nodeid(self.config, t.measured.test))
            )
            for t in run.tests
        )
        return replace(run, tests=tuple(tests))

    def _run_report(self) -> RunReport:
        return run_report(self.summary, self._endings, self.config.rootpath)

    def _unknown_fallbacks(self) -> tuple[str, ...]:
        compared = {
            Path(test.file)
            for test, window in self.summary.windows
            if window.change is not Change.NOT_COMPARED
        }
        return self.run.store.unknown_fallbacks(compared) if compared else ()

    def _tell_other_plugins(self, written: Sequence[Path]) -> None:
        hook = self.config.hook
        for test in self.summary.tests:
            windows = (*test.windows, *test.unjudged)
            if not windows:
                continue
            hook.pytest_torchmem_measured(
                config=self.config,
                nodeid=test.test,
                results=tuple(window.result for window in windows),
                failure=next((window.sentence for window in windows if window.sentence), ""),
            )
        for path in written:
            hook.pytest_torchmem_report_written(config=self.config, path=path)

    def _report(self) -> list[Path]:
        """Write the reports that were asked for, and what GitHub shows when it runs this.

        Returns the reports that could be written.
        """
        written: list[Path] = []
        settings, github = self.run.settings, on_github() and self.summary.anything
        if not settings.reports and not github:
            return written
        run = stamped(self._run_report(), self.config.rootpath, environment_rank())
        for asked in settings.report_paths:
            try:
                path = write_run(run, asked, self._traces)
            except ReportError as error:
                self.add_problem(str(error))
                continue
            written.append(path)
            shown = relative_path(path, self.config.invocation_params.dir)
            shown = str(path) if shown.startswith("..") else shown
            self._lines.append(f"report written: {shown}")
        try:
            self._lines += github_lines(run, self.config.rootpath) if github else []
        except ReportError as error:
            self.add_problem(str(error))
        return written

    def _update(self) -> None:
        """Write the accepted changes, file by file; one that fails does not stop the others."""
        settings, store = self.run.settings, self.run.store
        outcomes = Outcomes(
            frozenset(self._seen),
            frozenset(self._passed - self._failed),
            frozenset(self._skipped),
            self._partial,
        )
        followed = self._follow_modules()
        plans = plan_updates(self.summary, outcomes, settings, store)
        plans = [plan for plan in plans if plan.module not in followed]
        if not settings.accepted:
            self._lines += unused_lines(plan.unused.keys() - plan.renames.keys() for plan in plans)
        if settings.accepted and settings.ask:
            try:
                plans = asked_about(plans, self.config)
            except pytest.UsageError as error:
                self.add_problem(f"nothing is stored: {error}")
                plans = []
        for plan in progress(plans, "baselines", self.config):
            shown = relative_path(plan.path, self.config.invocation_params.dir)
            self._lines += rename_lines(plan.renames, shown, settings.follow_renames)
            if not plan.writes and not (settings.accepted and plan.unused):
                continue
            try:
                if settings.dry_run:
                    self._lines += diff_lines(*texts(plan), shown)
                elif plan.writes:
                    apply(plan)
            except BaselineError as error:
                self.add_problem(str(error))
            else:
                self._lines += explained_lines(len(plan.explained), shown)
                changes = tuple(plan.changes(shown, not settings.dry_run))
                self.summary += RunSummary(changes=changes)
        if settings.dry_run:
            self._lines[:0] = change_table(self.summary.changes, room(self.config))

    def _follow_modules(self) -> set[Path]:
        """Say which baselines have no module any more, and move or remove them where told to.

        Returns the modules that were given baselines.
        """
        if self._partial or not self.summary.windows:
            return set()
        settings, store = self.run.settings, self.run.store
        orphans = find_orphans(baseline_folders(self.config, store), self.summary, store)
        moved = [o for o in orphans if o.moved_to and settings.follow_renames]
        removed = [o for o in orphans if not o.moved_to and Change.UNUSED in settings.accepted]
        if not settings.dry_run:
            try:
                for orphan in moved:
                    move(orphan, store)
                for orphan in removed:
                    remove(orphan)
            except OSError as error:
                self.add_problem(str(BaselineError(f"a baseline cannot be moved: {error}")))
        for orphan in orphans:
            done = not settings.dry_run and orphan in (*moved, *removed)
            to = self._shown(orphan.moved_to) if orphan.moved_to else ""
            name = self._shown(orphan.module)
            self._lines.append(orphan_line(name, len(orphan.keys), to, done))
        return {orphan.moved_to for orphan in moved if orphan.moved_to}

    def _shown(self, path: Path) -> str:
        return relative_path(path, self.config.invocation_params.dir)


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


def progress(
    items: Sequence[_Item],
    what: str,
    config: pytest.Config,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[_Item]:
    """Yield each item, and say ``baselines: 1200 of 5000`` on one line while it takes long.

    Nothing is written where the output is no terminal, such as the log of a CI job; when the work
    is over the line is empty again.
    """
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not reporter.isatty or reporter.verbosity < 0:
        yield from items
        return
    start = shown = clock()
    drawn = False
    try:
        for number, item in enumerate(items):
            now = clock()
            if now - start >= PATIENCE_S and now - shown >= _REFRESH_S:
                reporter.rewrite(f"{what}: {number} of {len(items)}", erase=True)
                shown, drawn = now, True
            yield item
    finally:
        if drawn:
            reporter.rewrite("", erase=True)
            reporter.rewrite("")  # what comes next starts at the beginning of the line
