"""The source of a trace that costs a body the least: the library in C++."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pytest_torchmem.record.native.library import Library
from pytest_torchmem.record.native.row_reader import RowReader
from pytest_torchmem.record.recorded_tables import Tables
from pytest_torchmem.record.torch_api import memory


class NativeObserver:
    """Records by the library; see `observers.Observer`."""

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
