"""StaticGraph: what a program would do with memory, known without running it.

The counterpart of a trace: ``record/graphs/`` ends in one, `analysis.estimated` starts from one.
It was read off an FX graph, and lifetimes follow from who uses what last. Needs neither torch nor a
device.

Time is counted in rows, so that an allocation and the releases after it stay apart: row 0 is the
moment before the first operator, operator k (counted from 0) allocates at row 2k+1, and row 2k+2
is the moment after it, with everything released that nobody needs any longer. It is the layout of
the profiles in ``torch/_inductor/fx_passes/memory_estimator.py``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pytest_torchmem.values.contributors import Category, Phase, Source
from pytest_torchmem.values.trace import summed_by_row


class NodeKind(enum.Enum):
    """The meaning of a node."""

    INPUT = "input"  # a placeholder
    ATTRIBUTE = "attribute"  # a parameter or constant that the graph holds itself
    OPERATOR = "operator"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class StaticStorage:
    """One storage, whatever number of tensors look into it.

    Attributes:
        size_bytes: What was asked for; the hint where the size is symbolic.
        device: ``cpu`` or ``cuda:0``.
        category: As far as the owner is known; UNKNOWN is for the analysis to settle.
    """

    size_bytes: int
    device: str
    category: Category = Category.UNKNOWN


@dataclass(frozen=True, slots=True)
class StaticNode:
    """One node of an FX graph.

    Attributes:
        name: The node's name in its graph.
        operator: In the profiler's style, ``aten::mm``.
        module: Path of the innermost module, not folded; ``""`` when unknown.
        source: The user's line; None when no user frame was seen.
        phase: Part of the training step.
        makes: Indices of storages first seen here.
        uses: Indices of storages its inputs look into; for an input, those it looks into itself.
        writes: Those among ``uses`` that it changes in place.
    """

    name: str
    kind: NodeKind
    operator: str = ""
    module: str = ""
    source: Source | None = None
    phase: Phase = Phase.FORWARD
    makes: tuple[int, ...] = ()
    uses: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StaticGraph:
    """Nodes in execution order and the storages they speak of.

    The storage table may be shared with another graph (a forward and its backward), so it can hold
    storages that no node here makes or uses.
    """

    nodes: tuple[StaticNode, ...]
    storages: tuple[StaticStorage, ...]

    @property
    def operators(self) -> list[StaticNode]:
        """The nodes that are operators, in order."""
        return [node for node in self.nodes if node.kind is NodeKind.OPERATOR]

    @property
    def row_count(self) -> int:
        """Rows of its timeline; see the module's text."""
        return 1 + 2 * len(self.operators)


@dataclass(frozen=True, slots=True, eq=False)
class Lifetimes:
    """When each storage of a graph lives: at rows ``first <= row < end``.

    Attributes:
        first: int64, shape (S,), one entry for each storage of the graph.
        end: int64, shape (S,); the number of rows for what nobody releases, and equal to ``first``
            for what never lives in this graph.
    """

    first: NDArray[np.int64]
    end: NDArray[np.int64]

    def levels(self, amounts: NDArray[np.int64], row_count: int) -> NDArray[np.int64]:
        """Return the sum of what lives at each row, of an amount for each storage."""
        return summed_by_row(self.first, self.end, amounts, row_count)


@dataclass(frozen=True, slots=True, eq=False)
class StaticRun:
    """A graph with lifetimes: all that an estimate is made from.

    Attributes:
        device: The device that is reported on.
    """

    graph: StaticGraph
    lifetimes: Lifetimes
    device: str
