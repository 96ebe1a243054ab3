"""Limits on memdev that its counters may answer; test_memdev.py says how often each body runs."""

from __future__ import annotations

import os

import memdev_device
import pytest
import torch

from pytest_torchmem import KiB

RUBBISH = []


@pytest.fixture(autouse=True)
def tidy():
    yield
    RUBBISH.clear()


def ones(size_bytes: int) -> torch.Tensor:
    print("running", os.environ["PYTEST_CURRENT_TEST"])
    return torch.ones(size_bytes // 4, device="memdev")


@pytest.fixture
def rubbish():
    RUBBISH.append(torch.ones(128 * KiB, device="memdev"))


@pytest.mark.memory_budget("100KiB", reserved="1MiB")
def test_counted():
    ones(64 * KiB)


@pytest.mark.memory_budget("100KiB")
@pytest.mark.usefixtures("rubbish")
def test_recorded_because_of_rubbish():
    ones(64 * KiB)


@pytest.mark.memory_budget("100KiB")
def test_recorded_because_it_fails():
    torch.relu(ones(64 * KiB))


@pytest.mark.memory_budget("60100B")
def test_recorded_because_the_block_is_over():
    ones(60_000)
    assert memdev_device.stats()["requested.peak"] <= 60_100


@pytest.mark.memory_budget("100KiB")
def test_counted_though_only_blocks_are():
    memdev_device.set_honesty(counts_all=False)
    ones(64 * KiB)
    memdev_device.set_honesty()


@pytest.mark.memory_budget("100KiB")
def test_out_of_memory_when_counted():
    memdev_device.set_capacity(100 * KiB)
    try:
        torch.relu(ones(64 * KiB))
    finally:
        memdev_device.set_capacity(2**40)
