"""The text of a baseline file: how it is read, merged into and written.

docs/baseline-format.md describes the format. Each line between the first and the last one is a row
of its own that names its entry, so nothing changes on a line when a neighbour comes or goes, and
git may put the rows of two branches in any order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

from pytest_torchmem.analysis.judge.environments import Environment, complete, environment_name
from pytest_torchmem.store.baseline_rows import (
    MANY,
    Row,
    check_row,
    encode,
    entry_lines,
    lines_of_part,
    row_lines,
    rows_of,
    single_lines,
)
from pytest_torchmem.store.files import locked, remove_litter, replace_file
from pytest_torchmem.values.baseline import BaselineEntry, contributor_from_json
from pytest_torchmem.values.contributors import Contributor
from pytest_torchmem.values.errors import BaselineError
from pytest_torchmem.values.units import format_apart

FORMAT: Final = 2
FORMATS: Final = {
    1: "0.1.0.dev: entries nested by test, each with total, at_peak, peaks, live, retained, "
    "retained_live",
    2: "0.1.0: the same parts as rows, each of which names its entry; runtime and libraries in "
    "the environment",
}
"""Every format number ever written, and what it brought."""

_END: Final = ["end"]
_FIRST: Final = f'{{"format": {FORMAT},'
_OPEN: Final = '"entries": ['
_LAST: Final = encode(_END)


class EntryError(BaselineError):
    """One entry cannot be used; the others of its file can. An update can put another there."""


@dataclass(frozen=True, slots=True)
class StoredEntries:
    """What a file holds: the lines of each entry, by its key.

    They are kept as text. Most are never looked at, and a line that is written back is the line
    that was read.
    """

    lines: Mapping[str, list[str]] = field(default_factory=dict)

    def entry(self, key: str, path: Path) -> BaselineEntry:
        """Return one entry. Raises `BaselineError` when it is damaged or there twice."""
        numbers: dict[str, Any] = {}
        start, lines = f"[{encode(key)}, ", self.lines[key]
        try:
            for row in _rows(single_lines(start, lines)):
                if numbers.setdefault(row[1], row[2]) != row[2]:
                    raise _changed_twice(path, key, row[1], numbers[row[1]], row[2])
            live, retained_live = (_StoredLater(start, part, lines, key, path) for part in MANY)
            entry = BaselineEntry.from_numbers(numbers, live, retained_live)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise _damaged(path, key, str(error)) from None
        parts_bytes = entry.at_peak.total
        if parts_bytes != entry.total:
            text = f"its parts are {parts_bytes} B together, its total is {entry.total} B"
            raise _damaged(path, key, text)
        return entry


class _StoredLater(Sequence[Contributor]):
    """Contributors that are read when somebody asks for them, which few comparisons do."""

    __slots__ = ("_key", "_lines", "_part", "_path", "_start", "_values")

    def __init__(self, start: str, part: str, lines: list[str], key: str, path: Path) -> None:
        self._start, self._part, self._lines = start, part, lines
        self._key, self._path = key, path
        self._values: tuple[Contributor, ...] | None = None

    def _read(self) -> tuple[Contributor, ...]:
        """Return all of them. Raises `BaselineError`."""
        if self._values is None:
            try:
                rows = _rows(lines_of_part(self._start, self._part, self._lines))
                self._values = tuple(contributor_from_json(row[2]) for row in rows)
            except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
                raise _damaged(self._path, self._key, str(error)) from None
        return self._values

    def __len__(self) -> int:
        return len(self._read())

    def __iter__(self) -> Iterator[Contributor]:
        return iter(self._read())

    def __getitem__(self, index: Any) -> Any:
        return self._read()[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._read() == tuple(other)

    def __hash__(self) -> int:
        return hash(self._read())


def _rows(lines: list[str]) -> list[Row]:
    """Return the rows in some lines. Raises `ValueError` when one is none."""
    rows: list[Row] = _decode(f"[{''.join(lines)[:-1]}]")
    for row in rows:
        check_row(row)
    return rows


def parse_entries(data: object) -> StoredEntries:
    """Return the entries in the parsed JSON of a file of any format.

    Raises `ValueError` when that is not what it is; a damaged entry is found when it is asked for.
    """
    entries = data.get("entries") if isinstance(data, dict) else None
    if isinstance(entries, dict):
        return StoredEntries({k: row_lines(k, rows_of(k, entry)) for k, entry in entries.items()})
    if not isinstance(entries, list) or not entries or entries[-1] != _END:
        raise ValueError("it is not a baseline file, or its last lines are missing")
    rows: dict[str, list[Row]] = {}
    for row in entries[:-1]:
        if row != _END:  # a merge may bring the other side's
            check_row(row)
            rows.setdefault(row[0], []).append(row)
    return StoredEntries({key: row_lines(key, rows[key]) for key in rows})


def _split(text: str) -> tuple[dict[str, Any], StoredEntries] | None:
    """Return the head and the entries of a file that is laid out as we write it; None for others.

    Nothing but the keys is parsed. This is why reading ten thousand entries is quick.
    """
    lines = text.split("\n")
    if [lines[0], *lines[2:3], *lines[-3:]] != [_FIRST, _OPEN, _LAST, "]}", ""]:
        return None
    body = lines[3:-3]
    if text.count("],\n") != len(body):  # each of them ends like this, and no other line does
        return None
    entries: dict[str, list[str]] = {}
    start, rows = "\n", []
    for line in body:
        if not line.startswith(start):
            quoted = line[1 : line.find('", "') + 1]
            key = json.loads(quoted) if line.startswith('["') and quoted else ""
            if not key or encode(key) != quoted:
                return None
            start = f"[{quoted}, "
            rows = entries.setdefault(key, [])
        rows.append(line)
    head = _decode(f"{lines[0]}{lines[1].removesuffix(',')}}}")
    return {**head, "entries": []}, StoredEntries(entries)


def read_file(path: Path, environment: Environment) -> StoredEntries:
    """Return what a file holds; no entries where there is no file.

    Raises `BaselineError` when the file is not JSON, is of another format or holds the numbers of
    another environment.
    """
    return _read(path, _text(path), environment)


def read_any(path: Path) -> tuple[dict[str, str], StoredEntries]:
    """Return a file's environment and its entries, whichever environment it is of."""
    data, entries = _load(path, _text(path))
    environment = data.get("environment") if isinstance(data, dict) else None
    if not isinstance(environment, dict) or not {"device", "torch"} <= set(environment):
        raise unreadable(path, "it is not a baseline file")
    _check(path, data, environment)
    return {str(k): str(v) for k, v in environment.items()}, entries()


def _read(path: Path, text: str, environment: Environment) -> StoredEntries:
    if not text and not path.exists():
        return StoredEntries()
    data, entries = _load(path, text)
    _check(path, data, environment)
    return entries()


def _text(path: Path) -> str:
    """Return the text of a file; ``""`` where there is no file. Raises `BaselineError`."""
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, str(error)) from None


def _load(path: Path, text: str) -> tuple[object, Callable[[], StoredEntries]]:
    """Return what is in a file beside its entries, and how to get those."""
    try:
        if split := _split(text):
            data, stored = split
            return data, lambda: stored
        parsed = _parse(text)
    except (ValueError, RecursionError) as error:
        conflict = re.search(r"^<{7}|^>{7}", text, re.MULTILINE)
        raise unreadable(
            path, "it holds merge conflict markers" if conflict else str(error)
        ) from None
    return parsed, lambda: _entries(path, parsed)


def _entries(path: Path, data: object) -> StoredEntries:
    try:
        return parse_entries(data)
    except ValueError as error:
        raise unreadable(path, str(error)) from None


def _parse(text: str) -> object:
    data: object = _decode(text)
    if isinstance(data, dict) and isinstance(data.get("entries"), dict):
        # Format 1 has entries as keys; a key that is there twice would silently be there once.
        json.loads(text, object_pairs_hook=_unique)
    return data


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
    text = _text(path)
    lines = dict(_read(path, text, environment).lines)
    for old, new in changes.renamed.items():
        if old in lines:
            start = len(encode(old)) + 1
            lines[new] = [f"[{encode(new)}{line[start:]}" for line in lines.pop(old)]
    for key, entry in changes.written.items():
        lines[key] = entry_lines(key, entry)
    for key in changes.removed:
        lines.pop(key, None)
    return text, render(environment, lines)


def root_of(path: Path, environment: Environment) -> Path:
    """Return the folder that holds a folder for each environment, told from one of its files."""
    name = environment_name(environment)
    return next((parent.parent for parent in path.parents if parent.name == name), path.parent)


def write_file(path: Path, environment: Environment, changes: FileChanges) -> None:
    """Apply changes to a file; all other entries stay as they are in the file now.

    The file is read again under a lock, so entries that another run wrote meanwhile are kept, and
    replaced in one step, so a reader never sees half of it. A file left without entries is
    removed. Raises `BaselineError` when the file cannot be read (it is left alone then) or written.
    """
    try:
        with locked(root_of(path, environment)):
            remove_litter(path.parent)
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


def render(environment: Environment, entries: Mapping[str, list[str]]) -> str:
    """Return the text of a file: the entries sorted by key, a row per line."""
    if not entries:
        return ""
    lines = [_FIRST, f'"environment": {encode(complete(environment))},', _OPEN]
    for key in sorted(entries):
        lines += entries[key]
    return "\n".join([*lines, _LAST, "]}", ""])


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


def _damaged(path: Path, key: str, reason: str) -> EntryError:
    return EntryError(
        f"the baseline {path}: the entry {key!r} is damaged ({reason}). Restore the rows that "
        f"begin with [{encode(key)} from version control, or measure again and replace it with "
        "--torchmem-update-baseline, which keeps the other entries"
    )


def _changed_twice(path: Path, key: str, part: str, one: object, other: object) -> EntryError:
    text = f"{part} of {key!r} is there twice"
    if isinstance(one, int) and isinstance(other, int):
        text += f", as {' and as '.join(format_apart(one, other))}"
    return EntryError(
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


_decode: Final = json.JSONDecoder(parse_float=_no_float, parse_constant=_no_float).decode
