"""What ran at a moment of a recording, and when the allocator ran out of memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pytest_torchmem.analysis.events.annotations import Annotations
from pytest_torchmem.analysis.events.op_tree import OpTree
from pytest_torchmem.values.trace import EventKind


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
