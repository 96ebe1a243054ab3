"""What the CUDA caching allocator alone knows: the bytes that were requested.

The profiler reports the size of the block that a request was given. A block is rounded up, and a
large one may keep a tail of up to 1 MiB that was too small to split off, depending on what ran
before. The allocator's own history has each request as it was made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pytest_torchmem.record import torch_api

if TYPE_CHECKING:
    from numpy.typing import NDArray


class AllocatorHistory:
    """The requests made to one device's allocator between each `start` and `stop`.

    Off the GPU, or where somebody else records the history already, there is none: then `requests`
    stays None, and sizes are those of blocks.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._recording = False
        self.requests: list[tuple[int, int]] | None = None

    def start(self) -> None:
        if self._device.type == "cuda" and not torch_api.history_is_recorded():
            torch_api.record_history(True)
            self._recording = True

    def stop(self) -> None:
        """Stop and add to the requests, (address, bytes) in the order they were made."""
        if not self._recording:
            return
        self._recording = False
        try:
            entries = torch_api.history(self._device.index or 0)
        finally:
            torch_api.record_history(False)
        made = [(entry["addr"], entry["size"]) for entry in entries if entry["action"] == "alloc"]
        self.requests = [*(self.requests or ()), *made]


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
    allocations: NDArray[Any],
    order: NDArray[Any],
    device: int,
    requests: Iterable[tuple[int, int]],
) -> None:
    """Fill ``requested_bytes`` of a device's rows; ``order`` sorts the table's rows by time."""
    rows = order[(allocations["device"][order] == device) & (allocations["size_bytes"][order] > 0)]
    allocations["requested_bytes"][rows] = requested_bytes(
        allocations["ptr"][rows].tolist(), allocations["size_bytes"][rows].tolist(), requests
    )
