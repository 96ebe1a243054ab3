"""Programs whose estimate is what a measurement of the same step shows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pytest_torchmem import estimate, measure
from pytest_torchmem.values.errors import EstimateError

# What C++ wraps Python numbers in.
SCALARS = 512

Step = Callable[[], Any]


def difference(step: Step) -> int:
    """By how many bytes the estimate of a warm step differs from its measured peak."""
    step()
    estimated = estimate(step, backward=False).peak.total
    with measure() as window:
        held = step()
    del held
    return estimated - window.result.peak.total


def training(parameters: Any, loss_of: Step) -> Step:
    optimizer = torch.optim.AdamW(parameters)

    def step() -> None:
        optimizer.zero_grad()
        loss_of().backward()
        optimizer.step()

    return step


def test_gradients_of_a_layer_that_is_used_three_times_are_added_up_as_autograd_does():
    layer, x = nn.Linear(64, 512), torch.randn(8, 64)
    step = training(layer.parameters(), lambda: sum(layer(x).square().mean() for _ in range(3)))
    assert abs(difference(step)) <= SCALARS


def test_gradients_that_only_die_in_the_step_are_there_until_then():
    maker, judge, x = nn.Linear(64, 512), nn.Linear(512, 64), torch.randn(8, 64)
    of_maker, of_judge = (torch.optim.Adam(m.parameters()) for m in (maker, judge))

    def step() -> None:
        made = maker(x)
        of_judge.zero_grad()
        judge(made.detach()).mean().backward()
        of_judge.step()
        of_maker.zero_grad()
        judge(made).mean().backward()
        of_maker.step()

    assert abs(difference(step)) <= SCALARS


class Holder:
    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight


class Slotted:
    __slots__ = ("weight",)

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight


def loss_over(x: torch.Tensor, weight_of: Callable[[], torch.Tensor]) -> Step:
    return lambda: (x @ weight_of()).square().mean()


def in_closure(weight: torch.Tensor) -> Step:
    return lambda: weight


def in_default(weight: torch.Tensor) -> Step:
    def weight_of(own: torch.Tensor = weight) -> torch.Tensor:
        return own

    return weight_of


def in_list(weight: torch.Tensor) -> Step:
    held = [weight]
    return lambda: held[0]


def in_tuple(weight: torch.Tensor) -> Step:
    held = (weight,)
    return lambda: held[0]


def in_object(weight: torch.Tensor) -> Step:
    held = Holder(weight)
    return lambda: held.weight


def in_slots(weight: torch.Tensor) -> Step:
    held = Slotted(weight)
    return lambda: held.weight


def in_partial(weight: torch.Tensor) -> Step:
    return functools.partial(torch.Tensor.view_as, weight, weight)


@pytest.mark.parametrize("held", [in_closure, in_default, in_list, in_tuple, in_object])
def test_the_optimizer_sees_the_gradient_of_a_leaf_wherever_the_program_holds_it(held):
    weight, x = torch.randn(256, 256, requires_grad=True), torch.randn(64, 256)
    step = training([weight], loss_over(x, held(weight)))
    assert abs(difference(step)) <= SCALARS
    assert type(weight.grad) is torch.Tensor


@pytest.mark.parametrize("held", [in_slots, in_partial])
def test_a_leaf_that_nobody_can_replace_is_refused_in_words(held):
    weight, x = torch.randn(256, 256, requires_grad=True), torch.randn(64, 256)
    step = training([weight], loss_over(x, held(weight)))
    step()
    with pytest.raises(EstimateError, match="holds where nobody can replace it"):
        estimate(step, backward=False)
    step()
    assert type(weight.grad) is torch.Tensor
