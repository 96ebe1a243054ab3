"""The observers: the library in C++, or torch's profiler where that cannot be had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from pytest_torchmem.record.native.choice import Choice
from pytest_torchmem.record.native.library import Library
from pytest_torchmem.record.native.row_reader import RowReader
from pytest_torchmem.record.recorded_tables import StringTable, Tables
from pytest_torchmem.record.torch_api import memory
from pytest_torchmem.values.errors import RecordingError
from pytest_torchmem.values.trace import MARK


class Observer(Protocol):
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
    def read(self, marks: NDArray[np.void], known: NDArray[np.uint64], /) -> Tables: ...
    def let_go(self) -> None: ...
    def sees_end(self, storage: torch.UntypedStorage, /) -> bool: ...


class NativeObserver:
    """Records by the library in C++, which costs a body the least."""

    def __init__(self, library: Library) -> None:
        self._library, self._columns = library, RowReader(library)
        self.strings, self.device_names = self._columns.strings, self._columns.device_names
        # Straight to C: a function of ours around each would take as long.
        self.now_ns: Any = library.now_ns
        self.mark: Any = library.mark
        self.pause: Any = library.pause
        self.go_on: Any = library.go_on
        self.let_go: Any = library.let_go
        self.prepare: Any = library.prepare
        self.begin: Any = library.begin
        self.end: Any = library.end

    def sees_end(self, storage: torch.UntypedStorage) -> bool:
        """Return whether the recording will have the end of a storage that is there already.

        A GPU's allocator tells of all. The CPU's does since the library was loaded.
        """
        return storage.device.type == "cuda" or bool(
            self._library.sees_end(memory.address_of(storage))
        )

    def read(self, marks: NDArray[np.void], known: NDArray[np.uint64]) -> Tables:
        """Return all that was recorded, and fill where the marks stand.

        ``known`` are the places of storages on the CPU that were there at the start.
        """
        tables = self._columns.read(known)
        placed, rows = self._columns.placed.T
        marks["event"][placed] = rows
        marks["time_ns"][placed] = tables.events["start_ns"][rows]
        return tables


def observer_for(device: torch.device, say: Callable[[str], None] = lambda _: None) -> Observer:
    """Return what records a body on a device: the library knows the CPU and CUDA.

    ``say`` is called before the library is compiled, which happens once.
    """
    library = Choice.of_process(say).library_for(device.type, say)
    if library:
        return NativeObserver(library)
    from pytest_torchmem.record.profiled.profiled_observer import ProfiledObserver

    return ProfiledObserver()


def slower_because() -> str:
    """Return why torch's profiler measures in this process; "" where the library does."""
    choice = Choice.of_process()
    return "" if choice.library else "; ".join(choice.reasons)


def frees_during(action: Callable[[], object]) -> list[tuple[str, int]] | None:
    """Return the places that an action frees; None where nobody can tell."""
    has_gpu: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    observer = observer_for(torch.device("cuda" if has_gpu else "cpu"))
    try:
        observer.prepare()
        observer.begin()
    except RecordingError:
        action()
        return None
    try:
        action()
    finally:
        observer.end()
    try:
        allocations = observer.read(np.empty(0, MARK), np.empty(0, np.uint64)).allocations
    finally:
        observer.let_go()
    names = observer.device_names.values()
    freed = allocations["size_bytes"] <= 0
    devices, pointers = allocations["device"][freed], allocations["ptr"][freed]
    return [(names[d], p) for d, p in zip(devices.tolist(), pointers.tolist(), strict=True)]
