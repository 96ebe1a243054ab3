"""The choice of what records: the library in C++, or torch's profiler where that cannot be had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from pytest_torchmem.record.native.choice import Choice
from pytest_torchmem.record.native.native_source import NativeSource
from pytest_torchmem.record.profiled.profiled_source import ProfiledSource
from pytest_torchmem.record.tables import StringTable, Tables
from pytest_torchmem.values.errors import RecordingError
from pytest_torchmem.values.trace import MARK


class Source(Protocol):
    """Notes operators, memory and the Python around them, between `begin` and `end`.

    Attributes:
        strings, device_names: The numbers of texts and devices in the tables.
    """

    strings: StringTable
    device_names: StringTable

    def prepare(self) -> None: ...
    def now_ns(self) -> int: ...
    def begin(self) -> None: ...
    def mark(self, number: int, /) -> object: ...
    def pause(self) -> None: ...
    def go_on(self) -> None: ...
    def end(self) -> None: ...
    def read(self, marks: NDArray[np.void], /) -> Tables: ...
    def let_go(self) -> None: ...
    def sees_end(self, storage: torch.UntypedStorage, /) -> bool: ...


def source_for(device: torch.device, say: Callable[[str], None] = lambda _: None) -> Source:
    """Return what records a body on a device: the library knows the CPU and CUDA.

    ``say`` is called before the library is compiled, which happens once.
    """
    library = Choice.of_process(say).library_for(device.type, say)
    return NativeSource(library) if library else ProfiledSource()


def frees_during(action: Callable[[], object]) -> list[tuple[str, int]] | None:
    """Return the places that an action frees; None where nobody can tell."""
    source = source_for(torch.device("cuda" if torch.cuda.is_initialized() else "cpu"))
    try:
        source.prepare()
        source.begin()
    except RecordingError:
        action()
        return None
    try:
        action()
    finally:
        source.end()
    try:
        allocations = source.read(np.empty(0, MARK)).allocations
    finally:
        source.let_go()
    names = source.device_names.values()
    freed = allocations["size_bytes"] <= 0
    devices, pointers = allocations["device"][freed], allocations["ptr"][freed]
    return [(names[d], p) for d, p in zip(devices.tolist(), pointers.tolist(), strict=True)]
