"""The order in which a GPU runs the nodes of second derivatives.

Of the nodes that wait, autograd runs the one with the highest number. Each thread numbers the nodes
that it makes. On the CPU the program's own thread makes them all. A backward pass on a GPU runs in
a thread of its own, which begins at 0, too. What it makes with ``create_graph=True`` comes after
the nodes of the forward pass if a step makes few of them (a gradient penalty), and before if it
makes more than the program's own thread (derivatives by the inputs of a network): then it has got
ahead after some steps.
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
_AHEAD: Final = 1 << 40


class DeviceThread:
    """Numbers nodes that backward passes make below those of all others, or ``ahead`` of them."""

    def __init__(self, *, ahead: bool = False) -> None:
        self._first = _AHEAD if ahead else 0
        self._made = self._begin = 0
        self._engine: Any = None

    def put_in_place(self, patches: Installed) -> None:
        autograd.leave_numbers(_ROOM)
        self._begin = autograd.next_sequence_number()
        patches.replace(autograd.ENGINE, self._in_place_of)

    @property
    def gets_ahead(self) -> bool:
        """Return whether it has made more nodes than the program's own thread."""
        return 2 * self._made > autograd.next_sequence_number() - self._begin

    def _in_place_of(self, engine: object) -> DeviceThread:
        self._engine = engine
        return self

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
        if self._made + end - begin > _ROOM:
            return
        for node in nodes_below(made):
            number = autograd.sequence_number(node)
            if begin <= number < end:
                autograd.set_sequence_number(node, number - begin + self._first + self._made)
        self._made += end - begin
