"""Annotations: the stretches of a recording that code put a name on with ``record_function``.

The tree cannot tell what lies within one. An annotation begins and ends inside the Python calls
``__enter__`` and ``__exit__``, and the profiler closes everything that began in a call when that
call returns:

    __enter__
        "loss"          <- begins here, and no child will ever be added to it
    aten::mse_loss      <- though it ends only after this
    __exit__

So an annotation is taken as what its own times say, whatever its place in the tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from pytest_torchmem.values.trace import EventKind, Scope

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pytest_torchmem.analysis.events.op_tree import OpTree


@dataclass(frozen=True, eq=False)
class Annotations:
    """The annotations of a recording.

    Threads are not told apart: while the engine runs a backward pass on threads of its own, the
    caller waits inside whatever annotation it is in.
    """

    tree: OpTree

    def around(self, rank: float) -> tuple[int, ...]:
        """Return the rows of the annotations that are open at a moment, outermost first."""
        innermost, outer = self._nesting
        rows: list[int] = []
        row = int(innermost[int(rank)]) if 0 <= rank < len(innermost) else -1
        while row >= 0:
            rows.append(row)
            row = outer[row]
        return tuple(reversed(rows))

    @cached_property
    def _nesting(self) -> tuple[NDArray[np.int64], dict[int, int]]:
        """The innermost annotation at each rank, -1 for none; and the one around each, by row."""
        events, rank = self.tree.trace.events, self.tree.rank
        innermost = np.full(len(events), -1, np.int64)
        outer: dict[int, int] = {}
        rows = self._rows(events)
        starts = np.sort(events["start_ns"]) if len(rows) else events["start_ns"]
        ends = np.searchsorted(starts, events["end_ns"][rows], side="right")
        for row, end in sorted(
            zip(rows.tolist(), ends.tolist(), strict=True), key=lambda pair: int(rank[pair[0]])
        ):
            begin = int(rank[row])
            outer[row] = int(innermost[begin])
            innermost[begin:end] = row
        return innermost, outer

    def _rows(self, events: NDArray[np.void]) -> NDArray[np.int64]:
        is_annotation = (events["kind"] == EventKind.TORCH_OP) & (events["scope"] == Scope.OTHER)
        return np.flatnonzero(is_annotation)
