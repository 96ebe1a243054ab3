"""Reads from an autograd graph the tensors that it keeps.

What a pack hook made is never turned back into a tensor, so that checkpointing does not recompute
and offloading does not copy because we looked. Since torch 2.10 nothing at all is unpacked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.autograd.graph import GradientEdge, Node

from pytest_torchmem.record.owners import pack_hooks
from pytest_torchmem.record.torch_api import autograd, functorch


@dataclass(frozen=True, slots=True)
class GraphHoldings:
    """Tensors that a graph holds: saved for backward, and the leaves that will get gradients."""

    saved: list[torch.Tensor]
    leaves: list[torch.Tensor]


class GraphReader:
    """Walks graphs; remembers per node class which attributes hold saved tensors."""

    def __init__(self) -> None:
        self._saved_names: dict[type[Node], tuple[str, ...]] = {}

    def holdings(self, roots: Iterable[object]) -> GraphHoldings:
        """Return what the graphs below ``roots`` (tensors, or edges that stand for one) hold."""
        saved: list[torch.Tensor] = []
        leaves: list[torch.Tensor] = []
        for node in nodes_below(roots):
            if (leaf := getattr(node, "variable", None)) is not None:
                leaves.append(leaf)
            saved += self._saved_by(node)
        return GraphHoldings(saved, leaves)

    def _saved_by(self, node: Node) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for name in self._names(node):
            try:
                value = getattr(node, name)
            except RuntimeError:  # the graph was freed by an earlier backward
                continue
            for item in value if type(value) in (tuple, list) else (value,):
                found += tensors_in(autograd.raw_saved(item))
        # A custom Function may also keep tensors as attributes of its context.
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            found += tensors_in(vars(node))
        return found

    def _names(self, node: Node) -> tuple[str, ...]:
        """The attributes of a node in which what it saved can be looked at."""
        if not autograd.READS_SAVED and not pack_hooks.surely_without(node):
            return ()
        kind = type(node)
        if kind not in self._saved_names:
            raw = autograd.raw_names(kind)
            names = (
                raw
                if autograd.READS_SAVED
                else [autograd.unpacked_name(kind, name) for name in raw]
            )
            self._saved_names[kind] = tuple(names)
        return self._saved_names[kind]


def tensors_in(value: object) -> list[torch.Tensor]:
    """Tensors in a value and in the tuples, lists and dicts it is made of."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = [*value.values()]
    if not isinstance(value, (tuple, list)):
        return []
    found = []
    for item in value:
        if type(item) is torch.Tensor:
            found.append(item)
        else:
            found += tensors_in(item)
    return found


def nodes_below(roots: Iterable[object]) -> Iterator[Node]:
    """Every node of the graphs that end in ``roots``: tensors, or edges that stand for one."""
    waiting = [node for root in roots for node in _nodes_of(root) if node is not None]
    seen: set[Node] = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def _nodes_of(root: object) -> list[Node | None]:
    """Return the nodes at which the graph of a root begins: of a tensor, or of an edge."""
    if isinstance(root, GradientEdge):
        return [root.node]
    if isinstance(root, torch.Tensor):
        return [level.grad_fn for level in functorch.levels_of(root)]
    return []
