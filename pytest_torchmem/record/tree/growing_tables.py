"""Tables that grow while a body runs, and the tables of all sessions joined.

A cut ends a session below the functions that are running, and the next one begins below the same
functions. Both have the calls of the functions, and of ours that cut::

    session 0   test > fit > add          test > fit > (cut)
    session 1   test > fit > (cut)        test > fit > mul       test > sum
    joined      test > fit > add, mul     test > sum
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pytest_torchmem.values.packed import Column, PackedTable, Table
from pytest_torchmem.values.trace import (
    ALLOCATION,
    DETAIL,
    EVENT,
    MODULE_CALL,
    OVERLOAD,
    TENSOR,
    EventKind,
    Scope,
)


class Rows:
    """Rows of integers, with the fields of a numpy ``dtype``.

    Python's collector runs after so and so many new containers. In a list, each row would be one:
    what a body's own cycles hold would be freed sooner than without us, and its peak be lower.

    Attributes:
        append: Adds a row, in one step also where several threads do.
    """

    def __init__(self, dtype: np.dtype[np.void]) -> None:
        assert dtype.names is not None
        self._dtype, self._names = dtype, dtype.names
        self._values = array("q")
        # No function of ours around it: the profiler would record each call.
        self.append: Callable[[tuple[int, ...]], None] = self._values.extend

    def __len__(self) -> int:
        return len(self._values) // len(self._names)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return zip(*[iter(self._values)] * len(self._names), strict=True)

    def table(self) -> NDArray[np.void]:
        """Return the rows so far."""
        columns = np.array(self._values, np.int64).reshape(-1, len(self._names)).T
        table = np.empty(len(self), self._dtype)
        for name, column in zip(self._names, columns, strict=True):
            table[name] = column
        return table


class _Numbering(dict[str, int]):
    def __missing__(self, text: str) -> int:
        return self.setdefault(text, len(self))


class StringTable:
    """Hands out one number for each distinct string, in the order they come.

    Tables refer to strings by these numbers.

    Attributes:
        number: Returns the number of a string. No Python function: while a body runs the profiler
            records each call of one, ours included.
    """

    def __init__(self) -> None:
        self._index = _Numbering()
        self.number: Callable[[str], int] = self._index.__getitem__

    def values(self) -> tuple[str, ...]:
        return tuple(self._index)


@dataclass(frozen=True, slots=True)
class Seam:
    """One end of a session that was cut there, as rows of its events.

    ``own`` is the call that cuts, and ``around`` are the calls around that, the innermost first.
    ``ranges`` are annotations that it closed, or opened again, in the order in which they began.
    """

    own: int
    around: tuple[int, ...]
    ranges: tuple[int, ...] = ()


LateLines: TypeAlias = list[tuple[NDArray[np.int32], NDArray[np.int32]]]


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables of one profiling session; rows refer to rows of the same session.

    Attributes:
        own: The calls that cut or wanted to; what is below them is nothing of the body's.
        began: The cut at the beginning, where the session was cut from the one before.
        ended: The same at the end.
        read_count: How many events the session had, those that are not kept included.
        late_lines: Rows of events, and the lines on which they stand, that were found out only by
            what a later session recorded.
    """

    events: Table
    tensors: Table
    allocations: Table
    module_calls: Table
    overloads: Table
    details: Table = field(default_factory=lambda: np.empty(0, DETAIL))
    own: tuple[int, ...] = ()
    began: Seam | None = None
    ended: Seam | None = None
    read_count: int = 0
    late_lines: LateLines = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        return sum(int(getattr(self, name).nbytes) for name in _TABLES)

    def packed(self) -> Tables:
        """Return the tables, of which the large ones take less memory."""
        packed = {name: _packed(getattr(self, name)) for name in _TABLES}
        return replace(self, **packed)  # type: ignore[arg-type]  # other fields have other types


_ABOUT_EVENTS: Final = {
    "tensors": TENSOR,
    "allocations": ALLOCATION,
    "module_calls": MODULE_CALL,
    "overloads": OVERLOAD,
    "details": DETAIL,
}
_TABLES: Final = ("events", *_ABOUT_EVENTS)

# Smaller tables are few: those of a small test.
_LARGE_BYTES: Final = 2**16
# Smaller tables of all sessions are looked at row by row just as well as by columns.
_MUCH_BYTES: Final = 2**24
_PRIVATE: Final = (
    {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
)


def _packed(table: Table) -> Table:
    """Return a table; a large one is packed, in memory that goes back to the operating system.

    The C library keeps freed pieces of a megabyte for later, and tables of a session are such.
    They would lie between what torch needs while a session ends, and the analysis would take them
    without giving them back.
    """
    if isinstance(table, PackedTable) or table.nbytes < _LARGE_BYTES:
        return table
    packed = PackedTable.of(table)
    packed.move_to(np.frombuffer(mmap.mmap(-1, max(1, packed.nbytes), **_PRIVATE), np.uint8))
    return packed


def seam_at(events: NDArray[np.void], row: int, name: int) -> Seam:
    """Return the seam of the event at ``row``; the function that cuts has a ``name``."""
    above = [row]
    while (parent := int(events["parent"][above[-1]])) >= 0:
        above.append(parent)
    cutting = [place for place, row in enumerate(above) if events["name"][row] == name]
    own = cutting[0] if cutting else 0
    return Seam(above[own], tuple(above[own + 1 :]))


def ranges_at(events: NDArray[np.void], seam: Seam, cut: int, *, is_end: bool) -> tuple[int, ...]:
    """Return the annotations that were open at a seam; ``cut`` is the name of its own events.

    Torch has each within the call that opened it, with the time at which it was closed.
    """
    rows = np.flatnonzero((events["scope"] == Scope.OTHER) & (events["name"] != cut))
    if is_end:
        begin_ns = events["start_ns"][seam.own]
        rows = rows[(events["start_ns"][rows] < begin_ns) & (events["end_ns"][rows] >= begin_ns)]
    else:
        rows = rows[(rows > seam.own) & (rows < events["end"][seam.own])]
    return tuple(rows[np.argsort(events["start_ns"][rows], kind="stable")].tolist())


def joined(parts: list[Tables], *, last: bool = False) -> Tables:
    """Return the tables of all sessions as one; rows refer to rows of the result.

    When it is the ``last`` time, the list is emptied: each table is given back once it is copied,
    so that there are never two of all of them. A column is in one piece only while it is copied.
    The tables of a single session are those of all, where nothing wanted to cut it.
    """
    if last and len(parts) == 1 and not (parts[0].own or isinstance(parts[0].events, PackedTable)):
        return parts.pop()
    places, count = _placed(parts)
    if last:
        parts.clear()
    events = _empty(EVENT, count)
    for name in EVENT.names or ():
        column = np.empty(count, EVENT[name])
        for place in places:
            place.fill(name, column)
        if name == "end":
            for place in places:
                place.lengthen(column)
        events[name] = column
    for place in places:
        place.let_go("events")
    tensors, allocations, module_calls, overloads, details = (
        _moved(places, name, dtype) for name, dtype in _ABOUT_EVENTS.items()
    )
    return Tables(events, tensors, allocations, module_calls, overloads, details)


def _empty(dtype: np.dtype[np.void], count: int) -> Table:
    """Return a table that waits for its columns."""
    packs = count * dtype.itemsize >= _MUCH_BYTES
    return PackedTable(dtype, count) if packs else np.empty(count, dtype)


def _placed(parts: Sequence[Tables]) -> tuple[list[_NewRows], int]:
    """Return the new rows of each session, and how many there are in all.

    Nothing else refers to the sessions' tables once this has returned.
    """
    places: list[_NewRows] = []
    count = 0
    for group in _cut_from_each_other(parts):
        inside: list[_NewRows] = []
        for part in group:
            inside.append(_NewRows(part, inside[-1] if inside else None))
        count = _number(inside, count)
        for place in inside:
            place.settle()
        places += inside
    return places, count


def _cut_from_each_other(parts: Sequence[Tables]) -> Iterator[Sequence[Tables]]:
    begins = [n for n in range(len(parts)) if not n or not _fit(parts[n - 1], parts[n])]
    for begin, end in pairwise([*begins, len(parts)]):
        yield parts[begin:end]


def _python(part: Tables, rows: Sequence[int]) -> list[int]:
    """Those of ``rows`` that are functions of Python: of no other it is known that they run."""
    if not rows:
        return []
    kinds = part.events["kind"][list(rows)].tolist()
    return [row for row, kind in zip(rows, kinds, strict=True) if kind == EventKind.PY_CALL]


def _fit(before: Tables, after: Tables) -> bool:
    """Return whether one session goes on below the functions that ran at the other's end."""
    if before.ended is None or after.began is None:
        return False
    left, resumed = _python(before, before.ended.around), _python(after, after.began.around)
    if len(left) != len(resumed):
        return False
    file, resumed_file = before.events["file"][left], after.events["file"][resumed]
    same_name = before.events["name"][left] == after.events["name"][resumed]
    # Modules have no file, and are numbered anew in each session.
    return bool(((file == resumed_file) & (same_name | (resumed_file < 0))).all())


class _NewRows:
    """The rows that those of one session become among those of all."""

    def __init__(self, part: Tables, before: _NewRows | None) -> None:
        self.part = part
        self._before = before
        self._seams = [seam for seam in (part.began, part.ended) if seam is not None]
        #: The new row of each; -1 for what only the cut brought about.
        self.rows = np.zeros(len(part.events), np.int32)
        if before is not None and part.began is not None:
            self.rows[_python(part, part.began.around)] = -1
        kinds = part.events["kind"] if part.own else np.empty(0, np.uint8)
        for within in self._own():
            # What the end of a session frees was made by the body.
            self.rows[within][kinds[within] != EventKind.ALLOCATION] = -1
        #: The rows below the outermost of the functions that were running at a cut.
        self.trunk = (0, len(self.rows))
        if self._seams and (around := self._seams[0].around):
            self.trunk = around[-1], int(part.events["end"][around[-1]])
        self.trunk_start = 0
        # The new row of each annotation that is opened again at its beginning.
        self._ranges: dict[int, int] = {}

    def number(self, low: int, high: int, start: int) -> int:
        """Number those rows of a range that stay, from ``start`` on; return the next number."""
        stay = np.flatnonzero(self.rows[low:high] >= 0) + low
        self.rows[stay] = start + np.arange(len(stay))
        return start + len(stay)

    def settle(self) -> None:
        """Find the row that stands for each one that does not stay."""
        self._stands = self.rows.copy()
        if self._before is not None and self.part.began is not None:
            ended = self._before.part.ended
            assert ended is not None
            around = _python(self._before.part, ended.around)
            self._stands[_python(self.part, self.part.began.around)] = self._before._stands[around]
        for within in self._own():
            above = self.part.events["parent"][within.start]
            function = self._stands[above] if above >= 0 else -1
            self._stands[within] = np.where(self.rows[within] < 0, function, self.rows[within])
        if self._before is not None and self.part.began is not None:
            self._ranges = dict(
                zip(self.part.began.ranges, self._before.open_ranges(), strict=False)
            )

    def open_ranges(self) -> list[int]:
        """Return the new rows of the annotations that are open at the session's end."""
        rows = self.part.ended.ranges if self.part.ended is not None else ()
        return [self._ranges.get(row, int(self.rows[row])) for row in rows]

    def _own(self) -> list[slice]:
        ends = self.part.events["end"]
        return [slice(row, int(ends[row])) for row in self.part.own]

    def fill(self, name: str, column: Column) -> None:
        """Write a column of events to the places of the rows that stay."""
        stay = self.rows >= 0
        values = self.part.events[name]
        if name == "line":
            for rows, lines in self.part.late_lines:
                values[rows] = lines
        moved = values[stay]
        if name == "parent":
            moved = np.where(moved >= 0, self._stands[moved], -1)
        elif name == "end":
            kept_before = np.concatenate([[0], np.cumsum(stay)])
            moved = self.rows[stay] + kept_before[moved] - kept_before[:-1][stay]
        column[self.rows[stay]] = moved
        for seam in self._seams:
            # This session knows more of functions that began in another one.
            around = list(seam.around)
            if name == "end":
                in_trunk = kept_before[values[around]] - kept_before[self.trunk[0]]
                column[self._stands[around]] = self.trunk_start + in_trunk
            elif name == "end_ns":
                column[self._stands[around]] = values[around]
        if name == "end_ns":
            column[list(self._ranges.values())] = values[list(self._ranges)]

    def lengthen(self, ends: NDArray[np.int32]) -> None:
        """Have functions of C that were running last as long as what they called."""
        ended = self.part.ended
        for called, calling in pairwise(self._stands[list(ended.around)] if ended else ()):
            ends[calling] = max(ends[calling], ends[called])

    def moved(self, name: str, column: str, stay: NDArray[np.bool_]) -> Column:
        """Return a column of a table about events, without the rows that do not ``stay``."""
        values: Column = getattr(self.part, name)[column][stay]
        return self.rows[values] if column == "event" else values

    def let_go(self, name: str) -> None:
        """Give a table back."""
        self.part = replace(self.part, **{name: getattr(self.part, name)[:0].copy()})


def _number(group: Sequence[_NewRows], start: int) -> int:
    """Give all rows of sessions that were cut from each other their places.

    What is below the functions that were running is in one piece, as if nothing had been cut.
    """
    start = group[0].number(0, group[0].trunk[0], start)
    for place in group:
        place.trunk_start = start
        start = place.number(*place.trunk, start)
    for place in group:
        low, high = place.trunk
        start = place.number(0, low if place is not group[0] else 0, start)
        start = place.number(high, len(place.rows), start)
    return start


def _moved(places: Sequence[_NewRows], name: str, dtype: np.dtype[np.void]) -> Table:
    """Return one of the tables about events, of all sessions, in the order of the events."""
    # The rows about events that stay.
    stays = [place.rows[getattr(place.part, name)["event"]] >= 0 for place in places]
    table = _empty(dtype, sum(map(np.count_nonzero, stays)))
    order: NDArray[np.int64] | slice = slice(None)
    for field_name in dtype.names or ():
        pieces = (p.moved(name, field_name, stay) for p, stay in zip(places, stays, strict=True))
        column = np.concatenate([np.empty(0, dtype[field_name]), *pieces])
        if field_name == "event" and np.any(column[:-1] > column[1:]):
            order = np.argsort(column, kind="stable")
        table[field_name] = column[order]
    for place in places:
        place.let_go(name)
    return table
