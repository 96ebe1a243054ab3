"""The order in which a GPU runs the nodes of second derivatives.

Of the nodes that wait, autograd runs the one with the highest number. Each thread numbers the nodes
that it makes. A backward pass on a GPU runs in a thread of its own, which makes few: with
``create_graph=True`` they have low numbers, and come after those of the forward pass. On the CPU
the program's own thread numbers them all, and they come before.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch

from pytest_torchmem.record.owners.autograd_graph import graph_holdings, nodes_below
from pytest_torchmem.record.patches import Installed
from pytest_torchmem.record.torch_api import autograd

# A program of fewer such nodes finds numbers that no other node has.
_ROOM: Final = 1 << 13


def number_as_on_a_gpu(patches: Installed) -> None:
    """Let the nodes that backward passes make have numbers below those of all others."""
    autograd.leave_numbers(_ROOM)
    patches.replace(autograd.ENGINE, _Engine)


class _Engine:
    """Stands in for the engine, and gives the nodes that it has made the numbers of a thread."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._next = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(
        self, outputs: Any, grads: Any, keep: bool, create: bool, *rest: Any, **named: Any
    ) -> object:
        begin = autograd.next_sequence_number()
        found = self._engine.run_backward(outputs, grads, keep, create, *rest, **named)
        if create and not autograd.in_backward():
            made = found or [autograd.gradient_of(leaf) for leaf in graph_holdings(outputs).leaves]
            self._number_again(made, begin)
        return found

    def _number_again(self, made: Iterable[torch.Tensor | None], begin: int) -> None:
        end = autograd.next_sequence_number()
        if self._next + end - begin > _ROOM:
            return
        for node in nodes_below(made):
            number = autograd.sequence_number(node)
            if begin <= number < end:
                autograd.set_sequence_number(node, number - begin + self._next)
        self._next += end - begin
