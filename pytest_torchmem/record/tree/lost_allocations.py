"""Allocations on a GPU that the profiler's event tree lacks, from the allocator's history.

The tree begins with what runs on the CPU: an allocation on a GPU that stands below no operator and
no Python call is left out, as in a backward pass whose operators are not observed. And a thread of
autograd's may let go of memory when the profiler no longer listens to it. The history has both, and
what a thread allocates that the body starts, with the Python calls around it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from pytest_torchmem.record.devices import HistoryEntry
from pytest_torchmem.record.tree.python_calls import full_path
from pytest_torchmem.values.trace import ALLOCATION, EVENT, EventKind, Scope

if TYPE_CHECKING:
    from pytest_torchmem.record.tree.growing_tables import Tables

_BLOCK_UNIT_BYTES: Final = 512
# The event comes after the entry, but for the two clocks' resolution.
_CLOCKS_NS: Final = 2000


@dataclass(slots=True)
class _Lost:
    """An entry without an event; ``size_bytes`` is that of its block, negative for a free."""

    pointer: int
    size_bytes: int
    time_ns: int
    calls: Sequence[tuple[str, int, str]] = ()
    allocated: int = 0


def with_lost(
    tables: Tables,
    device: int,
    entries: Sequence[HistoryEntry],
    *,
    number: Callable[[str], int],
    allocated: int = 0,
) -> Tables:
    """Return the tables with a row for each allocation and free that the tree lacks.

    ``device`` is the device's number in the tables, ``entries`` its allocator's history, oldest
    first. ``number`` gives a text its number. ``allocated`` is the allocator's total before the
    first entry, for where the tree has nothing that says it.
    """
    rows = np.flatnonzero(tables.allocations["device"] == device)
    if len(rows) == len(entries):
        return tables
    seen = tables.allocations[rows]
    times = tables.events["start_ns"][seen["event"]]
    lost = list(_lost(entries, seen, times.tolist(), allocated))
    if not lost:
        return tables
    events, allocations = _rows(tables, lost, number)
    allocations["device"] = device
    return replace(
        tables,
        events=np.concatenate([tables.events, events]),
        allocations=np.concatenate([tables.allocations, allocations]),
    )


def _lost(
    entries: Sequence[HistoryEntry],
    seen: NDArray[np.void],
    times: Sequence[int],
    allocated_before: int,
) -> Iterator[_Lost]:
    """Return the entries without an event, in order, at times between those of their neighbours."""
    event_of = _events_of(entries, seen, times)
    blocks: dict[int, int] = {}
    waiting: list[_Lost] = []
    now = 0
    allocated: int | None = None
    for number, entry in enumerate(entries):
        row = event_of.get(number)
        if row is None:
            now = max(now + 1, entry.time_ns)
            rounded = _rounded(entry.size_bytes)
            if entry.is_allocation:
                blocks[entry.pointer] = size = rounded
            else:
                size = -blocks.pop(entry.pointer, rounded)
            waiting.append(_Lost(entry.pointer, size, now, entry.calls))
            continue
        size = int(seen["size_bytes"][row])
        if size > 0:
            blocks[entry.pointer] = size
        else:
            blocks.pop(entry.pointer, None)
        before = int(seen["total_allocated"][row]) - size
        yield from _settled(waiting, allocated, before)
        waiting = []
        allocated = before + size
        now = max(now, times[row])
    yield from _settled(waiting, allocated_before if allocated is None else allocated, None)


def _events_of(
    entries: Sequence[HistoryEntry], seen: NDArray[np.void], times: Sequence[int]
) -> dict[int, int]:
    """Return the event of each entry that has one, by their places in the two sequences.

    An event belongs to the last entry of its kind, at its address, that is no later than it.
    """
    made: dict[tuple[int, bool], list[int]] = defaultdict(list)
    for number, entry in enumerate(entries):
        made[entry.pointer, entry.is_allocation].append(number)
    found = {}
    for row in np.argsort(times, kind="stable").tolist()[::-1]:
        numbers = made[int(seen["ptr"][row]), bool(seen["size_bytes"][row] > 0)]
        while numbers and entries[numbers[-1]].time_ns > times[row] + _CLOCKS_NS:
            numbers.pop()
        if numbers:
            found[numbers.pop()] = row
    return found


def _settled(lost: Sequence[_Lost], allocated: int | None, before: int | None) -> Iterator[_Lost]:
    """Fill in the allocator's total: after the last event, and ``before`` the next one.

    A block may be larger than its request rounded up. What the total says beyond that belongs to
    one of those that were lost.
    """
    change = sum(one.size_bytes for one in lost)
    if allocated is None:
        allocated = (before or 0) - change
    elif before is not None and (rest := before - allocated - change):
        for one in lost:
            if (one.size_bytes > 0) == (rest > 0):
                one.size_bytes += rest
                break
    for one in lost:
        allocated += one.size_bytes
        one.allocated = allocated
        yield one


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // _BLOCK_UNIT_BYTES) * _BLOCK_UNIT_BYTES


def _rows(
    tables: Tables, lost: Sequence[_Lost], number: Callable[[str], int]
) -> tuple[NDArray[np.void], NDArray[np.void]]:
    """`trace.EVENT` and `trace.ALLOCATION` rows that come after those of the tables.

    Each allocation stands below the calls around it, outermost first; a row's line is the one of
    its caller that was running.
    """
    depths = np.array([len(one.calls) for one in lost])
    places = np.cumsum(depths + 1) - 1
    events = np.zeros(places[-1] + 1, EVENT)
    first = len(tables.events)
    events["kind"], events["scope"] = EventKind.PY_CALL, Scope.NONE
    events["kind"][places] = EventKind.ALLOCATION
    for column in ("file", "line", "sequence"):
        events[column] = -1
    events["parent"] = first - 1 + np.arange(len(events))
    events["parent"][places - depths] = -1
    events["name"] = number("")
    # The history does not name the thread. It was none that has a tree.
    events["thread"] = tables.events["thread"].max(initial=-1) + 1
    events["end"] = first + 1 + np.repeat(places, depths + 1)
    times_ns = [one.time_ns for one in lost]
    events["start_ns"] = events["end_ns"] = np.repeat(times_ns, depths + 1)
    for place, one in zip(places.tolist(), lost, strict=True):
        for out, (file, line, name) in enumerate(one.calls, 1):
            events[["file", "name"]][place - out] = number(full_path(file)), number(name)
            events["line"][place - out + 1] = line
    allocations = np.zeros(len(lost), ALLOCATION)
    allocations["event"] = first + places
    allocations["ptr"] = [one.pointer for one in lost]
    allocations["size_bytes"] = [one.size_bytes for one in lost]
    allocations["total_allocated"] = [one.allocated for one in lost]
    return events, allocations
