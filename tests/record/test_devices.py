"""Which devices can be measured, and what is said of those that cannot.

A machine without a GPU stands in for one with: torch's own functions are replaced, not ours.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_torchmem.record import devices
from pytest_torchmem.record.devices import (
    CounterReader,
    find_device,
    holds_more,
    note_held,
    synchronize,
)
from pytest_torchmem.values.errors import DeviceError, DeviceNameError

STATS = {
    "allocated_bytes.all.current": 512,
    "requested_bytes.all.current": 100,
    "requested_bytes.all.peak": 300,
    "allocated_bytes.all.peak": 1024,
    "active_bytes.all.peak": 1024,
    "reserved_bytes.all.peak": 2048,
}


def nested(stats: dict[str, int]) -> dict[str, dict[str, dict[str, int]]]:
    """Return the same counters as torch keeps them: by kind, pool and what it says."""
    counters: dict[str, dict[str, dict[str, int]]] = {}
    for key, count in stats.items():
        kind, pool, what = key.split(".")
        counters.setdefault(kind, {}).setdefault(pool, {})[what] = count
    return counters


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What torch says of a GPU; a test may change it."""
    state: dict[str, Any] = {"stats": dict(STATS), "backend": "native", "calls": []}
    empty = torch.empty

    def on_any_device(*size: Any, device: Any = "cpu", **rest: Any) -> torch.Tensor:
        return empty(*size, **rest)

    monkeypatch.setattr(torch, "empty", on_any_device)
    for name in ("reset_peak_memory_stats", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda d, name=name: state["calls"].append((name, d)))
    monkeypatch.setattr(
        torch.cuda, "memory_stats_as_nested_dict", lambda device: nested(state["stats"])
    )
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: state["backend"])
    return state


@pytest.fixture
def xpu(gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    accelerator = SimpleNamespace(
        current_accelerator=lambda: torch.device("xpu"),
        memory_stats=lambda device: gpu["stats"],
        reset_peak_memory_stats=lambda device: gpu["calls"].append(("reset", device)),
        synchronize=lambda device: gpu["calls"].append(("synchronize", device)),
    )
    monkeypatch.setattr(torch, "accelerator", accelerator)
    # A stand-in allocates nothing that the profiler could be told of.
    monkeypatch.setattr(devices, "_reporting", {"xpu"})
    return gpu


@pytest.mark.usefixtures("gpu")
def test_the_first_gpu_is_taken_unless_one_is_named():
    assert find_device() == torch.device("cuda", 0)
    assert find_device("cuda:1") == torch.device("cuda", 1)
    assert find_device("cpu") == torch.device("cpu")


def test_what_the_look_for_a_gpu_reserves_is_given_back_where_nothing_was_reserved(
    gpu, monkeypatch
):
    emptied: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append("cache"))
    find_device("cuda:0")
    assert emptied == ["cache"]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    gpu["stats"]["reserved_bytes.all.current"] = 2048
    find_device("cuda:0")
    assert emptied == ["cache"]
    gpu["stats"]["reserved_bytes.all.current"] = 0
    find_device("cuda:0")
    assert emptied == ["cache", "cache"]


def test_an_allocator_of_the_programs_own_is_named_before_it_is_asked(gpu, monkeypatch):
    def not_supported(device: torch.device) -> dict[str, Any]:
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")

    gpu["backend"] = "pluggable"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", not_supported)
    with pytest.raises(DeviceError, match=r"its allocator is pluggable.*MemPool"):
        find_device("cuda")
    assert find_device("cpu") == torch.device("cpu")


def test_a_device_that_counts_nothing_is_an_error_and_not_the_cpu(gpu):
    gpu["stats"] = {}
    with pytest.raises(DeviceError, match="counts nothing"):
        find_device()
    with pytest.raises(DeviceError, match="counts nothing"):
        find_device("cuda")


def test_an_allocator_that_does_not_tell_is_named(gpu):
    gpu["backend"] = "cudaMallocAsync"
    with pytest.raises(DeviceError, match="cudaMallocAsync"):
        find_device("cuda")


@pytest.mark.usefixtures("gpu")
def test_mps_is_refused():
    with pytest.raises(DeviceError, match="mps cannot be measured"):
        find_device("mps")


def test_an_accelerator_with_counters_is_measured(xpu):
    device = find_device("xpu")
    assert device == torch.device("xpu", 0)
    counters = CounterReader(device)
    counters.start()
    counters.stop()
    synchronize(device)
    assert counters.before["requested"] == 100
    assert counters.peaks == {
        "requested": 300,
        "allocated": 1024,
        "active": 1024,
        "reserved": 2048,
        "split": 0,
    }
    assert [name for name, _ in xpu["calls"]] == ["reset", "synchronize"]


@pytest.mark.usefixtures("xpu")
def test_another_kind_than_the_accelerator_that_is_there_is_refused():
    with pytest.raises(DeviceError, match="hpu cannot be measured"):
        find_device("hpu")


def test_a_device_that_is_missing_is_told_with_torchs_reason():
    with pytest.raises(DeviceError, match="cuda:99 is not there: "):
        find_device("cuda:99")


@pytest.mark.parametrize("name", ["gpu", "cpuu", "", "cuda:x"])
def test_a_name_that_no_device_has_is_a_bad_argument(name):
    with pytest.raises(DeviceNameError, match=r"no device called .*\[bad-argument\]"):
        find_device(name)


def test_a_gpu_holds_more_where_its_allocator_says_so_or_says_nothing(gpu, monkeypatch):
    monkeypatch.setattr(devices, "_held", {})
    cuda, stats = torch.device("cuda"), gpu["stats"]
    assert holds_more(cuda)
    note_held(cuda)
    assert not holds_more(cuda)
    stats["allocated_bytes.all.current"] += 512
    assert holds_more(cuda)
    stats["allocated_bytes.all.current"] = 0
    assert not holds_more(cuda)
    note_held(cuda)
    stats.clear()
    assert holds_more(cuda)
    note_held(torch.device("cpu"))
    assert not holds_more(torch.device("cpu"))


def test_the_cpu_has_no_counters():
    counters = CounterReader(torch.device("cpu"))
    counters.start()
    counters.stop()
    assert counters.peaks is None


def test_a_number_beyond_the_gpus_that_are_there_is_never_asked_for(gpu, monkeypatch):
    """Some builds of torch end the process for it."""

    def ends_the_process(*_: Any, **__: Any) -> None:
        raise SystemExit

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch, "empty", ends_the_process)
    with pytest.raises(DeviceError, match=r"cuda:1 is not there: this machine has 1: cuda:0"):
        find_device("CUDA:1")
