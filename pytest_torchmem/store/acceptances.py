"""The baselines' history, read from git: who accepted which number when."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath
from typing import Final, TypeAlias

from pytest_torchmem.store.baseline_file import parse_text
from pytest_torchmem.store.baselines import FOLDER
from pytest_torchmem.store.git import git_output, run_git
from pytest_torchmem.values.baseline import (
    Allowance,
    Change,
    ChangedNumber,
    Numbers,
    told_change,
)
from pytest_torchmem.values.errors import BaselineError, ReportError
from pytest_torchmem.values.units import MiB

_MARK: Final = "\x1e"
_SHORT: Final = 9
_FIELDS: Final = "%H%x1f%an%x1f%as%x1f%s"
# Each commit on its own, the oldest first, with the names and hashes of the files that it changes.
_ORDER: Final = ("--reverse", "--topo-order", "--no-merges")
_LOG: Final = ("log", *_ORDER, "-M", "--raw", "--no-abbrev", "-z")
_Entries: TypeAlias = dict[str, Numbers | None]
"""The numbers of each entry of a file; None for a damaged one, as a merge may leave it."""

_ALLOWED: Final = (Allowance(0.02, MiB, 0.05), Allowance(0, 0))
"""An update stores what exceeds these. The second is for tests with an allowance of their own."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """One change of one baseline in one commit.

    Attributes:
        test: The test module, and the entry in it.
        environment: The name of the environment's folder.
        change: NEW, GROWN, SHRUNK, or UNUSED for an entry that was removed.
        after: The numbers after; None for an entry that was removed.
        changed: The number that grew or shrank; None for an entry that is new or was removed.
        commit: The commit's short name.
        date: When, as ``2026-03-01``.
        subject: The first line of its message.
    """

    test: str
    environment: str
    change: Change
    after: Numbers | None
    changed: ChangedNumber | None
    commit: str
    author: str
    date: str
    subject: str

    @property
    def after_bytes(self) -> int:
        """The peak after; 0 for an entry that was removed."""
        return self.after.total if self.after else 0


def read_acceptances(folder: Path) -> tuple[Acceptance, ...]:
    """Return every change of a baseline at or below a folder, the oldest first.

    Each commit is compared with its own parent, so that branches do not undo each other. A file
    that moved is no change, and its tests have the name that they have now. Raises `ReportError`
    where there is no git, no repository or no baseline in its history.
    """
    log = run_git(folder, *_LOG, f"--format={_MARK}{_FIELDS}", "--", ".")
    acceptances: list[Acceptance] = []
    # The version that one commit leaves is the one that the next commit of the file begins with.
    entries = lru_cache(maxsize=None)(partial(_entries, folder))
    for block in log.split(_MARK)[1:]:
        head, _, names = block.partition("\0")
        commit, author, date, subject = head.strip("\n").split("\x1f")
        for was, now in _changed_files(names):
            if was.name and now.name and was.name != now.name:
                old, new = _test_and_environment(was.name), _test_and_environment(now.name)
                acceptances = [_renamed_acceptance(item, old, new) for item in acceptances]
            test, environment = _test_and_environment(now.name or was.name)
            before = {
                key: numbers or _last(acceptances, f"{test}::{key}", environment)
                for key, numbers in entries(was).items()
            }
            who = commit[:_SHORT], author, date, subject
            for key, change, after, changed_number in _changes(before, entries(now)):
                what = environment, change, after, changed_number
                acceptances.append(Acceptance(f"{test}::{key}", *what, *who))
    if not acceptances:
        raise ReportError(f"git knows no baseline in {folder}; commit the folder {FOLDER} first")
    return tuple(acceptances)


@dataclass(frozen=True, slots=True)
class _Version:
    """A baseline file on one side of a commit; without a name where it is not there."""

    name: str = ""
    blob: str = ""


def _entries(folder: Path, version: _Version) -> _Entries:
    """Return the numbers in a version of a file, none for no baseline."""
    path = Path(version.name)
    try:
        text = run_git(folder, "cat-file", "blob", version.blob) if version.blob else ""
        _, stored = parse_text(text, path)
    except (BaselineError, ReportError):
        return {}
    entries: _Entries = dict.fromkeys(stored.lines)
    for key in stored.lines:
        with contextlib.suppress(BaselineError):
            entries[key] = stored.reference(key, path).numbers
    return entries


def _renamed_acceptance(item: Acceptance, old: tuple[str, str], new: tuple[str, str]) -> Acceptance:
    """Return a change under the name that its module has now."""
    module, _, key = item.test.partition("::")
    if (module, item.environment) != old:
        return item
    return replace(item, test=f"{new[0]}::{key}", environment=new[1])


def _last(acceptances: Iterable[Acceptance], test: str, environment: str) -> Numbers | None:
    """Return the numbers that were accepted last, of an entry that two branches had changed."""
    numbers = [i.after for i in acceptances if (i.test, i.environment) == (test, environment)]
    return numbers[-1] if numbers else None


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


def _changes(
    before: _Entries, after: _Entries
) -> Iterator[tuple[str, Change, Numbers | None, ChangedNumber | None]]:
    """Yield what changed from one version of a file to the next.

    An entry that is damaged, as a merge may leave it, is no change.
    """
    for key in sorted(before.keys() | after.keys()):
        was, now = before.get(key), after.get(key)
        if key not in after:
            yield key, Change.UNUSED, None, None
        elif now and not was:
            yield key, Change.NEW, now, None
        elif now and was and was != now:
            changes = (told_change(was, now, allowance) for allowance in _ALLOWED)
            change, number = next(pair for pair in changes if pair[0] is not Change.WITHIN)
            yield key, change, now, number


def _test_and_environment(file: str) -> tuple[str, str]:
    """Return the test module of a baseline file, and its environment."""
    parts = PurePosixPath(file).with_suffix("").parts
    at = parts.index(FOLDER)
    module = "/".join((*parts[:at], *parts[at + 2 :]))
    return (module if PurePosixPath(module).suffix else f"{module}.py"), parts[at + 1]


_REMOTE: Final = re.compile(r"(?:https://(?:[^@/]*@)?|ssh://git@|git@)([\w.-]+)[:/]([\w./~-]+)")


def commits_address(folder: Path) -> str:
    """Return the address of commits on the host of a repository, ``""`` where none is known.

    GitHub, GitLab, Codeberg and others have a commit at ``/commit/NAME`` below the project.
    """
    match = _REMOTE.fullmatch(git_output(folder, "remote", "get-url", "origin").strip())
    return f"https://{match[1]}/{match[2].removesuffix('.git')}/commit/" if match else ""
