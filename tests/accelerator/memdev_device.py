"""Importing this makes the device ``memdev`` one of this process: two devices of 64 bits.

``MEMDEV_LIBRARY`` in the environment is the library that `memdev.build` made.
"""

from __future__ import annotations

import ctypes
import os
import types
from typing import Any

import torch

LIBRARY = os.environ["MEMDEV_LIBRARY"]

torch.utils.rename_privateuse1_backend("memdev")
torch.ops.load_library(LIBRARY)
_switches = ctypes.CDLL(LIBRARY)
_module: Any = types.ModuleType("torch.memdev")
_module.device_count = lambda: 2
_module.is_available = lambda: True
_module.current_device = torch.accelerator.current_device_index
torch._register_device_module("memdev", _module)
torch.utils.generate_methods_for_privateuse1_backend()


_switches.memdev_block_size.restype = ctypes.c_size_t


def block_bytes(*tensors: torch.Tensor) -> int:
    """Bytes of the blocks that tensors were given, each of which has one of its own."""
    pointers = (tensor.untyped_storage().data_ptr() for tensor in tensors)
    return sum(_switches.memdev_block_size(ctypes.c_void_p(pointer)) for pointer in pointers)


def set_capacity(size_bytes: int, device: int = 0) -> None:
    """Set the most that a device may reserve, cached blocks included."""
    _switches.memdev_set_capacity(device, ctypes.c_size_t(size_bytes))


def set_honesty(counts: bool = True, counts_all: bool = True, reports: bool = True) -> None:
    """Set whether the counters say anything, whether they say what was requested and is active,
    and whether the profiler is told."""
    _switches.memdev_set_honesty(counts, counts_all, reports)


def stats(device: int = 0) -> dict[str, int]:
    """The device's own counters: current and peak bytes of each kind."""
    return {
        f"{kind}.{what}": torch.accelerator.memory_stats(device)[f"{kind}_bytes.all.{what}"]
        for kind in ("requested", "allocated", "active", "reserved")
        for what in ("current", "peak")
    }
