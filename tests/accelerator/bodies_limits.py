"""Tests with limits on memdev; test_memdev.py says what becomes of each."""

from __future__ import annotations

import os

import memdev_device
import pytest
import torch
from torch import nn

from pytest_torchmem.values.units import KiB


def ones(size_bytes: int) -> torch.Tensor:
    return torch.ones(size_bytes // 4, device="memdev")


@pytest.fixture
def model(torchmem):
    return nn.Sequential(nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 32)).to(torchmem.device)


@pytest.mark.memory_budget(
    "200KiB", parameter="40KiB", activation="20KiB", unknown=0, growth=0, reserved="1MiB"
)
def test_training_within_its_limits(torchmem, model):
    assert torchmem.device == "memdev:0"
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(16, 96, device=torchmem.device)
    for _ in torchmem.steps(4, warmup=1):
        with torchmem.measure("forward") as forward:
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert forward.retained.activation > 0


@pytest.mark.memory_budget(activation="1KiB")
def test_too_much_activation(model):
    model(ones(32 * 96 * 4).view(32, 96)).square().mean().backward()


CACHE = {}


@pytest.fixture(autouse=True, scope="module")
def tidy():
    yield
    CACHE.clear()


@pytest.mark.memory_budget(retained="1KiB")
def test_something_is_kept():
    CACHE["last"] = ones(40 * KiB)


@pytest.mark.memory_budget(growth=0)
def test_growth(torchmem):
    kept = [ones(8 * KiB) for _ in torchmem.steps(4, warmup=1)]
    assert kept


@pytest.mark.memory_budget("10KiB")
def test_nothing_on_the_device():
    torch.ones(100)


@pytest.mark.memory_budget("1MiB")
def test_out_of_memory(torchmem):
    memdev_device.set_capacity(100 * KiB)
    try:
        torch.accelerator.empty_cache()
        held = ones(50 * KiB)
        torch.relu(ones(80 * KiB))
        del held
    finally:
        memdev_device.set_capacity(2**40)


@pytest.mark.memory_budget("1MiB", device="memdev:7")
def test_a_device_that_is_missing():
    raise AssertionError("must not run")


@pytest.mark.memory_budget(active="1MiB")
def test_a_counter_that_says_nothing(torchmem):
    ones(KiB)
    memdev_device.set_honesty(counts_all=False)


@pytest.mark.memory_baseline(tolerance=0, floor=0)
def test_baseline(torchmem):
    memdev_device.set_honesty()
    held = ones(20 * KiB)
    if os.environ.get("GROWN"):
        torch.relu(held)
