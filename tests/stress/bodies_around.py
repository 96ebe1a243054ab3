"""Bodies that depend on what is around them: fixtures, rubbish, processes, threads, exceptions."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import unittest

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

measured = pytest.mark.memory_budget("1GiB")
CACHE: dict[str, object] = {}


# --- fixtures of every scope -------------------------------------------------------------------


@pytest.fixture(scope="session")
def shared_model():
    torch.manual_seed(0)
    return nn.Linear(32, 32)


@pytest.fixture(scope="module")
def module_batch():
    return torch.ones(16, 32)


@pytest.fixture(scope="class")
def class_model():
    return nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32)).eval()


@pytest.fixture
def big_batch():
    yield torch.ones(64, 32)
    torch.ones(1000)


@measured
def test_a_model_of_the_session(shared_model, module_batch):
    with torch.no_grad():
        shared_model(module_batch)


@measured
def test_the_model_of_the_session_again(shared_model, big_batch):
    shared_model(big_batch).sum().backward()
    shared_model.zero_grad()


@pytest.mark.usefixtures("big_batch")
class TestClass:
    @measured
    def test_forward(self, class_model, module_batch):
        class_model(module_batch)

    def test_region(self, torchmem, class_model, module_batch):
        with torchmem.measure("outer"):
            hidden = class_model(module_batch)
            with torchmem.measure("inner") as inner:
                hidden.exp()
        assert inner.peak.total > 0

    def test_nothing_is_asked_of_this_one(self, class_model, module_batch):
        CACHE["of an unmeasured test"] = class_model(module_batch)


class TestCase(unittest.TestCase):
    def setUp(self) -> None:
        self.model = nn.Linear(16, 16)

    @measured
    def test_method(self):
        self.model(torch.ones(4, 16)).sum().backward()


# --- memory that was there before --------------------------------------------------------------


@pytest.fixture
def graph():
    weight = torch.ones(64, 64, requires_grad=True)
    return weight, (weight.exp() * 2).exp().sum()


@measured
def test_backward_through_a_graph_of_the_fixture(graph):
    graph[1].backward()
    torch.ones(64, 64)


@pytest.fixture
def held():
    return [torch.ones(5000), torch.ones(5000)]


@measured
def test_the_fixtures_tensors_are_freed_after_use(held):
    held.pop().sum()
    held.clear()
    torch.ones(5000)


@measured
def test_the_fixtures_tensors_are_freed_unused(held):
    held.clear()
    torch.ones(5000)


@measured
def test_an_old_tensor_is_seen_when_it_dies_and_its_place_is_used_again(held):
    for _ in range(5):
        held[0] = held[0] * 2


@measured
def test_a_cache_in_the_module_keeps_memory():
    CACHE["kept"] = [torch.ones(1000) for _ in range(3)]


# --- rubbish, exceptions -----------------------------------------------------------------------


class Cycle:
    def __init__(self, size: int) -> None:
        self.tensor = torch.ones(size)
        self.me = self


@pytest.fixture
def collecting():
    was_on = gc.isenabled()
    gc.enable()
    yield
    if not was_on:
        gc.disable()


@measured
@pytest.mark.usefixtures("collecting")
def test_cycles_wait_for_the_collector():
    for _ in range(50):
        Cycle(1000)
        [[] for _ in range(100)]


@measured
def test_the_collector_is_off_in_the_body():
    was_on = gc.isenabled()
    gc.disable()
    try:
        for _ in range(5):
            Cycle(1000)
        gc.collect()
        torch.ones(2000)
    finally:
        if was_on:
            gc.enable()


@measured
@pytest.mark.xfail(raises=ValueError)
def test_an_exception_pins_its_tensors():
    pinned = torch.ones(1000)
    raise ValueError(pinned.sum())


@measured
def test_an_exception_is_handled():
    try:
        torch.ones(3) @ torch.ones(4)
    except RuntimeError as error:
        CACHE["error"] = error
    torch.ones(100)


def test_a_failure_pins_its_tensors():
    pinned = torch.ones(123_456)
    assert pinned.sum() < 0


@measured
def test_a_profiler_of_ones_own():
    with torch.profiler.profile():
        torch.ones(1000)


# --- threads and processes ---------------------------------------------------------------------


@measured
def test_another_thread_computes():
    def work() -> None:
        (torch.ones(200, requires_grad=True) * 2).sum().backward()

    thread = threading.Thread(target=work, name="worker")
    torch.ones(100)
    thread.start()
    thread.join()
    torch.ones(300)


@measured
def test_a_subprocess():
    torch.ones(1000)
    subprocess.run([sys.executable, "-c", "pass"], check=True)


@measured
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_in_the_body():
    x = torch.ones(1000)
    child = os.fork()
    if child == 0:
        x.add_(1)
        torch.ones(5000)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert x[0] == 1


@measured
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader(workers):
    data = TensorDataset(torch.arange(64.0).reshape(16, 4))
    model = nn.Linear(4, 4)
    for (batch,) in DataLoader(data, batch_size=4, num_workers=workers):
        model(batch).sum().backward()
