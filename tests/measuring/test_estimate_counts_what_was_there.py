"""What was there before a program counts in an estimate where it counts in a measurement.

And it ceases to count where the program lets go of its memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pytest_torchmem import estimate, measure
from pytest_torchmem.values.errors import EstimateError

# What C++ wraps Python numbers in.
SCALARS = 64
WEIGHT = 256 * 256 * 4
Step = Callable[[], Any]


def beside(step: Step) -> tuple[int, int]:
    """The estimated and the measured peak of a warm step."""
    step()
    estimated = estimate(step, backward=False).peak.total
    with measure() as window:
        held = step()
    del held
    return estimated, window.result.peak.total


def assert_alike(step: Step) -> int:
    estimated, measured = beside(step)
    assert abs(estimated - measured) <= SCALARS
    return measured


# Storages that a program resizes by hand, as FSDP does.


def test_memory_that_a_program_gives_back_by_hand_is_gone():
    def step():
        first = torch.ones(1 << 18)
        first.untyped_storage().resize_(0)
        return first, torch.ones(1 << 18)

    assert assert_alike(step) == 1 << 20


def test_memory_that_a_program_takes_by_hand_is_copied_from_the_old():
    def step():
        first = torch.ones(1 << 18)
        first.untyped_storage().resize_(1 << 21)
        del first
        return torch.ones(1 << 18)

    assert assert_alike(step) == 3 << 20


class Sharded(nn.Module):
    """Its weights are there while its layers need them, as FSDP has it."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(256, 256) for _ in range(4))
        self.shards = [weight.detach().clone() for weight in self.weights]
        for weight in self.weights:
            weight.untyped_storage().resize_(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight, shard in zip(self.weights, self.shards, strict=True):
            weight.untyped_storage().resize_(WEIGHT)
            weight.copy_(shard)
            x = x @ weight
            weight.untyped_storage().resize_(0)
        return x


def test_weights_that_are_there_for_a_layer_are_counted_one_at_a_time():
    model, x = Sharded(), torch.randn(1, 256)
    with torch.no_grad():
        peak = assert_alike(lambda: model(x))
    assert peak // WEIGHT == 5  # four shards and one weight
    assert model.weights[0].untyped_storage().nbytes() == 0


def test_a_weight_from_before_is_gone_from_where_the_program_lets_go_of_it():
    layer, x = nn.Linear(256, 256, bias=False), torch.randn(8, 256)

    def step():
        with torch.no_grad():
            layer.weight.untyped_storage().resize_(0)
            between = torch.ones(256, 256)
            del between
            layer.weight.untyped_storage().resize_(WEIGHT)
            layer.weight.fill_(1.0)
            return layer(x)

    # On the CPU a recording does not see that the memory goes.
    assert estimate(step, backward=False).peak.total == WEIGHT + 2 * 8 * 256 * 4


def test_a_real_storage_is_never_resized_by_an_estimate():
    real = torch.ones(64)
    held, kept = [real], {real}

    def step(tensors):
        next(iter(tensors)).untyped_storage().resize_(0)
        return torch.ones(64)

    assert estimate(lambda: step(held), backward=False).peak.total
    with pytest.raises(EstimateError, match="resizes the storage of a tensor that it holds"):
        estimate(lambda: step(kept), backward=False)
    assert real.sum() == 64


def test_an_empty_tensor_that_a_program_holds_is_no_reason_to_refuse():
    # torch gives the storage of its fake tensor the size 0 by hand.
    empty, x = torch.empty(0), torch.ones(64)
    assert assert_alike(lambda: torch.cat([empty, x])) == 2 * 64 * 4


# What modules and optimizers hold.


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(64, 64), nn.Linear(64, 64)
        self.register_buffer("table", torch.ones(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


X = torch.randn(8, 64)
LAYER = 64 * 65 * 4


def test_a_module_that_is_called_uses_all_that_its_children_hold():
    model = Halves()
    with torch.no_grad():
        assert assert_alike(lambda: model(X)) == 2 * LAYER + 64 * 64 * 4 + 2 * 8 * 64 * 4
        assert assert_alike(lambda: model.used(X)) == LAYER + 2 * 8 * 64 * 4


def test_gradients_of_a_part_that_is_not_called_are_used_with_it():
    model = Halves()
    model.unused(X).sum().backward()
    with torch.no_grad():
        assert assert_alike(lambda: model(X)) > 3 * LAYER


def test_an_optimizer_uses_the_state_of_what_it_does_not_update():
    model = Halves()
    optimizer = torch.optim.Adam(model.parameters())
    model.unused(X).sum().backward()
    optimizer.step()

    def step():
        optimizer.zero_grad()
        model.used(X).sum().backward()
        optimizer.step()

    assert assert_alike(step) > 7 * LAYER


@pytest.mark.parametrize("transformed", [False, True])
def test_a_module_that_is_called_with_other_parameters_still_holds_its_own(transformed):
    model = nn.Linear(64, 64)
    others = {name: torch.randn(2, *p.shape) for name, p in model.named_parameters()}
    call = torch.func.functional_call

    def step():
        if transformed:
            return torch.vmap(lambda some: call(model, some, (X,)))(others)
        return call(model, {name: t[0] for name, t in others.items()}, (X,))

    with torch.no_grad():
        assert assert_alike(step) > 3 * LAYER


def test_a_module_on_meta_that_is_called_with_other_parameters_has_no_memory():
    model = nn.Linear(256, 256)
    shape = copy.deepcopy(model).to("meta")
    x = torch.randn(16, 256)
    given: dict[str, torch.Tensor] = dict(model.named_parameters())
    assert_alike(lambda: torch.func.functional_call(shape, given, (x,)).sum().backward())


def test_an_optimizer_updates_copies_of_parameters_in_another_type():
    model = nn.Linear(256, 256).bfloat16()
    copies = [p.detach().float() for p in model.parameters()]
    optimizer = torch.optim.SGD(copies, lr=0.1, momentum=0.9, foreach=True, weight_decay=0.1)

    def step() -> None:
        for parameter, kept in zip(model.parameters(), copies, strict=True):
            parameter.grad = torch.ones_like(parameter)
            kept.grad = parameter.grad.float()
            parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()

    assert_alike(step)
    assert all(kept.grad is None for kept in copies)


def test_parameters_that_hooks_alone_hold_are_trained():
    model, low = nn.Linear(256, 256).requires_grad_(False), nn.Linear(256, 256, bias=False)
    model.register_forward_hook(lambda _, given, made: made + low(given[0]))
    x, optimizer = torch.randn(16, 256), torch.optim.SGD(low.parameters(), momentum=0.9)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert_alike(step)


def test_a_module_that_only_an_inner_function_names_is_found():
    def step():
        return (lambda: _INNER(X))()

    run = estimate(step, backward=False).run
    assert {node.module for node in run.graph.nodes if node.makes} >= {"Linear.weight"}
    assert assert_alike(step) == LAYER + 2 * 8 * 64 * 4


_INNER = nn.Linear(64, 64)


# Parts of larger tensors.


@pytest.mark.parametrize("how", ["detached", "made for inference", "of .data"])
def test_of_a_part_of_a_larger_tensor_the_whole_is_kept(how):
    with torch.inference_mode(how == "made for inference"):
        part = torch.randn(1000, 64)[:8]
    if how != "made for inference":
        part = part.detach() if how == "detached" else part.data

    with torch.no_grad():
        assert_alike(lambda: part * 2)
        given = estimate(lambda x: x * 2, part, backward=False)
    assert given.peak.total == 1000 * 64 * 4 + 8 * 64 * 4


def test_parts_of_one_tensor_are_counted_once():
    whole = torch.randn(1000, 64)
    parts = [whole[place : place + 8].detach() for place in range(0, 80, 8)]
    with torch.no_grad():
        assert assert_alike(lambda: [part.sum() for part in parts]) < 1000 * 64 * 4 + 1000
