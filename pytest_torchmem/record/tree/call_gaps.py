"""Places operators between two calls of their Python function, where no call led to them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pytest_torchmem.record.tree.event_tree import PYTHON, EventTree, WorthKeeping
from pytest_torchmem.values.trace import EventKind


@dataclass(frozen=True, slots=True)
class Gap:
    """Operators that ran directly in a Python function, between two calls it made.

    ``parent`` and ``operators`` are rows of events; ``after`` and ``before`` are the lines of the
    calls around, 0 where there is none.
    """

    parent: int
    operators: tuple[int, ...]
    after: int
    before: int


def find_gaps(tree: EventTree, kept: WorthKeeping) -> list[Gap]:
    """Return the runs of operators directly below a Python function; rows are those of ``kept``.

    The calls around need not be among what is kept.
    """
    kinds, parents = np.array(tree.kinds, np.uint8), np.array(tree.parents, np.int64)
    is_call = np.isin(kinds, PYTHON)
    in_function = (kinds == EventKind.TORCH_OP) & (parents >= 0)
    in_function &= kinds[parents] == EventKind.PY_CALL
    lines = np.zeros(len(kinds), np.int64)
    lines[is_call] = tree.lines
    found: list[Gap] = []
    # By function: the line of the last call, and the operators that ran since.
    after: dict[int, int] = {}
    since: dict[int, list[int]] = {}
    rows = np.flatnonzero(is_call | in_function)
    columns = (parents[rows], kept.row[parents[rows]], kept.row[rows], is_call[rows], lines[rows])
    for parent, function, row, calls, line in zip(*(c.tolist() for c in columns), strict=True):
        if not calls:
            since.setdefault(parent, []).append(row)
            continue
        if operators := since.pop(parent, None):
            found.append(Gap(function, tuple(operators), after.get(parent, 0), line))
        after[parent] = line
    for parent, operators in since.items():
        found.append(Gap(int(kept.row[parent]), tuple(operators), after.get(parent, 0), 0))
    return found
