"""Places operators between two calls of their Python function, where no call led to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pytest_torchmem.record.tree.event_tree import PYTHON, EventTree, WorthKeeping
from pytest_torchmem.values.trace import EventKind

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class OpenGap:
    """A gap in a function that was running when its session was cut.

    ``operators`` are those that ran in it, session by session: the events, and rows of them.
    ``after`` is the line of the call before, 0 where there is none.
    """

    operators: tuple[tuple[NDArray[np.void], tuple[int, ...]], ...]
    after: int


@dataclass(frozen=True, slots=True)
class Gap:
    """Operators that ran directly in a Python function, between two calls it made.

    ``parent`` and ``operators`` are rows of events; ``after`` and ``before`` are the lines of the
    calls around, 0 where there is none. ``earlier`` is what was in the gap when the session before
    was cut.
    """

    parent: int
    operators: tuple[int, ...]
    after: int
    before: int
    earlier: OpenGap | None = None

    def parts(self, events: NDArray[np.void]) -> list[tuple[NDArray[np.void], tuple[int, ...]]]:
        """Its operators, session by session, of which the last one has ``events``."""
        return [*(self.earlier.operators if self.earlier else ()), (events, self.operators)]

    def left_open(self, events: NDArray[np.void]) -> OpenGap:
        """The gap, for the session that goes on from the one that has ``events``."""
        return OpenGap(tuple(self.parts(events)), self.after)


@dataclass(frozen=True, slots=True)
class Cuts:
    """The cuts at the two ends of a session, as rows of its tree.

    ``own`` are the calls that cut it, or wanted to. ``resumed`` is the function that was running at
    its beginning, with the gap that was open there, and ``left`` the one that was running at its
    end; -1 where there is none.
    """

    own: tuple[int, ...] = ()
    resumed: int = -1
    gap: OpenGap | None = None
    left: int = -1


def find_gaps(tree: EventTree, kept: WorthKeeping, cuts: Cuts) -> tuple[list[Gap], Gap | None]:
    """Return the runs of operators directly below a Python function, and the one that is cut off.

    Rows are those of ``kept``. The calls around need not be among what is kept.
    """
    kinds, parents = np.array(tree.kinds, np.uint8), np.array(tree.parents, np.int64)
    is_call = np.isin(kinds, PYTHON)
    in_function = (kinds == EventKind.TORCH_OP) & (parents >= 0)
    in_function &= kinds[parents] == EventKind.PY_CALL
    lines = np.zeros(len(kinds), np.int64)
    lines[is_call] = tree.lines
    # A cut is no call of the function's own.
    is_call[list(cuts.own)] = False
    found: list[Gap] = []
    # By function: the line of the last call, and the operators that ran since.
    after: dict[int, int] = {}
    since: dict[int, list[int]] = {}
    earlier: dict[int, OpenGap] = {}
    if cuts.gap is not None and cuts.resumed >= 0:
        after[cuts.resumed], since[cuts.resumed] = cuts.gap.after, []
        earlier[cuts.resumed] = cuts.gap

    def gap(parent: int, before: int) -> Gap:
        operators = tuple(since.pop(parent, ()))
        function = int(kept.row[parent])
        return Gap(function, operators, after.get(parent, 0), before, earlier.pop(parent, None))

    rows = np.flatnonzero(is_call | in_function)
    columns = (parents[rows], kept.row[rows], is_call[rows], lines[rows])
    for parent, row, calls, line in zip(*(c.tolist() for c in columns), strict=True):
        if not calls:
            since.setdefault(parent, []).append(row)
            continue
        if parent in since:
            found.append(gap(parent, line))
        after[parent] = line
    left = gap(cuts.left, 0) if cuts.left >= 0 else None
    return [*found, *(gap(parent, 0) for parent in list(since))], left
