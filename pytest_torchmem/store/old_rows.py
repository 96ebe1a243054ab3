"""Rows of formats 1 and 2, which older versions wrote: read, and never written anew.

They may stand in a file of today's format, too, where git merged a branch that had not updated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from pytest_torchmem.store.baseline_rows import Row
from pytest_torchmem.values.baseline import BaselineEntry
from pytest_torchmem.values.json_values import Json, checked_list

SINGLE: Final = ("total", "at_peak", "peaks", "retained")
MANY: Final = ("live", "retained_live")


def is_old(row: Row) -> bool:
    """True for ``[key, part, value]`` of format 2."""
    return len(row) == 3 and row[1] in (*SINGLE, *MANY)


def rows_of(key: str, entry: object) -> Iterable[Row]:
    """Yield the rows of an entry in the layout of format 1. Raises `ValueError` for others."""
    if not isinstance(entry, dict):
        raise ValueError(f"the entry {key!r} is damaged")
    for part in SINGLE:
        if part in entry:
            yield [key, part, entry[part]]
    for part in MANY:
        for value in checked_list(entry.get(part, [])):
            yield [key, part, value]


def old_entry(parts: Mapping[str, Json]) -> BaselineEntry:
    """Return an entry from the values of its rows. Raises what `BaselineEntry.from_json` does."""
    entry = BaselineEntry.from_json(parts)
    if entry.at_peak.total != entry.total:
        raise ValueError(
            f"its parts are {entry.at_peak.total} B together, its total is {entry.total} B"
        )
    return entry
