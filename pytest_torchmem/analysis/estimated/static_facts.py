"""The answers of a static run to what the category passes ask.

A program that did not run for real tells who makes a storage, who uses it, and when it dies. Owners
are known as far as the recorder of the run could ask them: `StaticStorage.category`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from pytest_torchmem.analysis.storages.categories import Decisions, Step, decide
from pytest_torchmem.values.contributors import Category, Phase
from pytest_torchmem.values.static_graph import NodeKind, StaticGraph, StaticNode, StaticRun

if TYPE_CHECKING:
    from pytest_torchmem.analysis.storages.categories import Mask

_BACKWARD_PHASES: Final = (Phase.BACKWARD, Phase.RECOMPUTE)


def decide_categories(run: StaticRun) -> Decisions:
    """Return the category of each storage of the graph, with the claim that decided it."""
    return decide(StaticFacts(run), len(run.graph.storages))


def settle_categories(run: StaticRun) -> StaticRun:
    """Return the run with a category for every storage that some node makes."""
    categories = tuple(Category)
    labels = decide_categories(run).labels.tolist()
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
    def _makers(self) -> dict[int, StaticNode]:
        return makers_of(self.run.graph)

    @cached_property
    def _maker_rows(self) -> NDArray[np.int64]:
        """Number of the operator that makes each storage, -1 for none: int64, shape (S,)."""
        rows = np.full(len(self.run.graph.storages), -1, np.int64)
        for number, node in enumerate(self._operators):
            rows[list(node.makes)] = number
        return rows

    def _where(self, condition: Callable[[int], bool]) -> Mask:
        """The storages that an operator makes and that meet a condition."""
        found = np.zeros(len(self.run.graph.storages), np.bool_)
        rows = [storage for storage in np.flatnonzero(self.made).tolist() if condition(storage)]
        found[rows] = True
        return found

    def _told(self, category: Category) -> Mask:
        """The storages of which the recorder of the run knew the category."""
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
        given[[s for s, n in self._makers.items() if n.kind is not NodeKind.OPERATOR]] = True
        return given

    @cached_property
    def given(self) -> Mask:
        """A tensor that an optimizer alone reads is no input."""
        read = {node.phase is Phase.OPTIMIZER: self._nothing for node in self._operators}
        for node in self._operators:
            read[node.phase is Phase.OPTIMIZER][list(node.uses)] = True
        nothing = self._nothing
        return self._from_before & ~(read.get(True, nothing) & ~read.get(False, nothing))

    def held_as(self, category: Category) -> Mask:
        return self._told(category)

    workspaces = leaves = buckets = accumulated = _nothing

    @cached_property
    def returned(self) -> Mask:
        """Nobody asks who holds it: it was made in a backward pass and is alive after it."""
        outlives = self._where(self._outlives_backward) & self.made_in(Phase.BACKWARD)
        return outlives & self._told(Category.UNKNOWN)

    @property
    def roots(self) -> Mask:
        return self._told(Category.AUTOGRAD_DETAIL)

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
        return self._where(lambda storage: self._makers[storage].phase in phases)

    @property
    def survives(self) -> Mask:
        last_row = 2 * self._maker_rows + 2
        survives: Mask = self.run.lifetimes.end > last_row
        return survives & self.made

    @cached_property
    def saved(self) -> Mask:
        """No graph is asked. What autograd saves but never reads dies in the backward, as its node.

        That holds for what is made before the backward pass, or in an earlier one. What an earlier
        one made may have a name in Python, too, and is saved if a later one reads it.
        """
        kept = self._where(self._dies_in_later_backward) & ~self.made_in(Phase.RECOMPUTE)
        for number, node in enumerate(self._operators):
            within = self._backward_passes[number]
            if within >= 0 and node.phase is Phase.BACKWARD:
                kept[[s for s in node.uses if 0 <= self._made_in_pass(s) < within]] = True
        return kept

    @cached_property
    def read_by_backward(self) -> Mask:
        read = self._nothing
        for node in self._operators:
            if node.phase is Phase.BACKWARD:
                read[list(node.uses)] = True
        return read

    @property
    def handed_on(self) -> Mask:
        """A traced graph does not say which node of the backward graph an operator belongs to."""
        return self._where(self._outlives_scope) & self.survives

    @cached_property
    def _backward_passes(self) -> list[int]:
        """The number of the backward pass that each operator runs in, -1 outside of them.

        forward, backward, recompute, forward, backward: ``[-1, 0, 0, -1, 1]``.
        """
        numbers, latest, inside = [], -1, False
        for node in self._operators:
            was_inside, inside = inside, node.phase in _BACKWARD_PHASES
            latest += inside and not was_inside
            numbers.append(latest if inside else -1)
        return numbers

    def _made_in_pass(self, storage: int) -> int:
        """The number of the backward pass that made a storage, -1 for none."""
        maker = int(self._maker_rows[storage])
        return self._backward_passes[maker] if maker >= 0 else -1

    def _outlives_backward(self, storage: int) -> bool:
        passes = self._backward_passes
        last = maker = int(self._maker_rows[storage])
        if passes[maker] < 0:
            return False
        while last + 1 < len(passes) and passes[last + 1] == passes[maker]:
            last += 1
        return int(self.run.lifetimes.end[storage]) > 2 * last + 2

    def _dies_in_later_backward(self, storage: int) -> bool:
        passes, end = self._backward_passes, int(self.run.lifetimes.end[storage])
        if end > 2 * len(passes):
            return False
        within = passes[max(end - 2, 0) // 2]
        return within >= 0 and within != passes[self._maker_rows[storage]]

    def _outlives_scope(self, storage: int) -> bool:
        last = maker = int(self._maker_rows[storage])
        operators, scope = self._operators, self._operators[maker].scope
        if not scope:
            return True
        while last + 1 < len(operators) and operators[last + 1].scope == scope:
            last += 1
        return int(self.run.lifetimes.end[storage]) > 2 * last + 2
