"""Tensors that are wrappers around others: whose memory it is that they hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

from pytest_torchmem.record.owners.places import storages_of
from tests.measured import measured

pytestmark = pytest.mark.searches(with_optimizers=True)

SIDE = 128
WEIGHT = 4 * SIDE * SIDE


class Wrapper(torch.Tensor):
    """Holds a tensor, and does not say so: it has no ``__tensor_flatten__``."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.keep(inner)

    def keep(self, inner: torch.Tensor) -> None:
        self.inner = inner  # type: ignore[assignment]

    def unwrapped(self) -> torch.Tensor:
        return self.inner  # type: ignore[return-value]

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def unwrapped(value: object) -> object:
            return value.unwrapped() if isinstance(value, Wrapper) else value

        results = func(*tree_map(unwrapped, args), **tree_map(unwrapped, kwargs or {}))
        return tree_map(lambda v: cls(v) if isinstance(v, torch.Tensor) else v, results)


class Slotted(Wrapper):
    __slots__ = ("__hidden", "unset")

    def keep(self, inner: torch.Tensor) -> None:
        self.__hidden = inner

    def unwrapped(self) -> torch.Tensor:
        return self.__hidden


class InParts(Wrapper):
    """Holds its values in two halves."""

    def keep(self, inner: torch.Tensor) -> None:
        halves = inner.reshape(-1).tensor_split(2)
        self.parts = {"halves": [half.clone() for half in halves]}

    def unwrapped(self) -> torch.Tensor:
        return torch.cat(self.parts["halves"]).view(self.shape)


WRAPPERS = (Wrapper, Slotted, InParts)


def sizes_of(tensor: torch.Tensor) -> list[int]:
    return [size_bytes for _, _, size_bytes in storages_of(tensor)]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_is_where_the_tensors_in_its_attributes_are(wrapper: type[Wrapper]):
    assert sum(sizes_of(wrapper(torch.ones(4, 4)))) == 64
    assert sum(sizes_of(wrapper(wrapper(torch.ones(4, 4))))) == 64


def test_wrappers_may_refer_to_each_other():
    one, other = Wrapper(torch.ones(4)), Wrapper(torch.ones(8))
    one.partner, other.partner = other, one  # type: ignore[attr-defined]
    one.self = one  # type: ignore[attr-defined]
    assert sizes_of(one) == [16, 32]


def test_attributes_of_a_tensor_with_data_of_its_own_are_not_its_memory():
    class Labelled(torch.Tensor):
        pass

    images = torch.ones(4).as_subclass(Labelled)
    images.labels = torch.ones(100)  # type: ignore[attr-defined]
    assert sizes_of(images) == [16]


def layer_of(wrapper: type[Wrapper]) -> nn.Linear:
    layer = nn.Linear(SIDE, SIDE, bias=False, device="meta")
    layer.weight = nn.Parameter(wrapper(torch.randn(SIDE, SIDE)))
    return layer


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("made", ["before", "in the body"])
def test_a_parameter_that_is_a_wrapper_owns_what_it_holds(wrapper: type[Wrapper], made: str):
    layer = layer_of(wrapper)

    def body() -> None:
        model = layer if made == "before" else layer_of(wrapper)
        model(wrapper(torch.randn(1, SIDE).repeat(2, 1))).sum().backward()

    peak = measured(body).peak.by_category
    assert peak.parameter == WEIGHT
    assert peak.gradient == WEIGHT
    assert peak.input <= 4 * 4 * SIDE


class Guarded(torch.Tensor):
    """A tensor of a program that forbids to ask for its gradient."""

    @property
    def grad(self) -> torch.Tensor | None:
        raise RuntimeError("nobody asks for my gradient")


def test_a_class_with_a_gradient_of_its_own_stops_no_measurement():
    before = torch.ones(4).as_subclass(Guarded)
    kept = []

    def body() -> None:
        leaf = torch.ones(8).as_subclass(Guarded).requires_grad_()
        (leaf * 2).sum().backward()
        kept.append(leaf)

    assert measured(body).retained.total >= 2 * 8 * 4
    assert type(before) is Guarded


class Silent(torch.Tensor):
    """A tensor of a program that answers nothing, once it is told to."""

    said = True

    def __getattribute__(self, name: str) -> object:
        if Silent.said:
            return super().__getattribute__(name)
        raise RuntimeError(f"nobody asks for my {name}")


def _raising(name: str) -> type[torch.Tensor]:
    def asked(tensor: torch.Tensor) -> object:
        raise ZeroDivisionError(name)

    return type("Raising", (torch.Tensor,), {name: property(asked)})


@pytest.mark.parametrize("name", ["grad_fn", "is_leaf", "device", "layout", "data_ptr"])
def test_a_class_that_raises_when_it_is_asked_stops_no_measurement(name: str):
    before = torch.ones(4).as_subclass(_raising(name))
    kept: list[object] = []

    def body() -> None:
        kept.append(torch.ones(SIDE).as_subclass(_raising(name)))
        weight = torch.ones(SIDE, requires_grad=True)
        kept.append(weight)
        torch.Tensor.sum(weight * 2).as_subclass(_raising(name)).backward()

    assert measured(body).retained.total >= 2 * 4 * SIDE
    del before


def test_a_tensor_that_answers_nothing_stops_no_measurement(monkeypatch: pytest.MonkeyPatch):
    before = torch.ones(4).as_subclass(Silent)
    monkeypatch.setattr(Silent, "said", False)
    kept = []

    assert measured(lambda: kept.append(torch.ones(SIDE))).retained.total == 4 * SIDE
    monkeypatch.setattr(Silent, "said", True)
    assert type(before) is Silent
