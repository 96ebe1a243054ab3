"""Memory that only a storage holds, and no tensor."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from pytest_torchmem import measure
from pytest_torchmem.values.errors import LimitError
from tests.measured import measured

pytestmark = [pytest.mark.slow, pytest.mark.searches(with_optimizers=True)]

CACHE: dict[str, object] = {}


@pytest.fixture(autouse=True)
def no_cache() -> Iterator[None]:
    yield
    CACHE.clear()


def test_a_storage_from_before_is_part_of_the_footprint_when_it_is_used():
    storage = torch.ones(1000).untyped_storage()
    with measure(device="cpu") as body:
        torch.empty(0).set_(storage).sum()
    assert body.peak.input == 4000
    assert body.peak.temporary == 4
    assert body.peak.unknown == 0
    assert body.result.blind_spots == ()


def test_a_storage_that_is_not_used_is_no_part_of_it():
    storage = torch.ones(1000).untyped_storage()
    with measure(device="cpu") as body:
        torch.ones(10)
    assert body.peak.total == 40
    assert storage.nbytes() == 4000


def test_the_end_of_a_storage_from_before_is_seen():
    storages = [torch.ones(1000).untyped_storage()]
    with measure(device="cpu") as body:
        torch.empty(0).set_(storages[0]).sum()
        del storages[0]
        torch.ones(900)
    assert body.peak.total == 4004


@pytest.mark.parametrize("kind", ["untyped_storage", "_typed_storage"])
def test_a_storage_that_is_left_behind_has_a_holder(kind):
    told = r"still held by .*test_bare_storages\.CACHE\['last'\]"
    with pytest.raises(LimitError, match=told), measure(device="cpu", retained=0):
        CACHE["last"] = getattr(torch.ones(1000), kind)()


def test_a_storage_in_a_cycle_is_garbage():
    class Holder:
        def __init__(self) -> None:
            self.me = self
            self.storage = torch.ones(1000).untyped_storage()

    gc.disable()
    try:
        told = "freed only by the garbage collector, in a cycle of .*Holder"
        with pytest.raises(LimitError, match=told), measure(device="cpu", retained=0):
            Holder()
    finally:
        gc.enable()


def test_a_storage_that_another_allocator_made_is_told():
    with measure(device="cpu") as body:
        CACHE["bytes"] = torch.frombuffer(bytearray(4096), dtype=torch.uint8).untyped_storage()
    assert body.result.unexplained_bytes == 4096


def test_a_body_that_makes_nothing_but_the_memory_of_another_allocator_is_measured():
    with measure(device="cpu") as body:
        CACHE["bytes"] = torch.frombuffer(bytearray(4096), dtype=torch.uint8)
    assert body.peak.total == 0
    assert body.result.unexplained_bytes == 4096


@pytest.mark.parametrize("keep", [False, True])
def test_a_file_that_is_mapped_counts_by_what_is_read_and_the_rest_is_told(tmp_path, keep):
    path = tmp_path / "weights.pt"
    torch.save({"a": torch.ones(1000), "b": torch.ones(2000)}, path)
    with measure(device="cpu") as body:
        state = torch.load(path, mmap=True)
        state["b"].sum()
        if not keep:
            state.clear()
    assert body.peak.input == 2000 * 4
    assert body.retained.total == (2000 * 4 if keep else 0)
    assert bool(body.result.unexplained_bytes) == bool(body.result.blind_spots) == keep


def test_a_body_without_an_operator_is_measured_beside_a_trained_model() -> None:
    model = torch.nn.Linear(4, 4)
    model(torch.ones(1, 4)).sum().backward()
    assert measured(lambda: model.weight.grad is not None).peak.total == 0
