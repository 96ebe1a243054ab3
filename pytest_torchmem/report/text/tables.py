"""Tables for a terminal: who holds what, and who grew; as lists where there is no room."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from typing import Final

from pytest_torchmem.values.contributors import Category, CategoryBytes, Contributor
from pytest_torchmem.values.findings import Difference, words
from pytest_torchmem.values.units import format_change, format_size

ROWS: Final = 10
"""Rows of a table that is cut; what is left out is said below it."""

ANY_WIDTH: Final = 10_000
"""For a log, whose lines may be as long as they need to be."""

_PLACE: Final = ("operator", "module", "source")


def live_table(
    live: Sequence[Contributor], width: int = ANY_WIDTH, whole_bytes: int = 0
) -> list[str]:
    """Return the largest contributors as the lines of a table.

    Shares are those of ``whole_bytes``, which may hold more than is listed; without it, of the sum.
    """
    whole_bytes = whole_bytes or sum(c.size_bytes for c in live) or 1
    rows = [
        [
            format_size(c.size_bytes),
            f"{c.size_bytes / whole_bytes:.0%}",
            words(c.category.value),
            c.count,
            *_place(c),
        ]
        for c in live[:ROWS]
    ]
    lines = _table(rows, ["size", "", "category", "count"], "rrlr", width)
    return lines + left_out([c.size_bytes for c in live[ROWS:]])


def growth_table(growths: Sequence[Difference], width: int = ANY_WIDTH) -> list[str]:
    """Return what grew most as the lines of a table."""
    rows = [
        [
            format_change(growth.size_bytes),
            growth.kind.value,
            words(growth.contributor.category.value),
            *_place(growth.contributor),
        ]
        for growth in growths[:ROWS]
    ]
    lines = _table(rows, ["growth", "", "category"], "r", width)
    return lines + left_out([growth.size_bytes for growth in growths[ROWS:]])


def largest(amounts: CategoryBytes, count: int = len(Category)) -> str:
    """Return the largest categories with their sizes, those of 0 bytes left out."""
    ranked = sorted(amounts.items(), key=lambda pair: -pair[1])[:count]
    return ", ".join(f"{words(c.value)} {format_size(size)}" for c, size in ranked if size)


def _place(contributor: Contributor) -> tuple[str, str, str]:
    source = contributor.source
    if source is None:
        return contributor.operator, contributor.module, contributor.phase.value
    line = f":{source.line}" if source.line else ""
    return contributor.operator, contributor.module, f"{source.file}{line} {source.function}"


def left_out(sizes: Sequence[int]) -> list[str]:
    """Return a line about the rows that a table does not show."""
    if not sizes:
        return []
    return [f"... and {len(sizes)} more, {format_size(sum(sizes))} together"]


def _table(
    rows: Sequence[Sequence[object]], headers: Sequence[str], align: str, width: int
) -> list[str]:
    """Return a table whose last columns are a place; places have lines of their own if need be."""
    lines = aligned(rows, [*headers, *_PLACE], align)
    if max(map(len, lines), default=0) <= width:
        return lines
    count = len(headers)
    heads = aligned([row[:count] for row in rows], headers, align)
    lines = heads[:1]
    for head, row in zip(heads[1:], rows, strict=True):
        operator, module, source = (str(cell) for cell in row[count:])
        parts = [operator, f"in {module}" if module else "", f"({source})"]
        lines.append(head)
        lines += textwrap.wrap(
            " ".join(filter(None, parts)),
            max(20, width),
            initial_indent="    ",
            subsequent_indent="        ",
            break_on_hyphens=False,
        )
    return lines


_CONTROL: Final = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Characters that tell a terminal to do something, or turn the order of others around, and halves
of characters, which it cannot show; none of them is in a name that we print."""


def one_line(text: str) -> str:
    """Return text on one line; control characters become their escapes."""
    line = " ".join(text.splitlines())
    return _CONTROL.sub(lambda found: repr(found.group())[1:-1], line)


def aligned(rows: Sequence[Sequence[object]], headers: Sequence[str], align: str) -> list[str]:
    """Return the lines of a table, one for the headers and one for each row.

    ``align`` has a letter for each of its first columns.
    """
    from tabulate import tabulate  # a run that measures nothing need not load it

    sides = {"r": "right", "l": "left"}
    columns = [sides[side] for side in align.ljust(len(headers), "l")]
    # A name may have a line break in it: ids of tests, regions.
    cells = [[one_line(str(cell)) for cell in row] for row in rows]
    text = tabulate(
        cells, headers, tablefmt="plain", disable_numparse=True, colalign=columns if rows else None
    )
    return [line.rstrip() for line in text.splitlines()]
