"""Find the calls that ran at a moment of a recording, and failed allocations."""

from __future__ import annotations

import numpy as np

from pytest_torchmem.analysis.events.annotations import Annotations
from pytest_torchmem.analysis.events.memory_events import start_ns
from pytest_torchmem.analysis.events.op_tree import OpTree
from pytest_torchmem.values.picture import Span
from pytest_torchmem.values.trace import EventKind


def out_of_memory_ranks(tree: OpTree) -> tuple[int, ...]:
    """Return the ranks at which the allocator ran out of memory."""
    rows = np.flatnonzero(tree.trace.events["kind"] == EventKind.OUT_OF_MEMORY)
    return tuple(np.sort(tree.rank[rows]).tolist())


def running_at(tree: OpTree, rank: float) -> tuple[Span, ...]:
    """The annotations and operators around a moment of the recording, outermost first.

    Times count from the start of the recording.
    """
    events = tree.trace.events
    row = int(np.flatnonzero(tree.rank == int(rank))[0]) if 0 <= rank < len(events) else -1
    around = set(Annotations(tree).around(rank))
    while row >= 0:
        if events["kind"][row] == EventKind.TORCH_OP:
            around.add(row)
        row = int(events["parent"][row])
    names, begin = tree.trace.strings, start_ns(tree)
    return tuple(
        Span(
            "running",
            names[events["name"][row]],
            int(events["start_ns"][row]) - begin,
            int(events["end_ns"][row]) - begin,
        )
        for row in sorted(around, key=lambda row: int(tree.rank[row]))
    )
