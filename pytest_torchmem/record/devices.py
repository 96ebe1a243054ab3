"""Devices: which there are, how to settle them, and what their allocators count."""

from __future__ import annotations

import math
import os
import re
from functools import cache
from typing import Any, Final

import torch

from pytest_torchmem.record.torch_api import allocator, autograd, fake_tensors, profiler
from pytest_torchmem.values.errors import DeviceError, DeviceNameError
from pytest_torchmem.values.units import KiB, MiB, device_text


@cache
def device_name(device: torch.device) -> str:
    """``cpu`` or ``cuda:1``; the CPU has one memory, whatever index torch gives it."""
    return "cpu" if device.type == "cpu" else f"{device.type}:{device.index or 0}"


def find_device(name: str | None = None) -> torch.device:
    """Return the device called ``name``; without a name the first GPU that works, else the CPU.

    A device counts as there when it can really allocate: ``torch.cuda.is_available()`` may have
    been patched. ROCm's devices are called ``cuda``; other accelerators are measured where
    ``torch.accelerator`` has counters for them. Raises `DeviceError` for a device that is missing
    or that cannot be measured.

    Asking takes a byte, for which CUDA's allocator reserves 2 MiB and keeps them. Where it had
    reserved nothing, it gives them back, so that they do not count as a body's.
    """
    unused = not _cuda_reserves()
    device = _find_device(name)
    if unused and device.type == "cuda":
        torch.cuda.empty_cache()
    return device


def _find_device(name: str | None) -> torch.device:
    if name is None:
        name = "cpu" if _missing("cuda:0") else "cuda:0"
    device = measurable_device(name)
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda" and not allocator.accelerator_counts(device.type):
        raise DeviceError(
            f"{name} cannot be measured here: torch has no memory statistics of it; cpu, cuda "
            "(ROCm, too) and accelerators that torch.accelerator.memory_stats knows can be"
        )
    device = torch.device(device.type, device.index or 0)
    if problem := _missing(str(device)):
        hint = ""
        if device.type == "cuda" and not torch.cuda.is_available():
            hint = "; --torchmem-simulate=H100 measures on a simulated GPU"
        raise DeviceError(f"{device} is not there: {problem}{hint}")
    _require_counters(device)
    _require_reports(device)
    return device


def _cuda_reserves() -> bool:
    """Return whether CUDA's allocator has reserved memory on any device, and can say so."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    if allocator.allocator_backend(torch.device("cuda")) == _PLUGGABLE:
        return False
    devices = (torch.device("cuda", place) for place in range(torch.cuda.device_count()))
    return any(allocator.memory_stats(d).get("reserved_bytes.all.current") for d in devices)


def named_device(name: str) -> torch.device:
    """Return the device called ``name``, there or not. Raises `DeviceNameError`."""
    name = device_text(name)
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise DeviceNameError(
            f"there is no device called {name!r} on any machine; they are called cpu, cuda, cuda:1"
        ) from error


def measurable_device(name: str) -> torch.device:
    """Return the device called ``name``, there or not.

    Raises `DeviceNameError` for a name that means nothing, and for a device without memory.
    """
    device = named_device(name)
    if device.type == "meta":
        raise DeviceNameError(
            f"{name} cannot be measured: its tensors have no memory; measure on cpu, or on a "
            "simulated GPU with --torchmem-simulate=H100"
        )
    return device


def placed_on(device: str, values: Any) -> Any:
    """Return values with the modules and tensors among them on a device.

    Those on ``meta`` get memory there. A tensor stays the same object where that is possible, as an
    optimizer may know it.
    """

    def placed(value: object) -> object:
        if isinstance(value, torch.nn.Module):
            is_empty = any(t.is_meta for t in (*value.parameters(), *value.buffers()))
            return value.to_empty(device=device) if is_empty else value.to(device)
        if not isinstance(value, torch.Tensor):
            return value
        if value.is_meta:
            return torch.empty_like(value, device=device, requires_grad=value.requires_grad)
        value.data = value.data.to(device)
        return value

    return fake_tensors.map_leaves(placed, values)


def _missing(name: str) -> str | None:
    """Why a byte cannot be allocated on a device; None if it can.

    Some builds of torch end the process for a number that they do not have: it is compared first.
    """
    kind, _, number = name.partition(":")
    if kind == "cuda" and 0 < (count := torch.cuda.device_count()) <= int(number or 0):
        return f"this machine has {count}: {', '.join(f'cuda:{n}' for n in range(count))}"
    try:
        torch.empty(1, dtype=torch.uint8, device=name)
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return None


def _require_counters(device: torch.device) -> None:
    """Raise `DeviceError` for a device whose allocator would report zero for everything."""
    if (backend := allocator.allocator_backend(device)) not in ("", "native"):
        remedy = "take backend out of PYTORCH_CUDA_ALLOC_CONF"
        if backend == _PLUGGABLE:
            remedy = "give it to a torch.cuda.MemPool instead of change_current_allocator"
        raise DeviceError(
            f"{device} cannot be measured: its allocator is {backend}, which does not say what was "
            f"requested; {remedy}"
        )
    byte = torch.empty(1, dtype=torch.uint8, device=device)
    allocated_bytes = allocator.memory_stats(device).get("allocated_bytes.all.current")
    del byte
    if not allocated_bytes:
        raise DeviceError(
            f"{device} cannot be measured: its allocator counts nothing, not even a tensor that is "
            "alive; PYTORCH_NO_CUDA_MEMORY_CACHING or another allocator may stand in its place"
        )


def _require_reports(device: torch.device) -> None:
    """Raise `DeviceError` for a device whose allocator does not tell torch's profiler.

    CUDA's does. Of others it is asked once, and not while somebody else profiles: then nothing can
    be recorded anyway.
    """
    if device.type in ("cuda", *_reporting) or profiler.profiler_is_active():
        return
    session = profiler.Session()
    session.start()
    try:
        torch.empty(1, dtype=torch.uint8, device=device)
    finally:
        allocations = profiler.allocations_in(session.stop())
    if device.type not in {str(change.device.type) for change in allocations}:
        raise DeviceError(
            f"{device} cannot be measured: its allocator counts what it allocates and does not "
            "report it to torch's profiler"
        )
    _reporting.add(device.type)


# The backend's name where a program has put its own allocator in the place of torch's.
_PLUGGABLE: Final = "pluggable"

# Kinds of devices whose allocators are known to tell the profiler.
_reporting: Final[set[str]] = set()


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        allocator.synchronize_device(device)


def settle(device: torch.device) -> None:
    """Bring the device into the state that every measurement starts from.

    Libraries keep their workspaces after the first call. Without them, a body needs the same bytes
    whether or not another one called the library before. Where nobody knows what was requested, the
    sizes of blocks count, and a block that somebody else freed may be larger than one made anew.
    What the engine's thread still holds of the last backward pass is nobody's any more.
    """
    synchronize(device)
    autograd.await_engine(device)
    if device.type == "cuda":
        allocator.cuda_clear_cublas_workspaces()
    elif device.type != "cpu":
        allocator.empty_cache()


def holds_more(device: torch.device) -> bool:
    """Return whether more is allocated than at the last `note_held`, so that garbage may hold it.

    The allocator's counters have what garbage holds: it has to go before a body begins. A full
    collection takes 0.2 s where torch's compiler is imported, and is not made where no test has
    left anything.
    """
    return device.type != "cpu" and _allocated_bytes(device) > _held.get(device, 0)


def note_held(device: torch.device) -> None:
    """Note what is allocated now that garbage was looked for."""
    if device.type != "cpu":
        _held[device] = _allocated_bytes(device)


_held: Final[dict[torch.device, float]] = {}


def _allocated_bytes(device: torch.device) -> float:
    # Where an allocator does not say, garbage may hold anything.
    return allocator.memory_stats(device).get("allocated_bytes.all.current", math.inf)


def workspace_bytes(device: torch.device) -> list[int]:
    """Sizes that the workspaces of cuBLAS and cuBLASLt have on a device; none on the CPU.

    Newer releases of torch say them, and a program may set them. In others,
    ``CUBLAS_WORKSPACE_CONFIG`` is a list of ``:KiB:count``. Without it torch takes 32 MiB on Hopper
    and later, and two of 4 MiB with eight of 16 KiB elsewhere. Releases in which cuBLASLt does not
    use that one give it ``CUBLASLT_WORKSPACE_SIZE`` KiB, or 1 MiB. See
    aten/src/ATen/cuda/CublasHandlePool.cpp.
    """
    if device.type != "cuda":
        return []
    if own_sizes := allocator.cublas_workspace_bytes():
        return own_sizes
    kib = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
    own = KiB * (int(kib if kib.isdecimal() else 0) or 1024)
    pairs = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if pairs:
        return [sum(int(kib) * int(count) for kib, count in pairs) * KiB, own]
    properties = torch.cuda.get_device_properties(device)
    return [32 * MiB if properties.major >= 9 else 2 * 4 * MiB + 8 * 16 * KiB, own]


class CounterReader:
    """The caching allocator's own peaks over a window, in bytes.

    ``empties_cache`` has the allocator give back first what it keeps and nobody uses, so that what
    it reserves in the window does not depend on what ran before.

    Attributes:
        of_footprint: Which of them the footprint is part of. Only CUDA's allocator has a history
            of what was requested; elsewhere the sizes of blocks count.
        before: What each of them said at the start.
        peaks: The peaks between `start` and `stop`; None where there is no such allocator.
    """

    def __init__(self, device: torch.device, *, empties_cache: bool = False) -> None:
        self._device = device
        self._empties_cache = empties_cache
        self.peaks: dict[str, int] | None = None
        self.of_footprint = "requested" if device.type == "cuda" else "allocated"
        self.before: dict[str, int] = {}

    def start(self) -> None:
        if self._device.type != "cpu":
            if self._empties_cache and self._device.type == "cuda":
                torch.cuda.empty_cache()
            allocator.reset_peak_memory_stats(self._device)
            self.before = self._read("current")
            self.before |= allocator.pinned_counters(self._device)

    def stop(self) -> None:
        if self._device.type != "cpu":
            self.peaks = self._read("peak")
            self.peaks |= allocator.pinned_counters(self._device)

    def _read(self, what: str) -> dict[str, int]:
        stats = allocator.memory_stats(self._device)
        names = ("requested", "allocated", "active", "reserved")
        read = {name: int(stats.get(f"{name}_bytes.all.{what}", 0)) for name in names}
        return {**read, "split": int(stats.get(f"inactive_split_bytes.all.{what}", 0))}
