"""Operators and the time that they took, beside the memory that they allocated.

Self time, queue depth and idle time are those of ``torch/profiler/_utils.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pytest_torchmem.analysis.events.annotations import Annotations
from pytest_torchmem.analysis.events.op_tree import OpTree
from pytest_torchmem.values.trace import EventKind

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class OperatorRow:
    """One operator's calls together.

    Attributes:
        name: The operator, an annotation, or a node of the backward graph.
        calls: How often it ran.
        self_allocated_bytes: What its calls allocated themselves, frees not subtracted.
        total_allocated_bytes: The same with the operators they called.
        largest_bytes: The largest single allocation among the latter.
        self_time_ns: Time in its calls but in nothing they called.
        total_time_ns: Time in its calls; of a call within a call of the same name, the outer one's.
    """

    name: str
    calls: int
    self_allocated_bytes: int
    total_allocated_bytes: int
    largest_bytes: int
    self_time_ns: int
    total_time_ns: int


def operator_table(tree: OpTree, device: int | None = None) -> tuple[OperatorRow, ...]:
    """Return one row for each operator, the largest total first.

    ``device`` is the number of a device to count allocations of; by default those of all count.
    """
    trace = tree.trace
    events, table = trace.events, trace.allocations
    is_op = events["kind"] == EventKind.TORCH_OP
    rows = np.flatnonzero(is_op)
    if not len(rows):
        return ()
    counted = table["size_bytes"] > 0
    if device is not None:
        counted &= table["device"] == device
    size = np.zeros(len(events), np.int64)
    size[table["event"][counted]] = table["size_bytes"][counted]
    owner = tree.innermost(is_op)
    own = np.zeros(len(events), np.int64)
    inside = (size > 0) & (owner >= 0)
    np.add.at(own, owner[inside], size[inside])
    # Rows are in depth-first order, so a subtree is a stretch and its sum a difference. A root that
    # allocates 4 bytes, with two children that allocate 2 and 1: size [4, 2, 1], ends [3, 2, 3],
    # sums [0, 4, 6, 7], totals 7 - 0, 6 - 4 and 7 - 6.
    sums = np.concatenate([[0], np.cumsum(size)])
    total = sums[events["end"]] - sums[:-1]
    outermost = _not_within_same_name(tree, rows)
    names, group = np.unique(events["name"][rows], return_inverse=True)
    self_time, duration = self_times(tree)[rows], (events["end_ns"] - events["start_ns"])[rows]
    columns = (
        np.bincount(group),
        _sums(group, own[rows]),
        _sums(group, total[rows] * outermost),
        _largest(tree, size, rows, group),
        _sums(group, self_time),
        _sums(group, duration * outermost),
    )
    result = [
        OperatorRow(trace.strings[name], *values)
        for name, *values in zip(names.tolist(), *(c.tolist() for c in columns), strict=True)
    ]
    result.sort(key=lambda row: (-row.total_allocated_bytes, -row.total_time_ns, row.name))
    return tuple(result)


def self_times(tree: OpTree) -> NDArray[np.int64]:
    """Time of each event that none of its children took: int64 nanoseconds, shape (E,)."""
    events = tree.trace.events
    duration: NDArray[np.int64] = events["end_ns"] - events["start_ns"]
    result: NDArray[np.int64] = duration.copy()
    below = events["parent"] >= 0
    np.subtract.at(result, events["parent"][below], duration[below])
    return result


def out_of_memory_ranks(tree: OpTree) -> tuple[int, ...]:
    """Return the ranks at which the allocator ran out of memory."""
    rows = np.flatnonzero(tree.trace.events["kind"] == EventKind.OUT_OF_MEMORY)
    return tuple(np.sort(tree.rank[rows]).tolist())


@dataclass(frozen=True, slots=True)
class Running:
    """The operators and annotations that ran at a moment, outermost first, and their durations."""

    names: tuple[str, ...]
    durations_ns: tuple[int, ...]


def running_at(tree: OpTree, rank: float) -> Running:
    """The annotations and operators around a moment of the recording."""
    events = tree.trace.events
    row = int(np.flatnonzero(tree.rank == int(rank))[0]) if len(events) else -1
    around = set(Annotations(tree).around(rank))
    while row >= 0:
        if events["kind"][row] == EventKind.TORCH_OP:
            around.add(row)
        row = int(events["parent"][row])
    rows = sorted(around, key=lambda row: int(tree.rank[row]))
    return Running(
        tuple(tree.trace.strings[events["name"][row]] for row in rows),
        tuple(int(events["end_ns"][row] - events["start_ns"][row]) for row in rows),
    )


def _sums(group: NDArray[np.int64], values: NDArray[np.int64]) -> NDArray[np.int64]:
    sums = np.zeros(int(group.max()) + 1, np.int64)
    np.add.at(sums, group, values)
    return sums


def _largest(
    tree: OpTree, size: NDArray[np.int64], rows: NDArray[np.int64], group: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The largest allocation in any subtree of each group's rows."""
    largest = np.zeros(int(group.max()) + 1, np.int64)
    parents = tree.trace.events["parent"]
    group_of = np.full(len(size), -1, np.int64)
    group_of[rows] = group
    for allocation in np.flatnonzero(size).tolist():
        amount, row = int(size[allocation]), int(parents[allocation])
        while row >= 0:
            if (number := int(group_of[row])) >= 0 and amount > largest[number]:
                largest[number] = amount
            row = int(parents[row])
    return largest


def _not_within_same_name(tree: OpTree, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return, for each row, whether no operator of the same name is around it, however far out."""
    events = tree.trace.events
    parents, names = events["parent"].tolist(), events["name"].tolist()
    is_op = (events["kind"] == EventKind.TORCH_OP).tolist()
    result = np.ones(len(rows), np.bool_)
    for index, row in enumerate(rows.tolist()):
        above = parents[row]
        while above >= 0 and is_op[above]:
            if names[above] == names[row]:
                result[index] = False
                break
            above = parents[above]
    return result
