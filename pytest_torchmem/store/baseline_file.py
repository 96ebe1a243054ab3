"""The text of a baseline file, and the entries in it.

docs/baseline-format.md describes the format. Each line of an entry names the entry. So nothing
changes on a line when a neighbour comes or goes, and git may put the lines of two branches in any
order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from json.decoder import scanstring  # type: ignore[attr-defined]
from pathlib import Path
from typing import Final

from pytest_torchmem.store.baseline_rows import (
    COLUMNS,
    KINDS,
    Row,
    encode,
    entry_of,
    numbers_of,
    origins_path,
    read_origins,
    row_line,
    sentence_row,
)
from pytest_torchmem.values.baseline import (
    BaselineEntry,
    Environment,
    Numbers,
    Reference,
    complete,
    told_differences,
)
from pytest_torchmem.values.errors import BaselineError
from pytest_torchmem.values.json_values import (
    OTHER_VERSION,
    WRONG,
    Json,
    parse_json,
    read_text,
    shown,
    told_damage,
)
from pytest_torchmem.values.units import format_apart

FORMAT: Final = 4
"""A sentence and two rows of numbers for each entry; a file beside it says what these are of."""

_END: Final = ["end"]
_OPEN: Final = '"entries": ['
_LAST: Final = encode(_END)
_CONFLICT: Final = re.compile(
    # What both had before, where git was told to write that, too.
    r"^<{7}[^\n]*\n(.*?)(?:^\|{7}[^\n]*\n.*?)?^={7}[^\n]*\n(.*?)^>{7}[^\n]*\n?",
    re.MULTILINE | re.DOTALL,
)
"""Rows of two branches that nobody has chosen from: git's markers around both."""


class EntryError(BaselineError):
    """One entry cannot be used; the others of its file can. An update can put another there."""


@dataclass(frozen=True)
class StoredEntries:
    """The content of a file: the lines of each entry, by its key.

    They are kept as text. Most are never looked at, and a line that is written back is the line
    that was read.

    Attributes:
        lines: The lines of each entry.
        origins_path: The file that says what the numbers were made of; None where nobody asks.
    """

    lines: Mapping[str, list[str]] = field(default_factory=dict)
    origins_path: Path | None = None

    @cached_property
    def origins(self) -> Mapping[str, list[str]]:
        """The contributors to the numbers: lines by key, read when somebody asks for an entry."""
        return read_origins(self.origins_path) if self.origins_path else {}

    def entry(self, key: str, path: Path) -> BaselineEntry:
        """Return one entry. Raises `BaselineError` when it is damaged or there twice."""
        return self.reference(key, path).entry

    def reference(self, key: str, path: Path, environment: str = "") -> Reference:
        """Return the numbers of one entry, and the way to the rest of it.

        Raises `BaselineError` when it is damaged or there twice.
        """
        numbers = self.numbers(key, path)
        read = lambda: entry_of(key, numbers, self.origins.get(key, ()))  # noqa: E731
        return Reference(numbers, read, environment)

    def numbers(self, key: str, path: Path) -> Numbers:
        """Return the numbers of one entry. Raises `BaselineError` when it is damaged or twice."""
        try:
            rows = _rows(self.lines[key])
            numbers = numbers_of(_parts(key, rows, path))
            expected = sentence_row(key, numbers)
            for row in rows:
                if len(row) == 2 and row != expected:  # people read another thing than is compared
                    raise ValueError(f"it says {row[1]!r}, and its numbers are {expected[1]!r}")
        except WRONG as error:
            raise EntryError(
                f"the baseline {path}: the entry {key!r} is damaged ({told_damage(error)}). "
                f"Restore its rows, which begin with [{encode(key)}, from version "
                "control, or measure it again with --torchmem-update-baseline, which keeps the "
                "other entries"
            ) from None
        return numbers


def _rows(lines: list[str]) -> list[Row]:
    """Return the rows in some lines. Raises `ValueError`."""
    rows: list[Row] = parse_json(f"[{''.join(lines)[:-1]}]")
    if len(rows) != len(lines):
        raise ValueError("two rows are on one line")
    return rows


def _parts(key: str, rows: list[Row], path: Path) -> dict[str, Json]:
    """Return the values of rows by their kinds. Raises `EntryError` for two that differ."""
    parts: dict[str, Json] = {}
    for row in rows:
        check_row(row)
        if row[1] in KINDS and parts.setdefault(row[1], row[2:]) != row[2:]:
            pairs = zip(KINDS[row[1]], parts[row[1]], row[2:], strict=False)
            raise _changed_twice(path, key, *next(pair for pair in pairs if pair[1] != pair[2]))
    return parts


def check_row(row: object) -> None:
    """Raise `ValueError` for anything that is not a row."""
    match row:
        case [str(), str()]:
            return
        case [str(), str(kind), *_] if kind in KINDS:
            return
    raise ValueError(f"{shown(row)} is not a row of a baseline")


def parse_entries(data: object, origins: Path | None = None) -> StoredEntries:
    """Return the entries in the parsed JSON of a file.

    Raises `ValueError` when that is not what it is; a damaged entry is found when it is asked for.
    """
    entries = data.get("entries") if isinstance(data, dict) else None
    if not isinstance(entries, list) or not entries or entries[-1] != _END:
        raise ValueError("it is not a baseline file, or its last lines are missing")
    lines_by_key: dict[str, list[str]] = {}
    for row in entries[:-1]:
        if row != _END:  # a merge may bring the other side's
            check_row(row)
            lines_by_key.setdefault(row[0], []).append(row_line(row))
    return StoredEntries(lines_by_key, origins)


def _split(text: str, origins: Path) -> tuple[dict[str, Json], StoredEntries] | None:
    """Return the head and the entries of a file that is laid out as we write it; None for others.

    Nothing but the keys is parsed. This is why reading ten thousand entries is quick.
    """
    lines = text.split("\n")
    if _OPEN not in lines or lines[-3:] != [_LAST, "]}", ""]:
        return None
    start = lines.index(_OPEN)
    body = lines[start + 1 : -3]
    lines_by_key: dict[str, list[str]] = {}
    for line in body:
        if not line.startswith('["') or not line.endswith("],"):
            return None
        lines_by_key.setdefault(scanstring(line, 2)[0], []).append(line)
    head = parse_json("\n".join(lines[:start]).removesuffix(",") + "}")
    return {**head, "entries": []}, StoredEntries(lines_by_key, origins)


def read_file(path: Path, environment: Environment) -> StoredEntries:
    """Return what a file holds; no entries where there is no file.

    Raises `BaselineError` when the file is not JSON, is of another format or holds the numbers of
    another environment; `EntryError` for a link to nothing, where an update puts a file.
    """
    if path.is_symlink() and not path.exists():
        raise EntryError(
            f"the baseline {path} is a link to {path.readlink()}, which is not there; fetch that, "
            "or write it anew with --torchmem-update-baseline"
        )
    return parse_file(path, text_of(path), environment)


def parse_text(
    text: str, path: Path, wanted: Environment | None = None
) -> tuple[dict[str, str], StoredEntries]:
    """Return the environment and the entries in a text. Raises `BaselineError`.

    It does so where the environment is another one than ``wanted``, too. Each row names its entry,
    so of a merge that is not done the rows of both sides are read: an entry that both changed is
    there twice.
    """
    text = _CONFLICT.sub(r"\1\2", text)
    try:
        split = _split(text, origins_path(path))
        data, entries = split or (parse_json(text), None)
    except ValueError as error:
        raise unreadable(path, told_damage(error)) from None
    _check_format(path, data)
    environment = data.get("environment")
    if not isinstance(environment, dict):
        raise unreadable(path, "it does not say where it was measured")
    if wanted is not None and complete(environment) != complete(wanted):
        raise BaselineError(
            f"the baseline {path} was measured on another environment: "
            f"{told_differences(complete(environment), complete(wanted))}; "
            "move the file away and update again"
        )
    try:
        origins = entries or parse_entries(data, origins_path(path))
    except WRONG as error:
        raise unreadable(path, told_damage(error)) from None
    return {str(k): str(v) for k, v in environment.items()}, origins


def read_any(path: Path) -> tuple[dict[str, str], StoredEntries]:
    """Return a file's environment and its entries, whichever environment it is of."""
    environment, entries = parse_text(text_of(path), path)
    if not {"device", "torch"} <= set(environment):
        raise unreadable(path, "it does not say on what it was measured")
    return environment, entries


def parse_file(path: Path, text: str, environment: Environment) -> StoredEntries:
    """Return the entries in the text of a file. Raises what `read_file` raises."""
    if not text and not path.exists():
        return StoredEntries()
    return parse_text(text, path, environment)[1]


def text_of(path: Path) -> str:
    """Return the text of a file; ``""`` where there is no file. Raises `BaselineError`."""
    try:
        return read_text(path)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except PermissionError as error:
        text = f"the baseline {path} cannot be read ({error.strerror}); make it readable"
        raise BaselineError(text) from None
    except OSError as error:
        raise unreadable(path, error.strerror or str(error)) from None
    except (ValueError, MemoryError) as error:
        raise unreadable(path, told_damage(error)) from None


def render(environment: Environment, entries: Mapping[str, list[str]]) -> str:
    """Return the text of a file: the entries sorted by key, a row per line."""
    if not entries:
        return ""
    parts = [f"{encode(name)}: {encode(part)}" for name, part in complete(environment).items()]
    columns = [f"{encode(kind)}: {encode(COLUMNS[kind])}," for kind in COLUMNS]
    lines = [f'{{"format": {FORMAT},', '"environment": {', ",\n".join(parts), "},", *columns, _OPEN]
    for key in sorted(entries):
        lines += entries[key]
    return "\n".join([*lines, _LAST, "]}", ""])


def _check_format(path: Path, data: object) -> None:
    if not isinstance(data, dict) or "entries" not in data:
        raise unreadable(path, "it is not a baseline file")
    if "format" not in data:
        raise unreadable(path, "it does not say its format")
    if type(data["format"]) is not int:
        raise unreadable(path, f"its format is {shown(data['format'])}, and must be a number")
    if data["format"] != FORMAT:
        raise BaselineError(
            f"the baseline {path} {OTHER_VERSION} (delete it, then run with "
            "--torchmem-update-baseline)"
        )
    for kind, columns in COLUMNS.items():
        if data.get(kind, list(columns)) != list(columns):
            raise unreadable(path, f"its head names other columns for {kind!r} than its format has")


def unreadable(path: Path, reason: str) -> BaselineError:
    return BaselineError(
        f"the baseline {path} cannot be read: {reason}. Restore it from version control, "
        "or delete it and run with --torchmem-update-baseline"
    )


def _changed_twice(path: Path, key: str, part: str, one: object, other: object) -> EntryError:
    text = f"{part} of {key!r} is there twice"
    if isinstance(one, int) and isinstance(other, int):
        text += f", as {' and as '.join(format_apart(one, other))}"
    return EntryError(
        f"the baseline {path}: {text}. Two branches changed it, or one changed it and the other an "
        "entry beside it; measure again and accept it with --torchmem-update-baseline"
    )
