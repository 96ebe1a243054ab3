"""The baselines' history, read from git: who accepted which number when."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Final

from pytest_torchmem.store.baseline_file import parse_text
from pytest_torchmem.store.baselines import FOLDER
from pytest_torchmem.values.baseline import Change
from pytest_torchmem.values.errors import BaselineError, ReportError

_MARK: Final = "\x1e"
_SHORT: Final = 9
_FIELDS: Final = "%H%x1f%an%x1f%as%x1f%s"
# Each commit on its own, the oldest first, with the names and hashes of the files that it changes.
_ORDER: Final = ("--reverse", "--topo-order", "--no-merges")
_LOG: Final = ("log", *_ORDER, "-M", "--raw", "--no-abbrev", "-z")
_DAMAGED: Final = -1
_Totals = dict[str, int]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """One change of one baseline in one commit.

    Attributes:
        test: The test module, and the entry in it.
        environment: The name of the environment's folder.
        change: NEW, GROWN, SHRUNK, or UNUSED for an entry that was removed.
        before_bytes: The peak before; 0 for a new entry.
        after_bytes: The peak after; 0 for one that was removed.
        commit: The commit's short name.
        author: Who made the commit.
        date: When, as ``2026-03-01``.
        subject: The first line of its message.
    """

    test: str
    environment: str
    change: Change
    before_bytes: int
    after_bytes: int
    commit: str
    author: str
    date: str
    subject: str


def read_acceptances(folder: Path) -> tuple[Acceptance, ...]:
    """Return every change of a baseline at or below a folder, the oldest first.

    Each commit is compared with its own parent, so that branches do not undo each other. A file
    that moved is no change, and its tests have the name that they have now. Raises `ReportError`
    where there is no git, no repository or no baseline in its history.
    """
    log = _git(folder, *_LOG, f"--format={_MARK}{_FIELDS}", "--", ".")
    found: list[Acceptance] = []
    blobs = _Blobs(folder)
    for block in log.split(_MARK)[1:]:
        head, _, names = block.partition("\0")
        commit, author, date, subject = head.strip("\n").split("\x1f")
        for was, now in _changed_files(names):
            if was.name and now.name and was.name != now.name:
                old, new = _named(was.name), _named(now.name)
                found = [_moved(item, old, new) for item in found]
            test, environment = _named(now.name or was.name)
            before = {
                key: _last(found, f"{test}::{key}", environment) if total == _DAMAGED else total
                for key, total in blobs.totals(was).items()
            }
            short = commit[:_SHORT]
            for key, change, sizes in _changes(before, blobs.totals(now)):
                place = f"{test}::{key}"
                found.append(
                    Acceptance(place, environment, change, *sizes, short, author, date, subject)
                )
    if not found:
        raise ReportError(f"git knows no baseline in {folder}; commit the folder {FOLDER} first")
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Version:
    """A baseline file on one side of a commit; without a name where it is not there."""

    name: str = ""
    blob: str = ""


class _Blobs:
    """Reads the peaks in versions of baseline files, each version once.

    A version that one commit leaves is the one that the next commit of the file begins with.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, _Totals] = {"": {}}

    def totals(self, version: _Version) -> _Totals:
        """Return the peaks in a file: `_DAMAGED` for a damaged entry, none for no baseline."""
        if version.blob not in self._known:
            self._known[version.blob] = self._read(version)
        return self._known[version.blob]

    def _read(self, version: _Version) -> _Totals:
        path = Path(version.name)
        try:
            _, entries = parse_text(_git(self._folder, "cat-file", "blob", version.blob), path)
        except (BaselineError, ReportError):
            return {}
        totals = dict.fromkeys(entries.lines, _DAMAGED)
        for key in entries.lines:
            with contextlib.suppress(BaselineError):
                totals[key] = entries.numbers(key, path).total
        return totals


def _moved(item: Acceptance, old: tuple[str, str], new: tuple[str, str]) -> Acceptance:
    """Return a change under the name that its module has now."""
    module, _, key = item.test.partition("::")
    if (module, item.environment) != old:
        return item
    return replace(item, test=f"{new[0]}::{key}", environment=new[1])


def _last(found: Iterable[Acceptance], test: str, environment: str) -> int:
    """Return the peak that was accepted last, of an entry that two branches had changed."""
    sizes = [i.after_bytes for i in found if (i.test, i.environment) == (test, environment)]
    return sizes[-1] if sizes else 0


def _changed_files(names: str) -> Iterator[tuple[_Version, _Version]]:
    """Yield the baseline files of a commit as they were and as they are."""
    parts = iter(names.strip("\0\n").split("\0"))
    for raw in parts:
        if not raw.strip("\n"):
            continue
        *_, was, now, status = raw.split()
        old = new = next(parts)
        if status[0] in "RC":
            new = next(parts)
        if FOLDER in PurePosixPath(new).parts and new.endswith(".json"):
            yield (
                _Version() if status[0] in "AC" else _Version(old, was),
                _Version() if status[0] == "D" else _Version(new, now),
            )


def _changes(before: _Totals, after: _Totals) -> Iterator[tuple[str, Change, tuple[int, int]]]:
    """Yield what changed from one version of a file to the next.

    An entry that is damaged, as a merge may leave it, is no change.
    """
    for key in sorted(before.keys() | after.keys()):
        was, now = before.get(key, 0), after.get(key, 0)
        if now == _DAMAGED:
            continue
        if key not in before:
            yield key, Change.NEW, (0, now)
        elif key not in after:
            yield key, Change.UNUSED, (was, 0)
        elif was != now:
            yield key, Change.GROWN if now > was else Change.SHRUNK, (was, now)


def _named(file: str) -> tuple[str, str]:
    """Return the test module of a baseline file, and its environment."""
    parts = PurePosixPath(file).with_suffix("").parts
    at = parts.index(FOLDER)
    module = "/".join((*parts[:at], *parts[at + 2 :]))
    return (module if PurePosixPath(module).suffix else f"{module}.py"), parts[at + 1]


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise ReportError(f"git cannot be run: {error.strerror or error}") from None
    if done.returncode:
        raise ReportError(f"git cannot read the history of {folder}: {done.stderr.strip()}")
    return done.stdout
