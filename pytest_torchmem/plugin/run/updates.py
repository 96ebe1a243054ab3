"""The changes of a run to the baselines: planned as values, shown or written last."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from pytest_torchmem.analysis.judge.environments import Environment
from pytest_torchmem.plugin.options.settings import Settings
from pytest_torchmem.store.baseline_file import FileChanges, changed_text, root_of, write_file
from pytest_torchmem.store.baseline_rows import Numbers
from pytest_torchmem.store.baselines import BaselineStore, entry_key, tell_git
from pytest_torchmem.values.baseline import BaselineEntry, Change
from pytest_torchmem.values.contributors import CategoryBytes
from pytest_torchmem.values.errors import BaselineError
from pytest_torchmem.values.measured import BaselineChange, MeasuredTest, RunSummary, Window

Place = tuple[Path, tuple[tuple[str, str], ...]]
"""A test module and an environment: one baseline file."""

_COMPARED: Final = (Change.SAME, Change.WITHIN, Change.NEW, Change.GROWN, Change.SHRUNK)


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The endings of the tests of a run, by node id.

    Attributes:
        seen: Tests that were started.
        passed: Tests that passed in all their phases.
        skipped: Tests that were skipped; those expected to fail are not.
        partial: The run picked tests out of their modules, or ended early.
    """

    seen: frozenset[str] = frozenset()
    passed: frozenset[str] = frozenset()
    skipped: frozenset[str] = frozenset()
    partial: bool = False


@dataclass(frozen=True, slots=True)
class FilePlan:
    """The plan for one baseline file.

    Attributes:
        module: The test module.
        path: The file.
        environment: What it is measured on.
        written: Windows whose numbers replace the entry of their key, or become a new one.
        unused: Entries that no test asked for, by key.
        renames: Keys of entries that a new test has the numbers of, and that test's key.
        removes: Unused entries are to be deleted.
        follows: Entries with a new name are to be moved.
        repaired: Keys of written windows whose entry is there, and cannot be used.
        explained: Windows whose numbers stay, and whose entry does not yet say what they are made
            of: one of an older format, or one whose origins were lost.
    """

    module: Path
    path: Path
    environment: Environment
    written: tuple[Window, ...] = ()
    unused: Mapping[str, BaselineEntry | None] = field(default_factory=dict)
    renames: Mapping[str, str] = field(default_factory=dict)
    removes: bool = False
    follows: bool = False
    repaired: frozenset[str] = frozenset()
    explained: tuple[Window, ...] = ()

    @property
    def file_changes(self) -> FileChanges:
        moved = self.renames if self.follows else {}
        written = {w.key: BaselineEntry.of(w.result) for w in (*self.explained, *self.written)}
        removed = frozenset(self.unused) - set(moved) if self.removes else frozenset()
        return FileChanges(
            {key: entry for key, entry in written.items() if key not in moved.values()},
            removed,
            dict(moved),
        )

    @property
    def writes(self) -> bool:
        changes = self.file_changes
        return bool(changes.written or changes.removed or changes.renamed)

    def changes(self, shown: str, done: bool) -> Iterator[BaselineChange]:
        """Yield what is to be told; ``done`` where the file was written."""
        moved = {new: old for old, new in self.renames.items()} if self.follows else {}
        for window in self.written:
            after_bytes = window.result.peak.total
            before_bytes = 0 if window.change is Change.NEW else window.baseline_bytes
            change = BaselineChange(
                shown, window.key, window.change, before_bytes, after_bytes, done
            )
            repaired = window.key in self.repaired
            yield replace(change, renamed_from=moved.get(window.key, ""), repaired=repaired)
        for key, entry in self.unused.items():
            if key not in moved.values():
                before_bytes = entry.total if entry else 0
                gone = done and self.removes
                yield BaselineChange(shown, key, Change.UNUSED, before_bytes, 0, gone)


def plan_updates(
    summary: RunSummary, outcomes: Outcomes, settings: Settings, store: BaselineStore
) -> list[FilePlan]:
    """Return what an update would do to each file, and which entries were renamed or are unused.

    Only tests that passed change anything.
    """
    places = _by_place(summary)
    plans = []
    for (module, key), tests in sorted(places.items()):
        environment = dict(key)
        path = store.path(module, environment)
        elsewhere = {
            t.test for (m, k), others in places.items() if m == module and k != key for t in others
        }
        unused = _Unused(path, environment, store).find(tests, outcomes, elsewhere)
        windows = [w for t in tests if t.test in outcomes.passed for w in t.windows]
        plan = _plan(module, path, environment, windows, unused, settings)
        new = {w.key for w in plan.written if w.change is Change.NEW}
        there = _keys(path, environment, store) if new else frozenset()
        explained = _unexplained(plan, windows, store) if settings.accepted else ()
        plans.append(replace(plan, repaired=there & new, explained=explained))
    return plans


def _unexplained(plan: FilePlan, windows: list[Window], store: BaselineStore) -> tuple[Window, ...]:
    """Return windows with the stored numbers, whose entry does not say what they are made of."""
    found = []
    for window in windows:
        if window.change is Change.SAME and not window.reference:
            stored = store.entry(plan.path, plan.environment, window.key)
            now = BaselineEntry.of(window.result)
            if (
                stored
                and now.at_peak_live
                and not stored.at_peak_live
                and Numbers.of(stored) == Numbers.of(now)
            ):
                found.append(window)
    return tuple(found)


def _keys(path: Path, environment: Environment, store: BaselineStore) -> frozenset[str]:
    """Return the keys in a file; none where it cannot be read, which its tests have said."""
    try:
        return store.keys(path, environment)
    except BaselineError:
        return frozenset()


def _plan(
    module: Path,
    path: Path,
    environment: Environment,
    windows: list[Window],
    unused: dict[str, BaselineEntry | None],
    settings: Settings,
) -> FilePlan:
    left = {key: entry for key, entry in unused.items() if entry is not None}
    new = {
        w.key: Renameable(w.result.name, BaselineEntry.of(w.result))
        for w in windows
        if left and w.change is Change.NEW
    }
    renames = find_renames(left, new) if new else {}
    moved = set(renames.values()) if settings.follow_renames else set()
    accepted = (w for w in windows if w.change in settings.accepted or w.key in moved)
    return FilePlan(
        module,
        path,
        environment,
        tuple(accepted),
        unused,
        renames,
        removes=Change.UNUSED in settings.accepted,
        follows=settings.follow_renames,
    )


def apply(plan: FilePlan) -> None:
    """Write one file, and tell git once how to merge such files. Raises `BaselineError`."""
    write_file(plan.path, plan.environment, plan.file_changes)
    tell_git(root_of(plan.path, plan.environment))


def texts(plan: FilePlan) -> tuple[str, str]:
    """Return a file's text before and after. Raises `BaselineError`."""
    return changed_text(plan.path, plan.environment, plan.file_changes)


def _by_place(summary: RunSummary) -> dict[Place, list[MeasuredTest]]:
    places: dict[Place, list[MeasuredTest]] = defaultdict(list)
    for test in summary.tests:
        if test.environment:
            places[Path(test.file), tuple(sorted(test.environment.items()))].append(test)
    return places


@dataclass(frozen=True, slots=True)
class _Unused:
    """Looks for the entries of one file that no test asked for."""

    path: Path
    environment: Environment
    store: BaselineStore

    def find(
        self, tests: list[MeasuredTest], outcomes: Outcomes, elsewhere: set[str]
    ) -> dict[str, BaselineEntry | None]:
        """Return them by key; None for one that is damaged.

        ``tests`` are those of the module that were measured in this environment, ``elsewhere``
        those in another. None of a module count that did not run as a whole. An entry whose own
        test did not pass, or was measured elsewhere this time, may be asked for next time.
        """
        ran = {test for test in outcomes.seen if _module_of(test) == _module_of(tests[0].test)}
        if outcomes.partial or ran & outcomes.skipped:
            return {}
        keys = _keys(self.path, self.environment, self.store)
        here = {t.test for t in tests}
        pending = {entry_key(test) for test in (ran - outcomes.passed) | (elsewhere - here)}
        used = {w.key for t in tests for w in t.windows if w.change in _COMPARED}
        # Whether doctests are collected at all is an option of each run.
        doctests = any(_of_doctest(entry_key(test)) for test in ran)
        return {
            key: self._entry(key)
            for key in sorted(keys - used)
            if not any(key == test or key.startswith(f"{test}::") for test in pending)
            and (doctests or not _of_doctest(key))
        }

    def _entry(self, key: str) -> BaselineEntry | None:
        try:
            return self.store.entry(self.path, self.environment, key)
        except BaselineError:
            return None


def _of_doctest(key: str) -> bool:
    """True for the key of a doctest: its first part is no name of a function or a class."""
    return "." in key.partition("[")[0].partition("::")[0]


def _module_of(test: str) -> str:
    return test.partition("::")[0]


@dataclass(frozen=True, slots=True)
class Renameable:
    """A new measurement: its region, ``""`` for the whole body, and what it would store."""

    region: str
    entry: BaselineEntry


def find_renames(
    unused: Mapping[str, BaselineEntry], new: Mapping[str, Renameable]
) -> dict[str, str]:
    """Return new keys by old ones, for entries of one module.

    Two belong together when their parameters, their region and all their numbers are equal, and
    neither could belong to another one: a guess is worse than a question.
    """
    signatures: dict[object, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    regions = {entry.region for entry in new.values()}
    for key, entry in unused.items():
        for region in regions:
            if not region or key.endswith(f"::{region}"):
                signatures[_signature(key, region, entry)][0].append(key)
    for key, measured in new.items():
        signatures[_signature(key, measured.region, measured.entry)][1].append(key)
    return {old[0]: added[0] for old, added in signatures.values() if len(old) == len(added) == 1}


def _signature(
    key: str, region: str, entry: BaselineEntry
) -> tuple[str, str, int, CategoryBytes, CategoryBytes]:
    at = key.find("[")
    parameters = key[at:] if at >= 0 else ""
    return parameters, region, entry.total, entry.peaks, entry.retained
