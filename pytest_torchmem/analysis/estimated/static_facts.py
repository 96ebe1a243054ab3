"""The answers of a graph to what the category passes ask.

A graph tells who makes a storage, who uses it, and when it dies. Owners are known as far as the
graph says what its inputs are: `StaticStorage.category`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytest_torchmem.analysis.storages.categories import Mask, Step, decide
from pytest_torchmem.values.contributors import Category, Phase
from pytest_torchmem.values.static_graph import NodeKind, StaticGraph, StaticNode, StaticRun

_BACKWARD_PHASES: Final = (Phase.BACKWARD, Phase.RECOMPUTE)


def settle_categories(run: StaticRun) -> StaticRun:
    """Return the run with a category for every storage that some node makes."""
    categories = tuple(Category)
    labels = decide(StaticFacts(run), len(run.graph.storages)).labels.tolist()
    storages = tuple(
        replace(storage, category=categories[label])
        for storage, label in zip(run.graph.storages, labels, strict=True)
    )
    return replace(run, graph=StaticGraph(run.graph.nodes, storages))


def makers_of(graph: StaticGraph) -> dict[int, StaticNode]:
    """Return the node that makes each storage, by the storage's index."""
    return {storage: node for node in graph.nodes for storage in node.makes}


@dataclass(frozen=True, eq=False)
class StaticFacts:
    """`Facts` about a static run; each attribute is described there.

    Rows 2k+1 and 2k+2 of the run belong to operator k. Three operators and a storage that the first
    one makes and the third one, a node of the backward graph, uses last::

        row         0   1   2   3   4   5   6
        operator      mm      exp     mul (backward)
        alive           x   x   x   x   x           first 1, end 6: it dies in the backward
    """

    run: StaticRun

    @cached_property
    def _operators(self) -> list[StaticNode]:
        return self.run.graph.operators

    @cached_property
    def _maker_rows(self) -> NDArray[np.int64]:
        """Number of the operator that makes each storage, -1 for none: int64, shape (S,)."""
        rows = np.full(len(self.run.graph.storages), -1, np.int64)
        for number, node in enumerate(self._operators):
            rows[list(node.makes)] = number
        return rows

    def held_as(self, category: Category) -> Mask:
        """The storages of which the graph says the category."""
        return np.array([s.category is category for s in self.run.graph.storages], np.bool_)

    @property
    def _nothing(self) -> Mask:
        return np.zeros(len(self.run.graph.storages), np.bool_)

    @cached_property
    def made(self) -> Mask:
        return self._maker_rows >= 0

    @property
    def counted(self) -> Mask:
        return self.made | self._from_before

    @cached_property
    def _from_before(self) -> Mask:
        """The inputs and attributes of a graph: the caller gave them."""
        given = self._nothing
        nodes = (node for node in self.run.graph.nodes if node.kind is not NodeKind.OPERATOR)
        given[[s for node in nodes for s in node.makes]] = True
        return given

    @property
    def given(self) -> Mask:
        return self._from_before

    def _used_in(self, *phases: Phase) -> Mask:
        used = self._nothing
        used[[s for node in self._operators if node.phase in phases for s in node.uses]] = True
        return used

    workspaces = leaves = buckets = accumulated = _nothing

    @cached_property
    def returned(self) -> Mask:
        """Nobody asks who holds it: it was made in a backward pass and is alive after it."""
        outlives = self.made_in(Phase.BACKWARD) & self._outlives(self._last_of(self._passes))
        return outlives & self.held_as(Category.UNKNOWN)

    @property
    def roots(self) -> Mask:
        return self.held_as(Category.AUTOGRAD_DETAIL)

    @property
    def has_modules(self) -> bool:
        return any(step.in_module for step in self.forward_steps())

    def forward_steps(self) -> Iterator[Step]:
        for node in self._operators:
            if node.phase is Phase.FORWARD:
                yield Step(bool(node.module), set(node.uses), set(node.writes), node.makes)

    @property
    def has_backward(self) -> bool:
        return any(node.phase is Phase.BACKWARD for node in self._operators)

    def made_in(self, *phases: Phase) -> Mask:
        return self._at_birth(
            np.array([node.phase in phases for node in self._operators], np.bool_)
        )

    @property
    def survives(self) -> Mask:
        return self._outlives(np.arange(len(self._operators)))

    @cached_property
    def saved(self) -> Mask:
        """No graph is asked. What autograd saves but never reads dies in the backward, as its node.

        That holds for what is made before the backward pass, or in an earlier one. What an earlier
        one made may have a name in Python, too, and is saved if a later one reads it.
        """
        passes, end = np.append(self._passes, -1), self.run.lifetimes.end
        made_in, dies_in = passes[self._maker_rows], passes[(end - 2).clip(0) // 2]
        dies_in[end > 2 * len(self._operators)] = -1
        is_kept: Mask = (
            self.made & (dies_in >= 0) & (dies_in != made_in) & ~self.made_in(Phase.RECOMPUTE)
        )
        for number, node in enumerate(self._operators):
            if node.phase is Phase.BACKWARD:
                uses = np.array(node.uses, np.int64)
                is_kept[uses[(made_in[uses] >= 0) & (made_in[uses] < passes[number])]] = True
        return is_kept

    @property
    def read_by_backward(self) -> Mask:
        return self._used_in(Phase.BACKWARD)

    @property
    def handed_on(self) -> Mask:
        """A graph does not say which node of the backward graph an operator belongs to."""
        return self.survives

    @cached_property
    def _passes(self) -> NDArray[np.int64]:
        """The number of the backward pass that each operator runs in, -1 outside of them.

        forward, backward, recompute, forward, backward: ``[-1, 0, 0, -1, 1]``.
        """
        inside = np.array([node.phase in _BACKWARD_PHASES for node in self._operators], np.int64)
        return np.where(inside, np.cumsum(np.diff(inside, prepend=0) > 0) - 1, -1)

    @staticmethod
    def _last_of(keys: NDArray[np.generic]) -> NDArray[np.int64]:
        """Return for each operator the last of those in a row with its key.

        >>> StaticFacts._last_of(np.array([-1, 0, 0, -1])).tolist()
        [0, 2, 2, 3]
        """
        ends = np.append(np.flatnonzero(keys[1:] != keys[:-1]), len(keys) - 1)
        return ends[np.searchsorted(ends, np.arange(len(keys)))]

    def _at_birth(self, of_operators: Mask) -> Mask:
        """Return what a mask says of the operators that make storages."""
        return np.append(of_operators, False)[self._maker_rows]

    def _outlives(self, last: NDArray[np.int64]) -> Mask:
        """Alive when an operator given for the one that makes it is over."""
        rows = 2 * np.append(last, -1)[self._maker_rows] + 2
        return self.made & (self.run.lifetimes.end > rows)
