"""The end of a run: gather what the tests measured, write baselines and reports, say what happened.

All of it is done in the one process that writes.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import pytest

from pytest_torchmem.plugin.item.sending import room
from pytest_torchmem.plugin.options.option_table import relative_path, typed_nodeid
from pytest_torchmem.plugin.options.settings import Run, SummaryKind
from pytest_torchmem.plugin.run import updates, workers
from pytest_torchmem.plugin.run.asking import asked_about
from pytest_torchmem.plugin.run.updates import FilePlan, Orphan, Outcomes
from pytest_torchmem.plugin.run.workers import Selection
from pytest_torchmem.report.text import tables
from pytest_torchmem.report.text.github import (
    cause_lines,
    error_commands,
    line_commands,
    shrunk_commands,
)
from pytest_torchmem.report.text.markdown import step_summary
from pytest_torchmem.report.text.tables import OrphanEnd
from pytest_torchmem.report.text.terminal import Detail, summary_lines
from pytest_torchmem.report.writing import write_run
from pytest_torchmem.simulate import GPU_VARIABLE, simulated_text
from pytest_torchmem.store.baselines import changed_text
from pytest_torchmem.store.git import git_output
from pytest_torchmem.store.run_reports import RunReport, checked_out, stamped
from pytest_torchmem.values.baseline import Change
from pytest_torchmem.values.errors import BaselineError, DeviceError, ReportError
from pytest_torchmem.values.findings import CodeLines
from pytest_torchmem.values.measured import MeasuredTest, Rank

_WHOLE: Final = (
    pytest.ExitCode.OK,
    pytest.ExitCode.TESTS_FAILED,
    pytest.ExitCode.NO_TESTS_COLLECTED,
)
"""The exit codes of a run that came to its end."""

_GPU: Final = re.compile(r"\b(gpus?|cuda)\b", re.IGNORECASE)
_DRIVER: Final = Path("/dev/nvidiactl")


@dataclass(slots=True)
class _Attempt:
    """The reports of a test's last attempt; a test that is run again starts with a new one."""

    outcome: str = ""
    line: int = 0
    passed: bool = False
    skipped: bool = False
    wants_a_gpu: bool = False
    measured: bytes = b""
    trace: bytes = b""

    def note(self, report: pytest.TestReport) -> None:
        """Take in how one phase ended. A failure stays, whatever comes after it."""
        is_xfail = hasattr(report, "wasxfail")
        telling = report.when in ("setup", "call") or not report.passed
        if telling and self.outcome != "failed":
            self.outcome = report.outcome
            if is_xfail:
                self.outcome = "xfailed" if report.skipped else "xpassed"
            self.line = 0 if report.location[1] is None else report.location[1] + 1
        self.passed |= report.when == "call" and report.passed
        self.skipped |= report.skipped and not is_xfail
        self.wants_a_gpu |= report.skipped and not is_xfail and _names_a_gpu(report)
        self.trace = workers.trace_with(report) or self.trace
        self.measured = workers.detach(report) or self.measured


class Collector:
    """Gathers reports, and acts once at the end.

    There is one in a run: in its only process, or in the controller of the workers. Nothing else
    writes baselines.
    """

    def __init__(self, config: pytest.Config, run: Run, selection: Selection) -> None:
        self.config = config
        self._selection = selection
        self.run = run
        self.summary = RunReport()
        self._attempts: dict[str, _Attempt] = {}
        self._partial = selection.partial
        self._lines: list[str] = []
        self._ended_tests: set[str] = set()
        self._cut_short = False
        self._first_tests: dict[tuple[CodeLines, str], str] = {}
        self._cut: list[pytest.TestReport] = []
        self._failed: list[object] | None = None
        self._renamed: set[tuple[Path, str]] = set()

    def add_problem(self, sentence: str) -> None:
        self.summary += RunReport(problems=(sentence,))

    # Before those that show or write the report.
    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = workers.reported_nodeid(report, self.config)
        self._tell_once(test, report)
        if report.when == "teardown":
            self._ended_tests.add(test)
        if report.when == "setup" or test not in self._attempts:
            self._attempts[test] = _Attempt()
        # The test may have replaced functions that we call; a report that only passed calls none.
        needs_none = report.passed and not workers.has_measured(report)
        with contextlib.nullcontext() if needs_none else self.run.originals.back():
            self._attempts[test].note(report)

    def _tell_once(self, test: str, report: pytest.TestReport) -> None:
        """Cut a failure whose cause another test's failure has told whole to its numbers.

        A limit's failure says more than one of a baseline, such as who holds what is left behind.
        """
        failure = workers.failure_of(report)
        traceback = getattr(report.longrepr, "reprtraceback", None)
        if failure is None or traceback is None or traceback.style != "value":
            return
        cause, kind, sentence = failure
        first = self._first_tests.setdefault((cause, kind), test)
        if first == test or self.config.option.verbose > 1 or not traceback.reprentries:
            return
        numbers = sentence.partition(": ")[0]
        name = typed_nodeid(self.config, first)
        # In place: what xdist sends has the same objects a second time.
        traceback.reprentries[0].lines[:] = [f"{numbers}, by {cause} as in {name}"]
        del traceback.reprentries[1:]
        self._cut.append(report)

    def _hide_cut(self) -> None:
        """Keep pytest from a section for each failure that was cut: its summary has their lines.

        One that printed something has its section. `pytest_terminal_summary` runs when pytest has
        shown all sections, and gives the failures back.
        """
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        stats = getattr(terminal, "stats", {})
        if not getattr(terminal, "no_summary", True) and "failed" in stats:
            hidden = {id(report) for report in self._cut if not report.sections}
            self._failed = stats["failed"]
            stats["failed"] = [r for r in stats["failed"] if id(r) not in hidden]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object, error: object) -> None:
        self._cut_short = self._cut_short or bool(error)
        self._partial = self._partial or workers.ran_partially(node)

    @pytest.hookimpl
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self._cut_short |= bool(session.shouldstop or session.shouldfail)
        self._cut_short |= session.exitstatus not in _WHOLE
        if self.run.settings.off:
            self._lines.append(
                "off: no test was measured, and no limit and no baseline was checked"
            )
            return
        self._partial = self._partial or self._cut_short or self._selection.partial
        attempts = self._attempts.values()
        self.summary += RunReport(
            tests=tuple(workers.unpacked(a.measured) for a in attempts if a.measured)
        )
        self._update()
        if self.run.settings.accepted and self._cut_short:
            self._lines += tables.cut_short_lines(session.testscollected, len(self._ended_tests))
        self._lines += tables.notices(self._as_typed(), self.run.settings.accepted)
        # Every test of the project had its turn: nobody typed which to run.
        whole = not self._partial and self.config.args_source is not pytest.Config.ArgsSource.ARGS
        self._lines += tables.known_lines(self.summary, self.run.settings.known_holders, whole)
        compares = self.run.settings.require_baseline or self.run.settings.accepted
        # All services that run tests and are known set CI.
        if os.environ.get("CI", "").lower() in ("true", "1") and not compares:
            unguarded = tables.unguarded_line(self.summary)
            title = "::warning title=memory has no baseline::" if on_github() else ""
            self._lines += [title + unguarded] if unguarded else []
        self._lines += _offer_of_a_gpu(sum(attempt.wants_a_gpu for attempt in attempts))
        self._lines += self._cut_off_lines()
        self._tell_other_plugins(self._report())
        if self.summary.problems and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if session.exitstatus == pytest.ExitCode.TESTS_FAILED:
            self._hide_cut()

    def _cut_off_lines(self) -> Iterator[str]:
        """Yield a line where failures lack the lines that have changed, for want of history."""
        store = self.run.store
        grown_tests = [
            (test, window)
            for test, window in self.summary.windows
            if window.change is Change.GROWN and window.sentence
        ]
        entries = (
            store.stored_entry(
                store.path(Path(test.file), test.environment), test.environment, window.key
            )
            for test, window in grown_tests
        )
        if any(store.changed_lines.is_cut_off(entry) for entry in entries):
            yield (
                "this clone is shallow and lacks the commits of the baselines, so failures cannot "
                "say which lines have changed since: fetch the history (fetch-depth: 0 of "
                "actions/checkout)"
            )

    @pytest.hookimpl(tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._failed is not None:
            terminalreporter.stats["failed"] = self._failed
        if not self.summary.anything and not self._lines:
            return
        detail = _detail(self.run.settings.summary, terminalreporter.verbosity)
        width = self.config.get_terminal_writer().fullwidth
        lines = summary_lines(
            self._as_typed(),
            detail,
            width,
            room(self.config),
            stored_by=self._stored_by,
            renamed={
                (typed_nodeid(self.config, test.test), window.key)
                for test, window in self.summary.windows
                if (Path(test.file), window.key) in self._renamed
            },
        )
        if lines or self._lines:
            terminalreporter.ensure_newline()  # or the first line of the table would see to it
            rank = Rank.launched()  # of a job, each rank says its own
            parts = [str(rank)] if rank.count > 1 else []
            parts += [simulation] if (simulation := simulated_text()) else []
            terminalreporter.section(", ".join(["torchmem", *parts]))
        for line in lines:
            terminalreporter.write_line(line.text, **dict.fromkeys(line.styles, True))
        for text in self._lines:
            terminalreporter.write_line(text)
        compared_tests = (t for t, w in self.summary.windows if w.change is not Change.NOT_COMPARED)
        compared_files = {Path(test.file) for test in compared_tests}
        for name in self.run.store.unknown_fallbacks(compared_files) if compared_files else ():
            text = f"torchmem_baseline_from = {name}: there is no baseline of that name"
            terminalreporter.write_line(text, yellow=True)

    @property
    def _stored_by(self) -> str:
        """The options that store a measurement without a baseline; ``""`` if the run has them."""
        accepted = self.run.settings.accepted
        if Change.NEW in accepted:
            return ""
        return "--torchmem-update-baseline" + (" --torchmem-accept=new" if accepted else "")

    def _as_typed(self) -> RunReport:
        """The run with the tests as pytest names them where it was started."""
        run = self._run_report()
        tests = (replace(t, test=typed_nodeid(self.config, t.test)) for t in run.tests)
        return replace(run, tests=tuple(tests))

    def _run_report(self) -> RunReport:
        """Everything that is known of the run, but when and with what it was made."""
        return replace(self.summary, tests=tuple(map(self._as_it_ended, self.summary.tests)))

    def _as_it_ended(self, measured: MeasuredTest) -> MeasuredTest:
        attempt, rootdir = self._attempts[measured.test], self.config.rootpath
        # The name of a file says something about the machine; only its place in the project stays.
        file = measured.test.partition("::")[0]
        for folder in (rootdir, checkout(rootdir)):
            with contextlib.suppress(ValueError):
                file = Path(measured.file).relative_to(folder).as_posix()
        return replace(measured, file=file, outcome=attempt.outcome, line=attempt.line)

    def _tell_other_plugins(self, paths: Sequence[Path]) -> None:
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
        for path in paths:
            hook.pytest_torchmem_report_written(config=self.config, path=path)

    def _report(self) -> list[Path]:
        """Write the reports that were asked for, and what GitHub shows when it runs this.

        Returns the reports that could be written.
        """
        written_paths: list[Path] = []
        settings, github = self.run.settings, on_github() and self.summary.anything
        if not settings.reports and not github:
            return written_paths
        run = stamped(self._run_report(), self.config.rootpath, Rank.launched())
        for report_path in settings.report_paths:
            try:
                path = write_run(run, report_path, {t: a.trace for t, a in self._attempts.items()})
            except ReportError as error:
                self.add_problem(str(error).replace(str(report_path), self._near(report_path)))
                continue
            written_paths.append(path)
            self._lines.append(f"report written: {self._near(path)}")
        try:
            self._lines += github_lines(run, self.config.rootpath) if github else []
        except ReportError as error:
            self.add_problem(str(error))
        return written_paths

    def _update(self) -> None:
        """Write the accepted changes, file by file; one that fails does not stop the others."""
        settings, store = self.run.settings, self.run.store
        attempts = self._attempts.items()
        outcomes = Outcomes(
            frozenset(self._attempts),
            frozenset(test for test, a in attempts if a.passed and a.outcome != "failed"),
            frozenset(test for test, a in attempts if a.skipped),
            self._partial,
        )
        # Where not every test had its turn, its module may be there all the same.
        folders: set[Path] = set()
        if not self._partial:
            folders = updates.baseline_folders(self.config, settings.baseline_dir)
        orphans = updates.find_orphans(folders, self.summary, store)
        followed = self._follow_modules(orphans)
        compares = bool(settings.accepted) and not settings.dry_run
        if followed and compares:
            self.summary = updates.compared_anew(self.summary, followed, store)
        plans = updates.plan_updates(self.summary, outcomes, settings, store)
        plans = [plan for plan in plans if compares or plan.module not in followed]
        if not settings.accepted:
            self._lines += tables.unused_lines(
                plan.unused.keys() - plan.renames.keys() for plan in plans
            )
        if settings.accepted and settings.ask:
            try:
                plans = asked_about(plans, self.config)
            except pytest.UsageError as error:
                self.add_problem(f"nothing is stored: {error}")
                plans = []
        if written_plans := [plan for plan in plans if self._is_written(plan)]:
            store.forget()  # what was read before it was written
            entries = (
                store.stored_entry(plan.path, plan.environment, key)
                for plan in written_plans
                for key in plan.file_changes.written
            )
            store.changed_lines.keep([entry.text for entry in entries])
            self._lines += self._lines_for_git({store.root(plan.module) for plan in written_plans})
        self._lines += self._orphan_lines(orphans, followed)
        if settings.dry_run and (self.summary.changes or not followed):
            self._lines[:0] = tables.change_table(self.summary.changes, room(self.config))

    def _lines_for_git(self, folders: Collection[Path]) -> Iterator[str]:
        """Yield what to type so that git knows the baselines that it does not know yet."""
        others = ("ls-files", "--others", "--exclude-standard", "--", ".")
        if new := [f for f in sorted(folders) if git_output(f, *others)]:
            files = shlex.join(map(self._shown_path, new))
            yield f"git does not know all of them yet: git add {files}"

    def _is_written(self, plan: FilePlan) -> bool:
        """Write or show the changes of one file; return whether it was written."""
        settings, is_written = self.run.settings, False
        shown_path = relative_path(plan.path, self.config.invocation_params.dir)
        self._renamed |= {(plan.module, key) for key in plan.renames.values()}
        if not settings.follows_renames:
            self._lines += tables.rename_lines(plan.renames, plan.changed, shown_path)
        if not plan.writes and not (settings.accepted and plan.unused):
            return False
        try:
            if settings.dry_run:
                texts = changed_text(plan.path, plan.environment, plan.file_changes)
                self._lines += tables.diff_lines(*texts, shown_path)
            elif plan.writes:
                updates.apply(plan)
                is_written = True
        except BaselineError as error:
            self._not_written(BaselineError(error.sentence.replace(str(plan.path), shown_path)))
        else:
            self._lines += tables.explained_lines(len(plan.explained), shown_path)
            changes = tuple(plan.changes(shown_path, not settings.dry_run))
            self.summary += RunReport(changes=changes)
        return is_written

    def _not_written(self, error: BaselineError) -> None:
        """Fail a run that was to store; one that only follows renames goes on where it cannot."""
        if self.run.settings.accepted:
            self.add_problem(str(error))
        else:
            self._lines.append(f"renames are not followed: {error}")

    def _follow_modules(self, orphans: Sequence[Orphan]) -> set[Path]:
        """Move the baselines of modules that are gone; remove the others where told to.

        Returns the modules that were given baselines.
        """
        settings, store = self.run.settings, self.run.store
        moved_orphans = [o for o in orphans if o.moved_to and settings.follows_renames]
        removed_orphans = [
            o for o in orphans if not o.moved_to and Change.UNUSED in settings.accepted
        ]
        if not settings.dry_run:
            try:
                for orphan in moved_orphans:
                    updates.move(orphan, store)
                for orphan in removed_orphans:
                    updates.remove(orphan)
            except OSError as error:
                self._not_written(BaselineError(f"a baseline cannot be moved: {error}"))
                return set()
        return {orphan.moved_to for orphan in moved_orphans if orphan.moved_to}

    def _orphan_lines(self, orphans: Sequence[Orphan], followed: Collection[Path]) -> Iterator[str]:
        """Yield what became of each module that is gone, after the changes were written."""
        settings = self.run.settings
        for orphan in orphans:
            what = self._shown_path(orphan.module), len(orphan.keys)
            if new := orphan.moved_to:
                self._renamed |= {(new, key) for key in orphan.keys}
                end = OrphanEnd.MOVED_AND_COMPARED if settings.accepted else OrphanEnd.MOVED
                if new not in followed:
                    end = OrphanEnd.MAY_MOVE
                elif settings.dry_run:
                    end = OrphanEnd.WOULD_MOVE
                yield tables.orphan_line(*what, end, self._shown_path(new))
            else:
                is_removed = not settings.dry_run and Change.UNUSED in settings.accepted
                yield tables.orphan_line(*what, OrphanEnd.REMOVED if is_removed else OrphanEnd.KEPT)

    def _shown_path(self, path: Path) -> str:
        return relative_path(path, self.config.invocation_params.dir)

    def _near(self, path: Path) -> str:
        """A path as `_shown_path` has it; whole where it is not below where pytest began."""
        shown_path = self._shown_path(path)
        return str(path) if shown_path.startswith("..") else shown_path


def _detail(kind: SummaryKind, verbosity: int) -> Detail:
    """Return how much is said: the whole table where it was asked for, else as pytest is told."""
    if kind is SummaryKind.OFF:
        return Detail.PROBLEMS
    detail = Detail(max(Detail.PROBLEMS, min(Detail.COMPOSITION, verbosity)))
    return max(detail, Detail.ALL) if kind is SummaryKind.ALL else detail


def checkout(rootdir: Path) -> Path:
    """Return the folder that files of reports are named from."""
    return Path(os.environ.get("GITHUB_WORKSPACE") or rootdir)


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
    annotations = line_commands(run, _grown_files(run, rootdir))
    return [*error_commands(run), *annotations, *shrunk_commands(run)]


def _grown_files(run: RunReport, rootdir: Path) -> dict[str, str]:
    """Return the files of causes that are checked out, each with its name for GitHub."""
    files = {file for test in run.tests for file, _ in cause_lines(test)}
    start, paths = checkout(rootdir), {}
    for file in checked_out(rootdir, sorted(files)) if files else ():
        with contextlib.suppress(ValueError):
            paths[file] = (rootdir / file).relative_to(start).as_posix()
    return paths


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
    tests, them = ("test was", "it") if skipped_count == 1 else ("tests were", "them")
    return [
        f"{skipped_count} {tests} skipped because there is no GPU; --torchmem-simulate=H100 runs "
        f"{them} on a simulated one"
    ]
