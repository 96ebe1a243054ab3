"""A module's tensors can be swapped while a body is recorded, and after it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from pytest_torchmem import measure
from pytest_torchmem.contexts import gc_paused
from pytest_torchmem.values.results import Peak, Result

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def swapping() -> Iterator[None]:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


def converted() -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, bias=False))
    weights = [id(weight) for weight in model.parameters()]
    model.double()
    assert [id(weight) for weight in model.parameters()] == weights
    model(torch.ones(2, 64, dtype=torch.double)).sum().backward()
    return model


def recorded(swap: bool) -> Result:
    torch.__future__.set_swap_module_params_on_conversion(swap)
    with measure(device="cpu") as body:
        model = nn.Linear(64, 64)
        model.double()
        model(torch.ones(2, 64, dtype=torch.double)).sum().backward()
        del model
    return body.result


def test_a_module_that_is_made_in_the_body_is_converted():
    with measure(device="cpu") as body:
        model = converted()
    weights = sum(weight.nbytes for weight in model.parameters())
    assert body.retained.parameter == body.retained.gradient == weights
    assert body.peak.unknown == 0


def test_a_swap_needs_what_an_assignment_needs():
    swapped, assigned = recorded(True), recorded(False)
    # The old bias lives until the next swap.
    assert swapped.peak.parameter == assigned.peak.parameter + 64 * 8
    assert swapped.peak.gradient == assigned.peak.gradient
    assert swapped.retained == assigned.retained


def test_a_module_from_before_is_converted_in_the_body_and_after_it():
    model = nn.Linear(64, 64)
    with measure(device="cpu") as body:
        model(torch.ones(2, 64)).sum().backward()
        model.zero_grad()
        model.double()
    assert body.peak.parameter >= 64 * 64 * 8
    model.half()
    assert model.weight.dtype == torch.half
    with measure(device="cpu"):
        gc.collect()


def test_between_measurements_no_reference_is_seen_and_no_tensor_is_lost_from_sight() -> None:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> Peak:
        with measure(device="cpu") as body:
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
        return replace(body.peak, time_ns=0)

    step()
    gc.collect()
    expected = step()
    tensors = [*model.parameters(), *(p.grad for p in model.parameters())]
    assert not any(map(torch.utils.weakref.getweakrefs, tensors))
    del tensors
    with gc_paused():
        assert step() == expected


@pytest.mark.parametrize("where", ["in a hook", "in a body", "after it"])
def test_a_tensor_is_swapped_wherever_a_program_does_so(where: str) -> None:
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(3))

    def swap(*_: object) -> None:
        if where == "in a hook":
            torch.utils.swap_tensors(one, other)

    with measure(device="cpu"):
        gc.collect()
        if where == "in a body":
            torch.utils.swap_tensors(one, other)
        leaf = torch.ones(2, requires_grad=True)
        leaf.register_hook(swap)
        (leaf * 2).sum().backward()
    if where == "after it":
        torch.utils.swap_tensors(one, other)
    assert (len(one), len(other)) == (3, 2)


def test_a_tensor_that_the_user_refers_to_weakly_is_refused_as_ever():
    one, other = torch.ones(2), torch.ones(2)
    reference = weakref.ref(one)
    with (
        pytest.raises(RuntimeError, match="weakref"),
        measure(device="cpu"),
    ):
        torch.utils.swap_tensors(one, other)
    assert reference() is one
