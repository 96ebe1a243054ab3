"""Requested bytes, which the CUDA caching allocator alone knows.

The profiler reports the size of the block that a request was given. A block is rounded up, and a
large one may keep a tail of up to 1 MiB that was too small to split off, depending on what ran
before. The allocator's own history has each request as it was made.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pytest_torchmem.record.torch_api import allocator

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One allocation or free in the allocator's history.

    Attributes:
        size_bytes: What was requested, also where it is freed.
        time_ns: When, on the profiler's clock, in steps of a microsecond.
    """

    is_allocation: bool
    pointer: int
    size_bytes: int
    time_ns: int


class AllocatorHistory:
    """Reads the requests that one device's allocator got while the profiler ran.

    Somebody else's recording is used as it is, and left on. Off the GPU there is none: then
    `requests` stays None, and sizes are those of blocks.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._reads = False
        self._switched_on = False
        self._since_us = self._until_us = 0
        self.requests: list[tuple[int, int]] | None = None

    def start(self) -> None:
        self._reads = self._device.type == "cuda"
        if self._reads and not allocator.history_is_recorded():
            allocator.record_history(True)
            self._switched_on = True

    def begin(self) -> None:
        """Note that a session of the profiler begins; what came before is none of its entries."""
        self._since_us = time.time_ns() // 1000

    def end(self) -> None:
        """Note that the session ends; what comes now is none of its entries."""
        self._until_us = time.time_ns() // 1000

    def read(self) -> list[HistoryEntry]:
        """Return the entries between `begin` and `end`; `requests` gets the requests of them."""
        if not self._reads:
            return []
        entries = [
            HistoryEntry(
                entry["action"] == "alloc", entry["addr"], entry["size"], entry["time_us"] * 1000
            )
            for entry in allocator.history(self._device.index or 0)
            if entry["action"] in ("alloc", "free_requested")
            and self._since_us <= entry["time_us"] <= self._until_us
        ]
        made = [(entry.pointer, entry.size_bytes) for entry in entries if entry.is_allocation]
        self.requests = [*(self.requests or ()), *made]
        return entries

    def made_and_kept(self) -> int:
        """Return the bytes asked for between `begin` and `end` that were not freed in between."""
        alive: dict[int, int] = {}
        for entry in self.read():
            if entry.is_allocation:
                alive[entry.pointer] = entry.size_bytes
            else:
                alive.pop(entry.pointer, None)
        return sum(alive.values())

    def stop(self) -> None:
        """Leave the history as it was found."""
        self._reads = False
        if self._switched_on:
            self._switched_on = False
            allocator.record_history(False)


def requested_bytes(
    pointers: Sequence[int], blocks: Sequence[int], requests: Iterable[tuple[int, int]]
) -> list[int]:
    """Return the bytes requested by each allocation, in the order they happened.

    ``pointers`` and ``blocks`` are the allocations' addresses and block sizes, ``requests`` the
    allocator's history as (address, bytes). The n-th allocation at an address is its n-th request.
    Where the two do not tell the same story of an address, its allocations get 0: not known.
    """
    asked: dict[int, list[int]] = defaultdict(list)
    for address, size_bytes in requests:
        asked[address].append(size_bytes)
    given: dict[int, list[int]] = defaultdict(list)
    for index, pointer in enumerate(pointers):
        given[pointer].append(index)
    result = [0] * len(pointers)
    for pointer, indices in given.items():
        sizes = asked.get(pointer, [])
        fits = all(size <= blocks[index] for size, index in zip(sizes, indices, strict=False))
        if len(sizes) == len(indices) and fits:
            for size, index in zip(sizes, indices, strict=True):
                result[index] = size
    return result


def fill_requested(
    allocations: NDArray[np.void],
    order: NDArray[np.int64],
    device: int,
    requests: Iterable[tuple[int, int]],
) -> None:
    """Fill ``requested_bytes`` of a device's rows; ``order`` sorts the table's rows by time."""
    rows = order[(allocations["device"][order] == device) & (allocations["size_bytes"][order] > 0)]
    allocations["requested_bytes"][rows] = requested_bytes(
        allocations["ptr"][rows].tolist(), allocations["size_bytes"][rows].tolist(), requests
    )
