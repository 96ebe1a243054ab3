"""The baselines' history, read from git: who accepted which number when."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Final

from pytest_torchmem.store.baseline_file import parse_text
from pytest_torchmem.store.baselines import FOLDER
from pytest_torchmem.values.baseline import Change
from pytest_torchmem.values.errors import BaselineError, ReportError

_MARK: Final = "\x1e"
_FIELDS: Final = "%h%x1f%an%x1f%as%x1f%s"
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


def read_history(folder: Path) -> tuple[Acceptance, ...]:
    """Return every change of a baseline at or below a folder, the oldest first.

    A file that moved is no change, and its tests have the name that they have now. Raises
    `ReportError` where there is no git, no repository or no baseline in its history.
    """
    log = _git(
        folder,
        "log",
        "--reverse",
        "--topo-order",
        "--no-merges",
        "-M",
        "--name-status",
        "-z",
        f"--format={_MARK}{_FIELDS}",
        "--",
        ".",
    )
    found: list[Acceptance] = []
    stored: dict[str, _Totals] = {}
    for block in log.split(_MARK)[1:]:
        head, _, names = block.partition("\0")
        commit, author, date, subject = head.strip("\n").split("\x1f")
        for old, new in _changed_files(names):
            before = stored.pop(old, {})
            if old and new and old != new:
                found = [_moved(item, _named(old), _named(new)) for item in found]
            after = _totals(folder, commit, new) if new else {}
            if new:
                stored[new] = after
            test, environment = _named(new or old)
            for key, change, sizes in _changes(before, after):
                place = f"{test}::{key}"
                found.append(
                    Acceptance(place, environment, change, *sizes, commit, author, date, subject)
                )
    if not found:
        raise ReportError(f"git knows no baseline in {folder}; commit the folder {FOLDER} first")
    return tuple(found)


def _moved(item: Acceptance, old: tuple[str, str], new: tuple[str, str]) -> Acceptance:
    """Return a change under the name that its module has now."""
    module, _, key = item.test.partition("::")
    if (module, item.environment) != old:
        return item
    return replace(item, test=f"{new[0]}::{key}", environment=new[1])


def _changed_files(names: str) -> Iterator[tuple[str, str]]:
    """Yield the baseline files of a commit: what each was called, and is; ``""`` for neither."""
    parts = iter(names.strip("\0\n").split("\0"))
    for status in parts:
        if not (status := status.strip("\n")):
            continue
        old = new = next(parts)
        if status[0] in "RC":
            new = next(parts)
        if status[0] == "D":
            new = ""
        if FOLDER in PurePosixPath(new or old).parts and (new or old).endswith(".json"):
            yield ("" if status[0] == "C" else old), new


def _totals(folder: Path, commit: str, file: str) -> _Totals:
    """Return the peaks in a file as it was in a commit; none where it cannot be read."""
    try:
        _, entries = parse_text(_git(folder, "show", f"{commit}:{file}"), Path(file))
    except (BaselineError, ReportError):
        return {}
    totals = {}
    for key in entries.lines:
        with contextlib.suppress(BaselineError):
            totals[key] = entries.numbers(key, Path(file)).total
    return totals


def _changes(
    before: Mapping[str, int], after: Mapping[str, int]
) -> Iterator[tuple[str, Change, tuple[int, int]]]:
    """Yield what changed from one version of a file to the next."""
    for key in sorted(before.keys() | after.keys()):
        was, now = before.get(key, 0), after.get(key, 0)
        if key not in before:
            yield key, Change.NEW, (was, now)
        elif key not in after:
            yield key, Change.UNUSED, (was, now)
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
