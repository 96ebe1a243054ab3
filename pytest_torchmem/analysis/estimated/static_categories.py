"""What the storages of a static run are for, where their owners did not say.

The rules are those of `analysis.storages.categories`, on what an estimate knows:
who made a storage, who reads it, and when it dies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pytest_torchmem.values.contributors import Category, Phase
from pytest_torchmem.values.static_graph import NodeKind, StaticGraph, StaticNode, StaticRun

_BACKWARD_PHASES = (Phase.BACKWARD, Phase.RECOMPUTE)


def settle_categories(run: StaticRun) -> StaticRun:
    """Return the run with a category for every storage that some node makes."""
    graph = run.graph
    evidence = _StaticEvidence(
        operators=[node for node in graph.nodes if node.kind is NodeKind.OPERATOR],
        data=_made_from_data(graph),
        read_by_backward=_read_by_backward(graph),
    )
    makers = makers_of(graph)
    storages = list(graph.storages)
    for index, storage in enumerate(storages):
        if storage.category is Category.UNKNOWN and index in makers:
            first, end = int(run.lifetimes.first[index]), int(run.lifetimes.end[index])
            category = _category(evidence, index, makers[index], first, end)
            storages[index] = replace(storage, category=category)
    return replace(run, graph=StaticGraph(graph.nodes, tuple(storages)))


def makers_of(graph: StaticGraph) -> dict[int, StaticNode]:
    """The node that makes each storage."""
    return {storage: node for node in graph.nodes for storage in node.makes}


@dataclass(frozen=True, slots=True)
class _StaticEvidence:
    operators: Sequence[StaticNode]
    data: frozenset[int]
    read_by_backward: frozenset[int]

    def operator_at(self, row: int) -> int:
        """The operator that a row belongs to; rows 2k+1 and 2k+2 belong to operator k."""
        return min(max(row - 1, 0) // 2, len(self.operators) - 1)

    def phase_at(self, row: int) -> Phase:
        return self.operators[self.operator_at(row)].phase

    def never_released(self, end: int) -> bool:
        return end > 2 * len(self.operators)


def _category(
    evidence: _StaticEvidence, index: int, maker: StaticNode, first: int, end: int
) -> Category:
    if maker.kind is not NodeKind.OPERATOR or index in evidence.data:
        return Category.INPUT
    if maker.phase is Phase.FORWARD:
        # What autograd saves but never reads goes while the backward runs, with its node.
        dies_there = (
            not evidence.never_released(end) and evidence.phase_at(end - 1) in _BACKWARD_PHASES
        )
        kept = dies_there or index in evidence.read_by_backward
        return Category.ACTIVATION if kept else Category.TEMPORARY
    if maker.phase is Phase.RECOMPUTE:
        kept = index in evidence.read_by_backward
        return Category.ACTIVATION if kept else Category.TEMPORARY
    if maker.phase is Phase.BACKWARD:
        return _category_in_backward(evidence, first, end)
    return Category.TEMPORARY


def _category_in_backward(evidence: _StaticEvidence, first: int, end: int) -> Category:
    """A gradient is what somebody holds after the backward; what is handed from one node of the
    backward graph to the next is autograd's own; the rest a node made for itself."""
    last = made = evidence.operator_at(first)
    operators = evidence.operators
    while last + 1 < len(operators) and operators[last + 1].phase in _BACKWARD_PHASES:
        last += 1
    if end > 2 * last + 2:
        return Category.GRADIENT
    last = made
    while last + 1 < len(operators) and operators[last + 1].scope == operators[made].scope:
        last += 1
    # A traced graph does not say which node of the backward graph an operator belongs to.
    handed_on = end > 2 * last + 2 or not operators[made].scope
    return Category.AUTOGRAD_DETAIL if handed_on else Category.TEMPORARY


def _read_by_backward(graph: StaticGraph) -> frozenset[int]:
    return frozenset(
        storage
        for node in graph.nodes
        if node.kind is NodeKind.OPERATOR and node.phase is Phase.BACKWARD
        for storage in node.uses
    )


def _made_from_data(graph: StaticGraph) -> frozenset[int]:
    """Storages made from data alone, outside every module, that something else reads.

    Without modules, code and model cannot be told apart, and only what came out of nothing counts.
    """
    operators = [n for n in graph.nodes if n.kind is NodeKind.OPERATOR and n.phase is Phase.FORWARD]
    has_modules = any(node.module for node in operators)
    inputs = {i for i, s in enumerate(graph.storages) if s.category is Category.INPUT}
    data, used, made = set(inputs), set[int](), set[int]()
    for node in operators:
        made.update(node.makes)
        others = set(node.uses) - set(node.makes)
        from_data = others <= data
        if node.module or not from_data:
            used |= others
            if not from_data:
                data -= set(node.writes) - inputs
        elif has_modules or not others:
            data.update(node.makes)
        else:
            used |= others
    return frozenset(data & used & made)
