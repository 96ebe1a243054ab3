"""What a program put in place itself is found at the end of its body."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.measured import measured

pytestmark = pytest.mark.searches(with_optimizers=True)

MiB = 2**20


def test_a_gradient_that_was_put_in_place_by_hand_is_a_gradient() -> None:
    layer = nn.Linear(512, 512, bias=False)

    def body() -> None:
        layer(torch.ones(4, 512)).sum().backward()
        assert layer.weight.grad is not None
        layer.weight.grad = layer.weight.grad * 0.5

    result = measured(body)
    assert result.peak.gradient == 2 * MiB
    assert result.retained.gradient == 1 * MiB


def test_a_main_gradient_is_a_gradient() -> None:
    layer = nn.Linear(512, 512, bias=False)

    def body() -> None:
        layer.weight.main_grad = torch.zeros(512, 512)  # type: ignore[attr-defined]

    assert measured(body).retained.gradient == 1 * MiB


def test_state_that_was_loaded_is_optimizer_state_before_the_first_step() -> None:
    layer = nn.Linear(512, 512, bias=False)
    optimizer = torch.optim.Adam(layer.parameters())

    def body() -> None:
        state = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(512, 512)}
        state["exp_avg_sq"] = torch.zeros(512, 512)
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": {0: state}, "param_groups": groups})

    assert measured(body).retained.optimizer_state >= 2 * MiB


class Keeping(torch.optim.SGD):
    """An optimizer that keeps a buffer in an attribute."""

    def step(self, closure: object = None) -> None:
        self.average = [torch.zeros_like(p) for g in self.param_groups for p in g["params"]]


def test_a_buffer_in_an_attribute_of_an_optimizer_is_optimizer_state() -> None:
    optimizer = Keeping([nn.Parameter(torch.ones(512, 512))], lr=0.1)
    assert measured(optimizer.step).retained.optimizer_state == 1 * MiB
