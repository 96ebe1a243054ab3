"""The text of a baseline file: how it is read, merged into and written.

docs/baseline-format.md describes the format. Each line between the first and the last one is a row
of its own that names its entry, so nothing changes on a line when a neighbour comes or goes, and
git may put the rows of two branches in any order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias

from pytest_torchmem.analysis.baseline import BaselineEntry
from pytest_torchmem.analysis.environments import Environment, complete
from pytest_torchmem.errors import BaselineError
from pytest_torchmem.plugin.file_lock import locked, replace_file
from pytest_torchmem.units import format_apart

FORMAT: Final = 2
FORMATS: Final = {
    1: "0.1.0.dev: entries nested by test, each with total, at_peak, peaks, live, retained, "
    "retained_live",
    2: "0.1.0: the same parts as rows, each of which names its entry; runtime and libraries in "
    "the environment",
}
"""Every format number ever written, and what it brought."""

Row: TypeAlias = list[Any]
"""``[key, part, value]``: one number, one composition or one contributor of one entry."""

_SINGLE: Final = ("total", "at_peak", "peaks", "retained")
_MANY: Final = ("live", "retained_live")
_ORDER: Final = {part: place for place, part in enumerate((*_SINGLE, *_MANY))}
_END: Final = ["end"]
_encode: Final = json.JSONEncoder(sort_keys=True, ensure_ascii=False).encode


class ChangedTwiceError(BaselineError):
    """An entry that two branches changed, and that git has merged into one file twice."""


@dataclass(frozen=True, slots=True)
class StoredEntries:
    """What a file holds: the rows of each entry, by its key."""

    rows: Mapping[str, list[Row]] = field(default_factory=dict)

    def entry(self, key: str, path: Path) -> BaselineEntry:
        """Return one entry. Raises `BaselineError` when it is damaged or there twice."""
        data: dict[str, Any] = {part: [] for part in _MANY}
        for _, part, value in self.rows[key]:
            if part in _MANY:
                data[part].append(value)
            elif data.setdefault(part, value) != value:
                raise _changed_twice(path, key, part, data[part], value)
        try:
            entry = BaselineEntry.from_json(data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise unreadable(path, f"the entry {key!r} is damaged ({error})") from None
        if entry.at_peak.total != entry.total:
            raise unreadable(
                path,
                f"the entry {key!r} is damaged (its parts are {entry.at_peak.total} B together, "
                f"its total is {entry.total} B)",
            )
        return entry


def parse_entries(data: object) -> StoredEntries:
    """Return the entries in the parsed JSON of a file of any format.

    Raises `ValueError` when that is not what it is; a damaged entry is found when it is asked for.
    """
    entries = data.get("entries") if isinstance(data, dict) else None
    if isinstance(entries, dict):
        return StoredEntries({key: list(_rows_of(key, entry)) for key, entry in entries.items()})
    if not isinstance(entries, list) or not entries or entries[-1] != _END:
        raise ValueError("it is not a baseline file, or its last lines are missing")
    rows: dict[str, list[Row]] = {}
    for row in entries[:-1]:
        if row != _END:  # a merge may bring the other side's
            _check_row(row)
            rows.setdefault(row[0], []).append(row)
    return StoredEntries(rows)


def _check_row(row: object) -> None:
    if (
        not isinstance(row, list)
        or len(row) != 3
        or not isinstance(row[0], str)
        or row[1] not in _ORDER
    ):
        raise ValueError(f"{row!r} is not a row of a baseline")


def _rows_of(key: str, entry: object) -> Iterable[Row]:
    if not isinstance(entry, dict):
        raise ValueError(f"the entry {key!r} is damaged")
    for part in _SINGLE:
        if part in entry:
            yield [key, part, entry[part]]
    for part in _MANY:
        for value in entry.get(part, []):
            yield [key, part, value]


def read_file(path: Path, environment: Environment) -> StoredEntries:
    """Return what a file holds; no entries where there is no file.

    Raises `BaselineError` when the file is not JSON, is of another format or holds the numbers of
    another environment.
    """
    data = _load(path)
    if data is None:
        return StoredEntries()
    _check(path, data, environment)
    return _entries(path, data)


def read_any(path: Path) -> tuple[dict[str, str], StoredEntries]:
    """Return a file's environment and its entries, whichever environment it is of."""
    data = _load(path)
    environment = data.get("environment") if isinstance(data, dict) else None
    if not isinstance(environment, dict) or not {"device", "torch"} <= set(environment):
        raise unreadable(path, "it is not a baseline file")
    _check(path, data, environment)
    return {str(k): str(v) for k, v in environment.items()}, _entries(path, data)


def _entries(path: Path, data: object) -> StoredEntries:
    try:
        return parse_entries(data)
    except ValueError as error:
        raise unreadable(path, str(error)) from None


def _load(path: Path) -> object:
    """Return the parsed JSON of a file; None where there is no file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, str(error)) from None
    try:
        data: object = json.loads(
            text, object_pairs_hook=_unique, parse_float=_no_float, parse_constant=_no_float
        )
    except (ValueError, RecursionError) as error:
        conflict = re.search(r"^<{7}|^>{7}", text, re.MULTILINE)
        raise unreadable(
            path, "it holds merge conflict markers" if conflict else str(error)
        ) from None
    return data if data is not None else []


@dataclass(frozen=True, slots=True)
class FileChanges:
    """What to do to one file.

    Attributes:
        written: Entries to add or replace.
        removed: Keys of entries to delete.
        renamed: New keys of entries, by their old ones; each keeps its numbers.
    """

    written: Mapping[str, BaselineEntry] = field(default_factory=dict)
    removed: frozenset[str] = frozenset()
    renamed: Mapping[str, str] = field(default_factory=dict)


def changed_text(path: Path, environment: Environment, changes: FileChanges) -> tuple[str, str]:
    """Return the text of a file as it is now and as it would be. Raises `BaselineError`.

    Entries that ``changes`` does not name stay as they are in the file, and so does their text
    unless it was of another format. A file without entries has no text.
    """
    rows = dict(read_file(path, environment).rows)
    for old, new in changes.renamed.items():
        if old in rows:
            rows[new] = [[new, *row[1:]] for row in rows.pop(old)]
    for key, entry in changes.written.items():
        rows[key] = list(_rows_of(key, entry.to_json()))
    for key in changes.removed:
        rows.pop(key, None)
    return _text(path), render(environment, rows)


def write_file(path: Path, environment: Environment, changes: FileChanges) -> None:
    """Apply changes to a file; all other entries stay as they are in the file now.

    The file is read again under a lock, so entries that another run wrote meanwhile are kept, and
    replaced in one step, so a reader never sees half of it. A file left without entries is
    removed. Raises `BaselineError` when the file cannot be read (it is left alone then) or written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path):
            _, text = changed_text(path, environment, changes)
            if text:
                replace_file(path, text)
            else:
                path.unlink(missing_ok=True)
    except OSError as error:
        raise BaselineError(
            f"the baseline {path} cannot be written ({error.strerror or error}); "
            "what it held before is unchanged. Make the folder writable and update again"
        ) from None


def render(environment: Environment, rows: Mapping[str, list[Row]]) -> str:
    """Return the text of a file: the entries sorted by key, a row per line."""
    if not rows:
        return ""
    head = f'{{"format": {FORMAT},\n"environment": {_encode(complete(environment))},\n"entries": ['
    lines = [head]
    for key in sorted(rows):
        # The sort is stable: contributors stay in the order of their size.
        lines += [_encode(row) + "," for row in sorted(rows[key], key=lambda row: _ORDER[row[1]])]
    lines.append(f"{_encode(_END)}\n]}}\n")
    return "\n".join(lines)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _check(path: Path, data: object, environment: Environment) -> None:
    if not isinstance(data, dict) or not isinstance(data.get("entries"), dict | list):
        raise unreadable(path, "it is not a baseline file")
    if data.get("format") not in list(FORMATS):
        raise BaselineError(
            f"the baseline {path} has format {data.get('format')!r}, and this version of "
            f"pytest-torchmem reads {', '.join(map(str, FORMATS))}; install a newer one"
        )
    stored = data.get("environment")
    if not isinstance(stored, dict) or complete(stored) != complete(environment):
        raise BaselineError(
            f"the baseline {path} was measured on {stored!r}, "
            f"and this run is on {complete(environment)!r}; move the file away and update again"
        )


def unreadable(path: Path, reason: str) -> BaselineError:
    return BaselineError(
        f"the baseline {path} cannot be read: {reason}. Restore it from version control, "
        "or delete it and run with --torchmem-update-baseline"
    )


def _changed_twice(path: Path, key: str, part: str, one: object, other: object) -> BaselineError:
    text = f"{part} of {key!r} is there twice"
    if isinstance(one, int) and isinstance(other, int):
        text += f", as {' and as '.join(format_apart(one, other))}"
    return ChangedTwiceError(
        f"the baseline {path}: {text}. Two branches changed it; measure again and accept it with "
        "--torchmem-update-baseline"
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} occurs twice")
    return data


def _no_float(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a whole number")
