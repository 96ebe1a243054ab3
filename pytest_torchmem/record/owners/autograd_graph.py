"""Reads from an autograd graph the tensors that it keeps.

What a pack hook made is never turned back into a tensor, so that checkpointing does not recompute
and offloading does not copy because we looked: nothing is unpacked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary

import torch
from torch.autograd.graph import GradientEdge, Node

from pytest_torchmem.record.owners.places import answers, tensors_within
from pytest_torchmem.record.torch_api import autograd


@dataclass(frozen=True, slots=True)
class GraphHoldings:
    """Tensors that a graph holds: saved for backward, and the leaves that will get gradients."""

    saved: list[torch.Tensor]
    leaves: list[torch.Tensor]


def graph_holdings(roots: Iterable[object]) -> GraphHoldings:
    """Return what the graphs below ``roots`` (tensors, or edges that stand for one) hold."""
    saved: list[torch.Tensor] = []
    leaves: list[torch.Tensor] = []
    for node in nodes_below(roots):
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.append(leaf)
        saved += _saved_by(node)
    return GraphHoldings(saved, leaves)


def _saved_by(node: Node) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    for name in _names_of(type(node)):
        try:
            value = getattr(node, name)
        except RuntimeError:  # the graph was freed by an earlier backward
            continue
        for item in value if type(value) in (tuple, list) else (value,):
            tensors += tensors_within(autograd.raw_saved(item))
    # A custom Function may also keep tensors as attributes of its context.
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        tensors += tensors_within(vars(node))
    return tensors


# The attributes in which nodes show the tensors that they saved. Programs make classes of nodes.
_NAMES: Final[WeakKeyDictionary[type[Node], tuple[str, ...]]] = WeakKeyDictionary()


def _names_of(kind: type[Node]) -> tuple[str, ...]:
    if kind not in _NAMES:
        _NAMES[kind] = tuple(autograd.raw_names(kind))
    return _NAMES[kind]


def nodes_below(roots: Iterable[object]) -> Iterator[Node]:
    """Every node of the graphs that end in ``roots``: tensors, or edges that stand for one."""
    waiting = [node for root in roots for node in _nodes_of(root) if node is not None]
    seen_nodes: set[Node] = set(waiting)
    while waiting:
        yield (node := waiting.pop())
        for following, _ in node.next_functions:
            if following is not None and following not in seen_nodes:
                seen_nodes.add(following)
                waiting.append(following)


def _nodes_of(root: object) -> list[Node | None]:
    """Return the nodes at which the graph of a root begins: of a tensor, or of an edge."""
    if isinstance(root, GradientEdge):
        return [root.node]
    if isinstance(root, torch.Tensor) and answers(root):
        return [autograd.node_of(level) for level in autograd.levels_of(root)]
    return []
