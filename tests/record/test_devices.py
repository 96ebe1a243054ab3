"""Which devices can be measured, and what is said of those that cannot.

A machine without a GPU stands in for one with: torch's own functions are replaced, not ours.
"""

from __future__ import annotations

import errno
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pytest_torchmem.record import devices
from pytest_torchmem.record.devices import (
    CounterReader,
    find_device,
    holds_memory,
    synchronize,
)
from pytest_torchmem.record.torch_api import profiler
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
    }
    assert [name for name, _ in xpu["calls"]] == ["reset", "synchronize"]


@pytest.mark.usefixtures("xpu")
def test_another_kind_than_the_accelerator_that_is_there_is_refused():
    with pytest.raises(DeviceError, match="hpu cannot be measured"):
        find_device("hpu")


def test_an_accelerator_without_counters_is_refused(xpu):
    del torch.accelerator.memory_stats
    with pytest.raises(DeviceError, match="torch has no memory statistics of it"):
        find_device("xpu")


def test_a_device_that_is_missing_is_told_with_torchs_reason():
    with pytest.raises(DeviceError, match="cuda:99 is not there: "):
        find_device("cuda:99")


@pytest.mark.parametrize("name", ["gpu", "cpuu", "", "cuda:x"])
def test_a_name_that_no_device_has_is_a_bad_argument(name):
    with pytest.raises(DeviceNameError, match=r"no device called .*\[bad-argument\]"):
        find_device(name)


def test_a_gpu_holds_memory_unless_its_allocator_says_that_nothing_is_allocated(gpu):
    assert holds_memory(torch.device("cuda"))
    gpu["stats"]["allocated_bytes.all.current"] = 0
    assert not holds_memory(torch.device("cuda"))
    gpu["stats"].clear()
    assert holds_memory(torch.device("cuda"))
    assert not holds_memory(torch.device("cpu"))


def test_the_cpu_has_no_counters():
    counters = CounterReader(torch.device("cpu"))
    counters.start()
    counters.stop()
    assert counters.peaks is None


@pytest.mark.parametrize(
    ("resident_mib", "tensors_mib", "expected_mib"),
    [
        ([100, 101, 102, 103], [0, 0, 0, 0], 3),  # little by little
        ([100, 101, 102, 103], [0, 1, 2, 3], 0),  # tensors
        ([100, 150, 200, 250], [0, 0, 0, 0], 0),  # something at once
        ([100, 103, 101, 103], [0, 0, 0, 0], 3),  # what was given back is taken again
        ([100, 103, 103, 103], [0, 3, 0, 0], 0),  # tensors are gone, and their memory is kept
    ],
)
def test_a_process_grows_by_what_is_neither_of_tensors_nor_there_at_once(
    resident_mib: list[int],
    tensors_mib: list[int],
    expected_mib: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resident, tensors = iter(resident_mib), iter(tensors_mib)
    monkeypatch.setattr(devices, "_private_bytes", lambda: next(resident) << 20)
    monkeypatch.setattr(profiler, "cpu_total", lambda: lambda: next(tensors) << 20)
    growth = devices.HostGrowth()
    for _ in resident_mib:
        growth.look()
    assert growth.size_bytes == expected_mib << 20


def test_a_look_at_a_process_that_may_open_no_more_files_fails_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resident = iter([100, None, 101])

    def private_bytes() -> int:
        if (mib := next(resident)) is None:
            raise OSError(errno.EMFILE, "Too many open files")
        return mib << 20

    monkeypatch.setattr(devices, "_private_bytes", private_bytes)
    monkeypatch.setattr(profiler, "cpu_total", lambda: lambda: 0)
    growth = devices.HostGrowth()
    for _ in range(3):
        growth.look()
    assert growth.size_bytes == 1 << 20


def test_growth_of_others_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    resident = iter([100, 101, 102])
    monkeypatch.setattr(devices, "_private_bytes", lambda: next(resident) << 20)
    monkeypatch.setattr(profiler, "cpu_total", lambda: lambda: 0)
    growth = devices.HostGrowth()
    for counts in (True, False, True):
        growth.look(counts=counts)
    assert growth.size_bytes == 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="its library has another name")
def test_the_total_of_the_cpus_memory_is_what_torch_counts() -> None:
    total, switch = profiler.cpu_total(), profiler.all_threads_switch()
    assert total is not None
    assert switch is not None
    before, was_on = total(), switch.value
    switch.value = True
    held = torch.empty(12_345, dtype=torch.uint8)
    assert total() == before + 12_345
    del held
    switch.value = was_on
    assert total() == before
