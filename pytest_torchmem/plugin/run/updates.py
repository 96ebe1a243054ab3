"""The changes of a run to the baselines: planned as values, shown or written last.

A run of the whole looks for baselines whose test module is gone, too, so that none is lost in
silence.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

import pytest

from pytest_torchmem.plugin.options.option_table import option_named, place_of
from pytest_torchmem.plugin.options.settings import Run, Settings
from pytest_torchmem.plugin.run.workers import possible_baseline_nodeids
from pytest_torchmem.store import baselines
from pytest_torchmem.store.baseline_file import read_any
from pytest_torchmem.store.baseline_rows import origins_path
from pytest_torchmem.store.baselines import FOLDER, BaselineStore, FileChanges
from pytest_torchmem.store.files import locked
from pytest_torchmem.store.run_reports import RunReport
from pytest_torchmem.values.baseline import (
    Allowance,
    BaselineEntry,
    Change,
    ChangedNumber,
    Environment,
    Numbers,
    told_change,
)
from pytest_torchmem.values.errors import BaselineError
from pytest_torchmem.values.findings import FindingKind
from pytest_torchmem.values.json_values import shown
from pytest_torchmem.values.measured import BaselineChange, MeasuredTest, Window

Place = tuple[Path, tuple[tuple[str, str], ...]]
"""A test module and an environment: one baseline file."""

_COMPARED: Final = (Change.SAME, Change.WITHIN, Change.NEW, Change.GROWN, Change.SHRUNK)


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The endings of the tests of a run, by node id.

    Attributes:
        started_tests: Tests that were started.
        passed: Tests that passed in all their phases.
        skipped: Tests that were skipped; those expected to fail are not.
        partial: The run picked tests out of their modules, or ended early.
    """

    started_tests: frozenset[str] = frozenset()
    passed: frozenset[str] = frozenset()
    skipped: frozenset[str] = frozenset()
    partial: bool = False


@dataclass(frozen=True, slots=True)
class FilePlan:
    """The plan for one baseline file.

    Attributes:
        environment: What it is measured on.
        written_windows: Windows whose numbers replace the entry of their key, or become a new one.
        unused: Entries that no test asked for, by key.
        renames: Keys of entries that a new test has the numbers or the code of, and that test's
            key.
        changed: What the new tests need otherwise than these entries, by the test's key.
        removes: Unused entries are to be deleted.
        follows: Entries with a new name are to be moved.
        repaired: Keys of written windows whose entry is there, and cannot be used.
        explained: Windows whose numbers stay, and whose entry does not yet say what they are made
            of: its origins were lost.
    """

    module: Path
    path: Path
    environment: Environment
    written_windows: tuple[Window, ...] = ()
    unused: Mapping[str, BaselineEntry | None] = field(default_factory=dict)
    renames: Mapping[str, str] = field(default_factory=dict)
    changed: Mapping[str, ChangedNumber] = field(default_factory=dict)
    removes: bool = False
    follows: bool = False
    repaired: frozenset[str] = frozenset()
    explained: tuple[Window, ...] = ()

    @property
    def file_changes(self) -> FileChanges:
        renamed_keys = self.renames if self.follows else {}
        removed_keys = frozenset(self.unused) - set(renamed_keys) if self.removes else frozenset()
        # What is called as before keeps its numbers, unless others are accepted.
        entries = {
            w.key: BaselineEntry.of(w.result)
            for w in (*self.explained, *self.written_windows)
            if w.change is not Change.NEW or w.key not in renamed_keys.values()
        }
        return FileChanges(entries, removed_keys, dict(renamed_keys))

    @property
    def writes(self) -> bool:
        changes = self.file_changes
        return bool(changes.written or changes.removed or changes.renamed)

    def changes(self, shown_path: str, is_done: bool) -> Iterator[BaselineChange]:
        """Yield the changes to report; ``is_done`` says that the file was written."""
        renamed_keys = {new: old for old, new in self.renames.items()} if self.follows else {}
        for window in self.written_windows:
            after_bytes = window.result.peak.total
            is_new, old = window.change is Change.NEW, renamed_keys.get(window.key, "")
            stored = self.unused.get(old)
            before_bytes = stored.total if stored else 0
            yield BaselineChange(
                shown_path,
                window.key,
                window.change,
                before_bytes if is_new else window.baseline_bytes,
                after_bytes,
                is_done,
                renamed_from=old,
                repaired=window.key in self.repaired,
                changed=None if is_new else window.told_by,
            )
        for key, entry in self.unused.items():
            if key not in renamed_keys.values():
                before_bytes = entry.total if entry else 0
                is_removed = is_done and self.removes
                yield BaselineChange(shown_path, key, Change.UNUSED, before_bytes, 0, is_removed)


def plan_updates(
    summary: RunReport, outcomes: Outcomes, settings: Settings, store: BaselineStore
) -> list[FilePlan]:
    """Return what an update would do to each file, and which entries were renamed or are unused.

    Only tests that passed change anything.
    """
    places: dict[Place, list[MeasuredTest]] = defaultdict(list)
    for test in summary.tests:
        if test.environment:
            places[Path(test.file), tuple(sorted(test.environment.items()))].append(test)
    plans = []
    for (module, key), tests in sorted(places.items()):
        environment = dict(key)
        path = store.path(module, environment)
        keys: frozenset[str] = frozenset()
        with contextlib.suppress(BaselineError):  # for which its tests have failed
            keys = store.keys(path, environment)
        elsewhere = {
            t.test for (m, k), others in places.items() if m == module and k != key for t in others
        }
        unused: dict[str, BaselineEntry | None] = {}
        for name in _unused(keys, tests, outcomes, elsewhere):
            unused[name] = None
            with contextlib.suppress(BaselineError):
                unused[name] = store.entry(path, environment, name)
        windows = _largest([w for t in tests if t.test in outcomes.passed for w in t.windows])
        windows += [w for t in tests for w in t.windows if w.kinds == (FindingKind.NO_BASELINE,)]
        plan = FilePlan(module, path, environment, unused=unused)
        plan = _planned(plan, windows, keys, settings, store)
        explained = _unexplained(plan, windows, store) if settings.accepted else ()
        plans.append(replace(plan, explained=explained))
    return plans


def _largest(windows: Iterable[Window]) -> list[Window]:
    """Return one window for each entry: of the repetitions of a test, the one with most memory."""
    largest: dict[str, Window] = {}
    for window in windows:
        largest_window = largest.setdefault(window.key, window)
        largest[window.key] = max(largest_window, window, key=lambda w: w.result.peak.total)
    return list(largest.values())


def _unexplained(plan: FilePlan, windows: list[Window], store: BaselineStore) -> tuple[Window, ...]:
    """Return windows with the stored numbers, whose entry does not say what they are made of."""
    unexplained = []
    for window in windows:
        if window.change is Change.SAME and not window.reference:
            stored_entry = store.entry(plan.path, plan.environment, window.key)
            measured_entry = BaselineEntry.of(window.result)
            is_bare = stored_entry and not stored_entry.at_peak_live and measured_entry.at_peak_live
            if stored_entry and is_bare and Numbers.of(stored_entry) == Numbers.of(measured_entry):
                unexplained.append(window)
    return tuple(unexplained)


def _planned(
    plan: FilePlan,
    windows: list[Window],
    keys: frozenset[str],
    settings: Settings,
    store: BaselineStore,
) -> FilePlan:
    """Return a plan with what is written and renamed; ``keys`` are those in the file."""
    unused_entries = {key: entry for key, entry in plan.unused.items() if entry is not None}
    new = {w.key: w for w in windows if unused_entries and w.change is Change.NEW}
    renames = find_renames(unused_entries, new) if new else {}
    if len(renames) < min(len(unused_entries), len(new)):
        others = unused_entries.keys() - renames.keys()
        in_code = store.renamed_keys(plan.path, plan.environment, others, plan.module)
        renames |= {o: key for o, key in in_code.items() if key in new.keys() - renames.values()}
    moved_keys = set(renames.values()) if settings.follows_renames else set()
    compared = {key: _compare(new[key], unused_entries[old]) for old, key in renames.items()}
    pairs = ((w, compared[w.key] if w.key in moved_keys else w) for w in windows)
    windows = [after if after.change in settings.accepted else w for w, after in pairs]
    written_windows = tuple(
        w for w in windows if w.change in settings.accepted or w.key in moved_keys
    )
    return replace(
        plan,
        written_windows=written_windows,
        renames=renames,
        changed={k: w.told_by for k, w in compared.items() if w.change is not Change.SAME},
        removes=Change.UNUSED in settings.accepted,
        follows=settings.follows_renames,
        repaired=keys.intersection(w.key for w in written_windows if w.change is Change.NEW),
    )


def apply(plan: FilePlan) -> None:
    """Write one file, and tell git once how to merge such files. Raises `BaselineError`."""
    baselines.write_file(plan.path, plan.environment, plan.file_changes)
    baselines.tell_git(baselines.root_of(plan.path, plan.environment))


def _unused(
    keys: frozenset[str], tests: list[MeasuredTest], outcomes: Outcomes, elsewhere: set[str]
) -> Iterator[str]:
    """Yield those of the ``keys`` in a file that no test asked for.

    ``tests`` are those of the module that were measured in this environment, ``elsewhere`` those in
    another. None of a module count that did not run as a whole. An entry whose own test did not
    pass, or was measured elsewhere this time, may be asked for next time.
    """
    module = tests[0].test.partition("::")[0]
    finished_tests = {test for test in outcomes.started_tests if test.partition("::")[0] == module}
    if outcomes.partial or finished_tests & outcomes.skipped:
        return
    nodeids = {t.test for t in tests}
    waiting = (finished_tests - outcomes.passed) | (elsewhere - nodeids)
    pending = {
        baselines.entry_key(one) for test in waiting for one in possible_baseline_nodeids(test)
    }
    used_keys = {w.key for t in tests for w in t.windows if w.change in _COMPARED}
    # An option of each run decides whether it collects doctests; without them it misses none.
    doctests = any(_of_doctest(baselines.entry_key(test)) for test in finished_tests)
    for key in sorted(keys - used_keys):
        is_pending = any(key == test or key.startswith(f"{test}::") for test in pending)
        if not is_pending and (doctests or not _of_doctest(key)):
            yield key


def _of_doctest(key: str) -> bool:
    """True for the key of a doctest: its first part is no name of a function or a class."""
    return "." in key.partition("[")[0].partition("::")[0]


def find_renames(unused: Mapping[str, BaselineEntry], new: Mapping[str, Window]) -> dict[str, str]:
    """Return new keys by old ones, for entries of one module; ``new`` are measured, by key.

    Two belong together when their parameters, their region and all their numbers are equal, or
    their function instead of their parameters, and neither could belong to another one: a guess is
    worse than a question.
    """
    regions = {window.result.name for window in new.values()}
    renames: dict[str, str] = {}
    for part in (slice(1, None), slice(1)):  # the parameters of a test, its function
        signatures: dict[object, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
        for key in unused.keys() - renames.keys():
            for region in regions:
                if not region or key.endswith(f"::{region}"):
                    numbers = Numbers.of(unused[key])
                    signatures[key.partition("[")[part], region, numbers][0].append(key)
        for key in new.keys() - set(renames.values()):
            result = new[key].result
            signature = key.partition("[")[part], result.name, Numbers.measured(result)
            signatures[signature][1].append(key)
        renames |= {
            old[0]: added[0] for old, added in signatures.values() if len(old) == len(added) == 1
        }
    return renames


_ALIKE: Final = 0.5
"""The share of its tests that a module must have in common with one that is gone to be taken for
it."""


@dataclass(frozen=True, slots=True)
class Orphan:
    """A module that is gone, and its baselines.

    Attributes:
        module: Where the module was, with ``.py`` where its name had no other ending.
        moved_to: The new module that has most of its tests; None where there is none, or several.
    """

    module: Path
    files: tuple[Path, ...]
    keys: frozenset[str]
    moved_to: Path | None = None


def baseline_folders(config: pytest.Config, baseline_dir: Path | None) -> set[Path]:
    """Return the folders of baselines at or below the places where this run looks for tests."""
    if baseline_dir is not None:
        return {baseline_dir}
    skipped = (*config.getini("norecursedirs"), "__pycache__")
    orphans = set()
    for argument in config.args:
        start = Path(config.invocation_params.dir, str(argument).partition("::")[0])
        for folder, names, _ in os.walk(start):
            if FOLDER in names:
                orphans.add(Path(folder, FOLDER))
            names[:] = [n for n in names if n != FOLDER and not any(fnmatch(n, p) for p in skipped)]
    return orphans


def require_named(config: pytest.Config, run: Run) -> None:
    """Raise `pytest.UsageError` where the name of a baseline was typed and no baseline has it.

    The one of the ini file may be missing: its tests have no baseline, and the run says so.
    """
    settings, option = run.settings, option_named("baseline-from")
    if config.getoption(option.flag) is None:
        return
    start = config.invocation_params.dir
    files = (Path(start, str(argument).partition("::")[0]) for argument in config.args)
    beside = {file.parent / FOLDER for file in files if file.is_file()}
    folders = baseline_folders(config, settings.baseline_dir) | beside
    environments = sorted({path.name for folder in folders for path in folder.glob("*/")})
    for name in settings.fallbacks:
        if name not in environments:
            others = (
                f"there are {', '.join(environments)}" if environments else "there are none at all"
            )
            error = BaselineError(f"no baselines are of {shown(name)}; {others}")
            raise pytest.UsageError(f"{place_of(config, option)}: {error}")


def find_orphans(folders: Iterable[Path], summary: RunReport, store: BaselineStore) -> list[Orphan]:
    """Return the modules that are gone and have baselines, and which new one each has become."""
    files: dict[Path, list[Path]] = defaultdict(list)
    for folder in folders:
        for module, file in store.files(folder):
            python = module.with_name(f"{module.name}.py")
            if not module.exists() and not python.exists():
                files[module if module.suffix else python].append(file)
    orphans = []
    for module in sorted(files):
        keys: dict[Path, frozenset[str]] = {}
        for file in files[module]:
            with contextlib.suppress(BaselineError):  # what cannot be read is not ours to move
                keys[file] = frozenset(read_any(file)[1].lines)
        orphans.append(Orphan(module, tuple(sorted(keys)), frozenset().union(*keys.values())))
    # The modules without any baseline, and the keys of what was measured in them.
    new: dict[Path, set[str]] = defaultdict(set)
    tests = set()
    for test, window in summary.windows if orphans else ():
        if window.change is Change.NEW:
            new[Path(test.file)].add(window.key)
            if store.path(Path(test.file), test.environment).exists():
                tests.add(Path(test.file))
    new = {module: keys for module, keys in new.items() if module not in tests}
    return [_followed(orphan, orphans, new) for orphan in orphans if orphan.keys]


def _followed(orphan: Orphan, all_: list[Orphan], new: Mapping[Path, set[str]]) -> Orphan:
    """Return an orphan with its new module, if neither of the two has another one as near."""
    near = [module for module, keys in new.items() if _are_alike(orphan.keys, keys)]
    rivals = [other for other in all_ if near and _are_alike(other.keys, new[near[0]])]
    return replace(orphan, moved_to=near[0]) if len(near) == len(rivals) == 1 else orphan


def _are_alike(one: frozenset[str], other: set[str]) -> bool:
    return len(one & other) >= _ALIKE * max(len(one), len(other), 1)


def move(orphan: Orphan, store: BaselineStore) -> None:
    """Give the baselines of a module that is gone to the new one. Raises `OSError`."""
    module = orphan.moved_to or orphan.module
    for file in orphan.files:
        target = store.path_in(module, store.environment_of(file))
        with locked(store.root(module)):
            target.parent.mkdir(parents=True, exist_ok=True)
            for old, new in ((origins_path(file), origins_path(target)), (file, target)):
                if old.exists():
                    old.replace(new)


def compared_anew(
    summary: RunReport, moved_files: Collection[Path], store: BaselineStore
) -> RunReport:
    """Return a run whose tests in ``moved_files`` modules are compared with what these were given.

    Each difference counts, however small: their allowances are known to the tests alone.
    """
    store.forget()

    def anew(test: MeasuredTest, window: Window) -> Window:
        file, entry = Path(test.file), None
        if file in moved_files and window.change is Change.NEW:
            with contextlib.suppress(BaselineError):  # an entry that is stored anew
                entry = store.entry(
                    store.path(file, test.environment), test.environment, window.key
                )
        return _compare(window, entry) if entry else window

    tests = (replace(t, windows=tuple(anew(t, w) for w in t.windows)) for t in summary.tests)
    return replace(summary, tests=tuple(tests))


def _compare(window: Window, entry: BaselineEntry) -> Window:
    """Return a window as compared with an entry of another name."""
    numbers = Numbers.of(entry), Numbers.measured(window.result)
    change, changed = told_change(*numbers, Allowance(0, 0))
    return replace(window, change=change, baseline_bytes=entry.total, changed=changed)


def remove(orphan: Orphan) -> None:
    """Remove the baselines of a module that is gone. Raises `OSError`."""
    for file in orphan.files:
        file.unlink(missing_ok=True)
        origins_path(file).unlink(missing_ok=True)
