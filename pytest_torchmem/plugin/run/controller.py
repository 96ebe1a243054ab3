"""The end of a run: gather what the tests measured, write baselines and reports, say what happened.

All of it is done in the one process that writes.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import pytest

from pytest_torchmem.plugin.item.sending import room
from pytest_torchmem.plugin.options.option_table import relative_path, typed_nodeid
from pytest_torchmem.plugin.options.settings import Run, SummaryKind
from pytest_torchmem.plugin.run.asking import asked_about
from pytest_torchmem.plugin.run.updates import (
    FilePlan,
    Outcomes,
    apply,
    baseline_folders,
    find_orphans,
    move,
    plan_updates,
    progress,
    remove,
    texts,
)
from pytest_torchmem.plugin.run.workers import (
    Selection,
    detach,
    ran_partially,
    reported_nodeid,
    trace_with,
    unpacked,
)
from pytest_torchmem.report.text.github import cause_lines, error_commands, line_commands
from pytest_torchmem.report.text.markdown import step_summary
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
from pytest_torchmem.simulate import GPU_VARIABLE
from pytest_torchmem.store.provenance import checked_out, stamped
from pytest_torchmem.store.run_reports import RunReport, TestReport
from pytest_torchmem.values.baseline import Change
from pytest_torchmem.values.errors import BaselineError, DeviceError, ReportError
from pytest_torchmem.values.findings import FindingKind
from pytest_torchmem.values.measured import MeasuredTest, Rank, RunSummary

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

_GPU: Final = re.compile(r"\b(gpus?|cuda)\b", re.IGNORECASE)
_DRIVER: Final = Path("/dev/nvidiactl")


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
        self._tests: dict[str, bytes] = {}
        self._traces: dict[str, bytes] = {}
        self._seen: set[str] = set()
        self._passed: set[str] = set()
        self._failed: set[str] = set()
        self._skipped: set[str] = set()
        self._partial = _selects(config)
        self._endings = Endings()
        self._lines: list[str] = []
        self._want_a_gpu: set[str] = set()

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
            self._want_a_gpu.discard(test)
        if report.when == "call" and report.passed:
            self._passed.add(test)
        elif not report.passed and not report.skipped:
            self._failed.add(test)
        if report.skipped and not hasattr(report, "wasxfail"):
            self._skipped.add(test)
            if _names_a_gpu(report):
                self._want_a_gpu.add(test)
        if trace := trace_with(report):
            self._traces[test] = trace
        with self.run.originals.back():  # those of the test are still there
            measured = detach(report)
        if measured:
            self._tests[test] = measured

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        self._partial = self._partial or ran_partially(node)

    @pytest.hookimpl
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._partial = self._partial or bool(session.shouldstop or session.shouldfail)
        self._partial = self._partial or self._selection.partial
        self._partial = self._partial or session.exitstatus not in _WHOLE
        self.summary += RunSummary(tests=tuple(map(unpacked, self._tests.values())))
        self._update()
        self._lines += notices(self._as_typed().summary, self.run.settings.accepted)
        self._lines += known_lines(self.summary, self.run.settings.known_holders, self._whole)
        judged = self.run.settings.require_baseline or self.run.settings.accepted
        if on_ci() and not judged:
            unguarded = unguarded_line(self.summary)
            title = "::warning title=memory has no baseline::" if on_github() else ""
            self._lines += [title + unguarded] if unguarded else []
        self._lines += _offer_of_a_gpu(len(self._want_a_gpu))
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
            rank = Rank.launched()  # of a job, each rank says its own
            told = [str(rank)] if rank.count > 1 else []
            told += [f"simulated {gpu}"] if (gpu := os.environ.get(GPU_VARIABLE)) else []
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
        run = stamped(self._run_report(), self.config.rootpath, Rank.launched())
        for asked in settings.report_paths:
            try:
                path = write_run(run, asked, self._traces)
            except ReportError as error:
                self.add_problem(str(error).replace(str(asked), self._near(asked)))
                continue
            written.append(path)
            self._lines.append(f"report written: {self._near(path)}")
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
        shown = progress(plans, "baselines", self.config)
        if written := [plan.path for plan in shown if self._is_written(plan)]:
            store.changed_lines.keep(written)
        if settings.dry_run:
            self._lines[:0] = change_table(self.summary.changes, room(self.config))

    def _is_written(self, plan: FilePlan) -> bool:
        """Write or show the changes of one file; return whether it was written."""
        settings, is_written = self.run.settings, False
        shown = relative_path(plan.path, self.config.invocation_params.dir)
        self._lines += rename_lines(plan.renames, shown, settings.follow_renames)
        if not plan.writes and not (settings.accepted and plan.unused):
            return False
        try:
            if settings.dry_run:
                self._lines += diff_lines(*texts(plan), shown)
            elif plan.writes:
                apply(plan)
                is_written = True
        except BaselineError as error:
            self.add_problem(str(error).replace(str(plan.path), shown))
        else:
            self._lines += explained_lines(len(plan.explained), shown)
            changes = tuple(plan.changes(shown, not settings.dry_run))
            self.summary += RunSummary(changes=changes)
        return is_written

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
        if moved and settings.require_baseline:
            self.add_problem(
                "tests whose files have moved were compared with no baseline; the next run "
                f"compares them [{FindingKind.NO_BASELINE.value}]"
            )
        return {orphan.moved_to for orphan in moved if orphan.moved_to}

    def _shown(self, path: Path) -> str:
        return relative_path(path, self.config.invocation_params.dir)

    def _near(self, path: Path) -> str:
        """A path as `_shown` has it; whole where it is not below the folder pytest began in."""
        shown = self._shown(path)
        return str(path) if shown.startswith("..") else shown


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


def _names_a_gpu(skipped: pytest.TestReport) -> bool:
    """Return whether the reason why a test was skipped is a GPU, and was not given by us."""
    reason = skipped.longrepr[2] if isinstance(skipped.longrepr, tuple) else ""
    ours = reason.endswith(f"[{DeviceError.slug}]")
    return not ours and bool(_GPU.search(reason))


def _offer_of_a_gpu(skipped_count: int) -> list[str]:
    """Return the line that says how to run tests that were skipped, where there is no GPU."""
    has_one = os.environ.get(GPU_VARIABLE) or _DRIVER.exists() or sys.platform != "linux"
    if has_one or not skipped_count:
        return []
    tests = "1 test was" if skipped_count == 1 else f"{skipped_count} tests were"
    return [f"{tests} skipped for want of a GPU; --torchmem-simulate=H100 has a simulated one"]
