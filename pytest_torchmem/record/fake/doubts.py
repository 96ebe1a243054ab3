"""Gradients of products, which torch computes in another way where some values are zero.

See ``prod_backward`` and ``cumprod_backward`` in ``torch/csrc/autograd/FunctionsManual.cpp``. With
no zeros they divide, and with two of them the gradient of a product of all is zero. Fake tensors
always go the longest way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from pytest_torchmem.record.fake.kernels.operator_call import Call, elements, nbytes

_OF_ALL: Final = "ProdBackward0"
_ALONG: Final = "ProdBackward1"
_RUNNING: Final = "CumprodBackward"
# Of the largest, the smallest and the middle value of all.
_SPREADING: Final = ("MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0")
_INDEX_BYTES: Final = 8
_ONE_PLACE_BYTES: Final = 64
# With zeros or without, the gradient of a running product makes these.
_DIVIDING: Final = frozenset({"aten::mul", "aten::flip", "aten::cumsum", "aten::where"})


@dataclass(frozen=True, slots=True)
class Doubt:
    """An operator's memory, as far as values decide it.

    Attributes:
        is_sure: It makes the same whatever the values are.
        taken_bytes: What torch has beside it, with zeros or without.
        unknown_bytes: What torch may have beside it.
    """

    is_sure: bool
    taken_bytes: int = 0
    unknown_bytes: int = 0


class Doubts:
    """Finds the operators of a backward pass whose memory values decide."""

    def __init__(self, is_doubted: Callable[[torch.Tensor], bool]) -> None:
        self._is_doubted = is_doubted
        self._rows: dict[str, int] = {}

    def about(self, call: Call, scope: str, *, on_cpu: bool) -> Doubt | None:
        """Return what values decide about an operator in a node, if anything."""
        if not call.outputs:
            return None
        if scope.startswith(_SPREADING) and on_cpu:
            return self._spread(call, scope)
        if scope.startswith(_RUNNING):
            return _running(call)
        if scope.startswith(_ALONG):
            return self._along(call, scope)
        if scope.startswith(_OF_ALL):
            return self._of_all(call)
        return None

    def _spread(self, call: Call, scope: str) -> Doubt | None:
        """On the CPU zeros are filled where the value is, once it is known how often it occurs.

        See ``evenly_distribute_backward``: fake tensors multiply the places by the gradient.
        """
        if call.name == "aten::isnan":
            self._rows[scope] = max(self._rows.get(scope, 0), nbytes(call.args[0]))
        filled = self._rows.get(scope, 0)
        if call.name == "aten::sum":
            # Of three marks of each value one is there.
            return Doubt(is_sure=True, taken_bytes=filled - 2 * elements(call.args[0]))
        return Doubt(is_sure=True, taken_bytes=-filled) if call.name == "aten::mul" else None

    def _along(self, call: Call, scope: str) -> Doubt:
        """The zeros are marked and counted, the marks cast for it; then there are two products."""
        count = elements(call.outputs[0])
        if call.name == "aten::ones":
            self._rows[scope] = count
        counted = count + _INDEX_BYTES * self._rows.get(scope, 0)
        if call.name == "aten::cat":
            return Doubt(is_sure=False, taken_bytes=counted + count * _INDEX_BYTES)
        is_sure = call.name == "aten::mul"
        return Doubt(is_sure, taken_bytes=counted if is_sure else 0)

    def _of_all(self, call: Call) -> Doubt:
        """The places of the zeros are looked up: there may be as many as there are values."""
        if call.name == "aten::view":
            x = call.args[0]
            most = elements(x) * (1 + _INDEX_BYTES * x.dim()) + nbytes(x)
            return Doubt(is_sure=True, unknown_bytes=most)
        # The last product alone is the gradient: an operand of the other is made here.
        is_sure = call.name == "aten::mul" and not self._is_doubted(call.args[0])
        return Doubt(is_sure, unknown_bytes=_ONE_PLACE_BYTES)


def _running(call: Call) -> Doubt:
    if call.name == "aten::stack":
        return Doubt(is_sure=False, unknown_bytes=_selected(call))
    finds_zeros = call.name == "aten::eq" and not _is_whole(call.args[0])
    return Doubt(finds_zeros or (call.name in _DIVIDING and not _is_whole(call.outputs[0])))


def _selected(call: Call) -> int:
    """Older releases select by masks, whose places they number: fake tensors stack rows instead.

    At one time there are five tensors, three numbers and five marks of each value, of which the
    fake run has three tensors and one mark; and some more of each row.
    """
    made, row = call.outputs[0], call.args[0][0]
    of_a_value = 2 * int(made.element_size()) + 3 * _INDEX_BYTES + 4
    of_a_row = _INDEX_BYTES + 4 * int(made.element_size()) + 1
    return elements(made) * of_a_value + elements(row) * of_a_row + _ONE_PLACE_BYTES


def _is_whole(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())
