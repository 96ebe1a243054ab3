"""Numbers that a program reads from fake tensors, and that nobody knows.

Most programs read their loss to show it, and nothing of their memory depends on it. So a read gives
an `UnknownNumber`, which can be added up and shown; what decides by it is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NoReturn

import torch

from pytest_torchmem.record.patches import Installed
from pytest_torchmem.record.torch_api import fake_tensors
from pytest_torchmem.values.errors import EstimateError

READ: Final = (
    "values of tensors are read: they show as nan, and what decides by one of them is refused"
)
SCALED: Final = "no gradient is taken to be infinite, so that the scaler lets the optimizer step"
_PICKLED: Final = (
    "the program pickles tensors (torch.save, pickle, a queue to another process), whose bytes an "
    "estimate has not; leave that out, or measure with pytest_torchmem.measure"
)


class UnknownValueError(Exception):
    """The program decides by a number that nobody knows."""


class UnknownNumber(float):
    """A number of a fake tensor. What is computed from it is as unknown."""

    def __new__(cls) -> UnknownNumber:
        # What C computes from it stays finite.
        return super().__new__(cls, 1.0)

    def __repr__(self) -> str:
        return "nan"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(math.nan, spec)

    def __reduce__(self) -> tuple[type[UnknownNumber], tuple[()]]:
        return UnknownNumber, ()

    __hash__ = float.__hash__


def _unknown(self: UnknownNumber, *_: object) -> UnknownNumber:
    return UnknownNumber()


def _decided(self: UnknownNumber, *_: object) -> NoReturn:
    raise UnknownValueError("a number that was read from a tensor decides something")


def _rounded(self: UnknownNumber, digits: int | None = None) -> UnknownNumber:
    return UnknownNumber() if digits is not None else _decided(self)


_BINARY: Final = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
for _name in (*_BINARY, *(f"r{name}" for name in _BINARY), "neg", "pos", "abs"):
    setattr(UnknownNumber, f"__{_name}__", _unknown)
_DECIDING: Final = ("eq", "ne", "lt", "le", "gt", "ge", "bool", "int", "index", "trunc")
for _name in (*_DECIDING, "floor", "ceil"):
    setattr(UnknownNumber, f"__{_name}__", _decided)
UnknownNumber.__round__ = _rounded  # type: ignore[method-assign,assignment]


def let_values_be_shown(patches: Installed, notes: set[str]) -> None:
    """Let ``tensor.item()`` of a fake tensor give an `UnknownNumber`, and a tensor be formatted."""

    def reading(item: Callable[[torch.Tensor], object]) -> Callable[[torch.Tensor], object]:
        def read(self: torch.Tensor) -> object:
            known = fake_tensors.constant_of(self) is not None
            if known or self.numel() != 1 or self.dtype == torch.bool or self.is_complex():
                return item(self)
            try:
                # An optimizer gets a number that stands in.
                return item(self)
            except fake_tensors.value_errors():
                notes.add(READ)
                return UnknownNumber()

        return read

    def formatting(plain: Callable[[torch.Tensor, str], str]) -> Callable[[torch.Tensor, str], str]:
        def shown(self: torch.Tensor, spec: str) -> str:
            return format(self.item(), spec) if spec and not self.dim() else plain(self, spec)

        return shown

    def step(
        _: object, optimizer: torch.optim.Optimizer, _state: object, *args: object, **kwargs: object
    ) -> object:
        notes.add(SCALED)
        take: Callable[..., object] = optimizer.step
        return take(*args, **kwargs)

    def pickling(_: object, protocol: object) -> NoReturn:
        raise EstimateError(_PICKLED)

    patches.replace(fake_tensors.PICKLE, lambda _: pickling)
    patches.replace(fake_tensors.COPY, fake_tensors.copying)
    patches.replace(fake_tensors.ITEM, reading)
    patches.replace(fake_tensors.FORMAT, formatting)
    patches.replace(fake_tensors.SCALER_STEP, lambda _: step)
