"""StaticGraph: what a program would do with memory, known without running it.

The counterpart of a trace: ``record/fake/`` ends in one, `analysis.estimated` starts from one.
Either it was read off an FX graph, and lifetimes follow from who uses what last, or a run on fake
tensors recorded it, and lifetimes are those of the eager program. Needs neither torch nor a device.

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

    INPUT = "input"  # a placeholder, or a storage from before a recorded run
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
        doubted_bytes: How much larger it is if the values of tensors will have it so.
    """

    size_bytes: int
    device: str
    category: Category = Category.UNKNOWN
    doubted_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StaticNode:
    """One node: an FX node, or one operator of a run on fake tensors.

    Attributes:
        name: The node's name in its graph; the operator's name where there is no graph.
        operator: In the profiler's style, ``aten::mm``.
        module: Path of the innermost module, not folded; ``""`` when unknown.
        source: The user's line; None when no user frame was seen.
        phase: Part of the training step.
        makes: Indices of storages first seen here.
        uses: Indices of storages its inputs look into; for an input, those it looks into itself.
        writes: Those among ``uses`` that it changes in place.
        scope: The evaluation of a node of the backward graph that it belongs to; ``""`` outside the
            backward, and where a traced graph does not say.
        unknown_bytes: The most that its kernel may hold for itself beside what it makes.
        unknown_by_values: Values of tensors decide how much of that it holds.
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
    scope: str = ""
    unknown_bytes: int = 0
    unknown_by_values: bool = False


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
        notes: Sentences the reader of the numbers must know.
        blind_spots: What the figures do not contain, and nobody can bound, in a sentence each.
        numbers_bytes: The most that the CPU takes for all of Python's numbers in the operations, as
            that in ``x * 2``: it makes tensors of them, which autograd may keep.
    """

    graph: StaticGraph
    lifetimes: Lifetimes
    device: str
    notes: tuple[str, ...] = ()
    blind_spots: tuple[str, ...] = ()
    numbers_bytes: int = 0
