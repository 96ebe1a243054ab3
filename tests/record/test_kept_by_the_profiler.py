"""What only the profiler keeps, by its weak references, is not told as retained."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap

from pytest_torchmem import measure
from pytest_torchmem.measuring.body_measurement import BodyMeasurement


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))


def compressed() -> None:
    (torch.eye(200).to_sparse_csr() @ torch.ones(200, 3)).sum()


def functional_training() -> None:
    model = mlp()
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    slope = grad(lambda w: functional_call(model, w, (torch.ones(8, 64),)).square().mean())
    weights = {
        name: w - 0.1 * g
        for (name, w), g in zip(weights.items(), slope(weights).values(), strict=True)
    }


def ensemble() -> None:
    models = [mlp() for _ in range(3)]
    weights, buffers = stack_module_state(models)
    base = mlp().to("meta")
    vmap(lambda w, b: functional_call(base, (w, b), (torch.ones(4, 64),)))(weights, buffers)


PROGRAMS = pytest.mark.parametrize("program", [compressed, functional_training, ensemble])


@PROGRAMS
def test_nothing_is_retained(program: Callable[[], None]) -> None:
    program()
    with measure(device="cpu") as body:
        program()
    assert body.peak.total > 0
    assert body.retained.total == 0


@PROGRAMS
def test_nothing_grows_from_step_to_step(program: Callable[[], None]) -> None:
    program()
    measurement = BodyMeasurement("cpu")
    measurement.start()
    for _ in measurement.steps(4, 0):
        with measurement.region("part") as part:
            program()
        assert part.retained.total == 0
    result = measurement.stop()
    assert result.growth == 0


def test_a_range_that_is_left_open_is_left_alone() -> None:
    with measure(device="cpu") as body:
        torch.profiler.record_function("open").__enter__()
        torch.ones(1000)
    assert body.peak.total == 4000
