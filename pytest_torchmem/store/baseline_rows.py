"""The rows of a baseline file: one number, one composition or one contributor of one entry each.

docs/baseline-format.md describes them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any, Final, TypeAlias

from pytest_torchmem.values.baseline import BaselineEntry
from pytest_torchmem.values.contributors import Category, CategoryBytes, Contributor

Row: TypeAlias = list[Any]
"""``[key, part, value]``."""

SINGLE: Final = ("total", "at_peak", "peaks", "retained")
MANY: Final = ("live", "retained_live")
_ORDER: Final = {part: place for place, part in enumerate((*SINGLE, *MANY))}
_OF_MANY: Final = tuple(f'"{part}", ' for part in MANY)

encode: Final = json.JSONEncoder(sort_keys=True, ensure_ascii=False).encode
_quoted: Final = functools.lru_cache(maxsize=4096)(encode)
_NAMES: Final = tuple(sorted(category.value for category in Category))
_amounts_by_name: Final = attrgetter(*_NAMES)


def check_row(row: object) -> None:
    """Raise `ValueError` for anything that is not a row."""
    if (
        not isinstance(row, list)
        or len(row) != 3
        or not isinstance(row[0], str)
        or row[1] not in _ORDER
    ):
        raise ValueError(f"{row!r} is not a row of a baseline")


def rows_of(key: str, entry: object) -> Iterable[Row]:
    """Yield the rows of an entry in the layout of format 1. Raises `ValueError` for others."""
    if not isinstance(entry, dict):
        raise ValueError(f"the entry {key!r} is damaged")
    for part in SINGLE:
        if part in entry:
            yield [key, part, entry[part]]
    for part in MANY:
        for value in entry.get(part, []):
            yield [key, part, value]


def row_lines(key: str, rows: Iterable[Row]) -> list[str]:
    """Return the lines of one entry from its rows, each with a comma at its end."""
    # The sort is stable: contributors stay in the order of their size.
    return [encode(row) + "," for row in sorted(rows, key=lambda row: _ORDER[row[1]])]


def entry_lines(key: str, entry: BaselineEntry) -> list[str]:
    """Return the lines of one entry, each with a comma at its end.

    They are what `json` makes of the same rows, which a test holds them to, in a third of the time.
    """
    return list(_entry_lines(f"[{encode(key)}", entry))


def _entry_lines(start: str, entry: BaselineEntry) -> Iterator[str]:
    yield f'{start}, "total", {entry.total}],'
    yield f'{start}, "at_peak", {_amounts_text(entry.at_peak)}],'
    yield f'{start}, "peaks", {_amounts_text(entry.peaks)}],'
    yield f'{start}, "retained", {_amounts_text(entry.retained)}],'
    for contributor in entry.live:
        yield f'{start}, "live", {_contributor_text(contributor)}],'
    for contributor in entry.retained_live:
        yield f'{start}, "retained_live", {_contributor_text(contributor)}],'


def _amounts_text(amounts: CategoryBytes) -> str:
    pairs = zip(_NAMES, _amounts_by_name(amounts), strict=True)
    return "{" + ", ".join([f'"{name}": {amount}' for name, amount in pairs if amount]) + "}"


def _contributor_text(contributor: Contributor) -> str:
    where = ""
    if source := contributor.source:
        where = (
            f'"file": {_quoted(source.file)}, "function": {_quoted(source.function)}, '
            f'"line": {source.line}, '
        )
    return (
        f'{{"bytes": {contributor.size_bytes}, "category": "{contributor.category._value_}", '
        f'"count": {contributor.count}, {where}"module": {_quoted(contributor.module)}, '
        f'"operator": {_quoted(contributor.operator)}, "phase": "{contributor.phase._value_}"}}'
    )


def single_lines(start: str, lines: Iterable[str]) -> list[str]:
    """Return those of an entry's lines whose part is there once; all begin with ``start``."""
    after = len(start)
    return [line for line in lines if not line.startswith(_OF_MANY, after)]


def lines_of_part(start: str, part: str, lines: Iterable[str]) -> list[str]:
    """Return those of an entry's lines that are of one part; all begin with ``start``."""
    wanted, after = f'"{part}", ', len(start)
    return [line for line in lines if line.startswith(wanted, after)]
