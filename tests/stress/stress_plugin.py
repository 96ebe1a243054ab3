"""What is done to the bodies: another order, rubbish between them, the collector off."""

from __future__ import annotations

import gc
import random
from collections.abc import Generator

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, default=0, help="seed of the order; 0: as written")
    parser.addoption("--rubbish", action="store_true", help="leave rubbish before every test")
    parser.addoption("--no-collector", action="store_true", help="switch the collector off")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.no_collector:
        gc.disable()
    if config.option.rubbish:
        config.pluginmanager.register(Rubbish())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.shuffle:
        random.Random(config.option.shuffle).shuffle(items)


class Rubbish:
    """Leaves behind what tests leave behind: cycles, graphs, tensors in globals, grown heaps."""

    def __init__(self) -> None:
        self._random = random.Random(1)
        self._kept: list[object] = []

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None, object, object]:
        self._litter()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        self._litter()
        return (yield)

    def _litter(self) -> None:
        size = self._random.randrange(1, 20_000)
        weight = torch.ones(size, requires_grad=True)
        cycle: list[object] = [weight.exp().exp()]
        cycle.append(cycle)
        model = torch.nn.Linear(8, 8)
        model(torch.ones(4, 8)).sum().backward()
        self._kept += [torch.ones(size), (weight * 2).exp().sum(), model, [[] for _ in range(size)]]
        # Holes in the heap: what comes next lies at an address that somebody else had.
        del self._kept[self._random.randrange(len(self._kept))]
