"""Reads from an autograd graph the tensors that it keeps.

What a pack hook made is never turned back into a tensor, so that checkpointing does not recompute
and offloading does not copy because we looked. Since torch 2.10 nothing at all is unpacked.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial, wraps
from threading import get_ident
from typing import ClassVar, Final
from weakref import WeakKeyDictionary

import torch
from torch.autograd.graph import GradientEdge, Node

from pytest_torchmem.record.owners.places import answers, tensors_within
from pytest_torchmem.record.patches import Installed
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
    with autograd.unpacking_unseen():
        for node in nodes_below(roots):
            if (leaf := getattr(node, "variable", None)) is not None:
                leaves.append(leaf)
            saved += _saved_by(node)
    return GraphHoldings(saved, leaves)


def _saved_by(node: Node) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    # Before torch 2.10, to read means to unpack.
    names = _names_of(type(node)) if autograd.READS_SAVED or surely_without(node) else ()
    for name in names:
        try:
            value = getattr(node, name)
        except RuntimeError:  # the graph was freed by an earlier backward
            continue
        for item in value if type(value) in (tuple, list) else (value,):
            found += tensors_within(autograd.raw_saved(item))
    # A custom Function may also keep tensors as attributes of its context.
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        found += tensors_within(vars(node))
    return found


# The attributes in which nodes show the tensors that they saved. Programs make classes of nodes.
_NAMES: Final[WeakKeyDictionary[type[Node], tuple[str, ...]]] = WeakKeyDictionary()


def _names_of(kind: type[Node]) -> tuple[str, ...]:
    if kind not in _NAMES:
        raw = autograd.raw_names(kind)
        if not autograd.READS_SAVED:
            raw = [autograd.unpacked_name(kind, name) for name in raw]
        _NAMES[kind] = tuple(raw)
    return _NAMES[kind]


def nodes_below(roots: Iterable[object]) -> Iterator[Node]:
    """Every node of the graphs that end in ``roots``: tensors, or edges that stand for one."""
    waiting = [node for root in roots for node in _nodes_of(root) if node is not None]
    seen: set[Node] = set(waiting)
    while waiting:
        yield (node := waiting.pop())
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def _nodes_of(root: object) -> list[Node | None]:
    """Return the nodes at which the graph of a root begins: of a tensor, or of an edge."""
    if isinstance(root, GradientEdge):
        return [root.node]
    if isinstance(root, torch.Tensor) and answers(root):
        return [autograd.node_of(level) for level in autograd.levels_of(root)]
    return []


class PackHookWatch:
    """Notes when hooks are in force on the thread that installs this, until it is taken out.

    Before torch 2.10 we can read what a node has saved only by unpacking it, and that calls the
    user's unpack hook: a checkpoint would be computed again because we looked. A thread numbers its
    nodes one after the other, so we note the numbers between which hooks are in force.

    Graphs are read after that, too: the latest watch stays in ``latest``.
    """

    latest: ClassVar[PackHookWatch | None] = None

    def __init__(self) -> None:
        self._thread = 0
        self._depth = 0
        self._begins: list[int] = []
        self._ends: list[int] = []
        # The watch knows nodes from the first number on, and before the second.
        self._known_from = 0
        self._known_until: int | None = None

    def install(self, patches: Installed) -> None:
        """Begin to note hooks: where torch does not show what a node saved without unpacking it."""
        self._thread = get_ident()
        self._known_from = autograd.next_sequence_number()
        PackHookWatch.latest = self
        patches.finally_do(self._end)
        for name, noted in zip(autograd.PACK_HOOKS, (self._push, self._pop), strict=True):
            patches.replace(name, partial(self._noting, noted))

    def _end(self) -> None:
        self._known_until = autograd.next_sequence_number()

    def _noting(
        self, noted: Callable[[], None], function: Callable[..., object]
    ) -> Callable[..., object]:
        @wraps(function)
        def watched(*args: object) -> object:
            if get_ident() == self._thread:
                noted()
            return function(*args)

        return watched

    def _push(self) -> None:
        if not self._depth:
            self._begins.append(autograd.next_sequence_number())
        self._depth += 1

    def _pop(self) -> None:
        if not self._depth:  # in force since before the watch
            self._known_from = autograd.next_sequence_number()
            return
        self._depth -= 1
        if not self._depth:
            end = autograd.next_sequence_number()
            if end == self._begins[-1]:  # nothing was saved meanwhile
                self._begins.pop()
            else:
                self._ends.append(end)

    def surely_without(self, number: int) -> bool:
        """Return whether no hook was in force when a node got its number; False if not known."""
        if number < self._known_from:
            return False
        if self._known_until is not None and number >= self._known_until:
            return False
        place = bisect_right(self._begins, number) - 1
        return place < 0 or (place < len(self._ends) and number >= self._ends[place])


def surely_without(node: Node) -> bool:
    """Return whether no hook was in force when a node was made; False if not known."""
    watch = PackHookWatch.latest
    return watch is not None and watch.surely_without(autograd.sequence_number(node))
