"""torch's own allocator history, as requests.

``torch.cuda.memory._record_memory_history()`` keeps a list of entries per device, which
``_snapshot()["device_traces"]`` hands out. Replaying the requests in it answers what the same
program would have reserved under other settings or on a smaller device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypedDict

import numpy as np
from numpy.typing import NDArray

from pytest_torchmem.analysis.caching_allocator.layout import BlockState, PlacedSegment
from pytest_torchmem.analysis.caching_allocator.requests import RequestLog, Requests

# The history does not say which stream a block was also used on. One that no program has stands
# for it: all that matters is that the block was not free at once.
_SOME_OTHER_STREAM: Final = -1
_GIVES_BACK: Final = ("segment_free", "segment_unmap")


class StackFrame(TypedDict):
    """A call on the stack, as torch writes it; C++ ones have no file of Python."""

    name: str
    filename: str
    line: int


class TraceEntry(TypedDict, total=False):
    """One entry of torch's history; the keys that are read here."""

    action: str
    addr: int
    size: int
    stream: int
    time_us: int
    pool_id: Sequence[int]
    frames: Sequence[StackFrame]


Pools = dict[tuple[int, ...] | None, int]
"""The number of each pool that torch named; nobody names the default pool before torch 2.5."""


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """The requests found in a history, and what it says of their outcome.

    Attributes:
        requests: What was asked for. Keys are numbered in order of allocation.
        address: int64, shape (T,); where the block of an allocation was, 0 for other requests.
        segment_addresses: What successive calls of cudaMalloc returned.
        row_count: int64, shape (E,); how many requests were made up to and with each entry.
        foreign_free_count: Frees of blocks from before the history. They are left out, and the
            blocks with them: what they held is missing from every count.
        failure_count: Allocations that failed; the history does not hold their requests.
    """

    requests: Requests
    address: NDArray[np.int64]
    segment_addresses: tuple[int, ...]
    row_count: NDArray[np.int64]
    foreign_free_count: int
    failure_count: int


@dataclass(slots=True)
class _Reader:
    log: RequestLog = field(default_factory=RequestLog)
    addresses: dict[int, int] = field(default_factory=dict)
    segment_addresses: list[int] = field(default_factory=list)
    row_count: list[int] = field(default_factory=list)
    live: dict[int, int] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)
    pools: Pools = field(default_factory=dict)
    allocation_count: int = 0
    foreign_free_count: int = 0
    failure_count: int = 0

    def begin_with(self, start: Iterable[PlacedSegment]) -> None:
        """Take note of the blocks that are there before the first entry."""
        for block in (block for segment in start for block in segment.blocks):
            if block.state is BlockState.IN_USE:
                self.live[block.address] = block.key
            elif block.state is BlockState.WAITING:
                self.waiting[block.address] = block.key

    def take_all(self, entries: Sequence[TraceEntry]) -> None:
        action_before = ""
        for position, entry in enumerate(entries):
            action = entry["action"]
            if action == "alloc":
                self.alloc(entry)
            elif action == "free_requested":
                self.free(entry["addr"], at_once=_completes(entries, position))
            elif action == "free_completed":
                self.free_completed(entry["addr"])
            elif action == "segment_alloc":
                self.segment_addresses.append(entry["addr"])
            elif action in _GIVES_BACK and action_before not in _GIVES_BACK:
                self.log.empty_cache()
            self.failure_count += action == "oom"
            self.row_count.append(len(self.log.rows))
            action_before = action

    def alloc(self, entry: TraceEntry) -> None:
        pool = number_of_pool(entry.get("pool_id"), self.pools)
        self.log.scopes = [(pool, frozenset())] if pool else []
        key = self.allocation_count
        self.allocation_count += 1
        self.live[entry["addr"]] = key
        self.addresses[len(self.log.rows)] = entry["addr"]
        self.log.alloc(key, entry["size"], entry["stream"])

    def free(self, address: int, *, at_once: bool) -> None:
        key = self.live.pop(address, None)
        if key is None:
            self.foreign_free_count += 1
            return
        if not at_once:
            self.log.record_stream(key, _SOME_OTHER_STREAM)
            self.waiting[address] = key
        self.log.free(key)

    def free_completed(self, address: int) -> None:
        key = self.waiting.pop(address, None)
        if key is not None:
            self.log.block_done(key)


def default_pools() -> Pools:
    """Return a table that knows the default pool, under number 0."""
    return {(0, 0): 0, None: 0}


def read_history(
    entries: Sequence[TraceEntry], start: Iterable[PlacedSegment] = (), pools: Pools | None = None
) -> History:
    """Return the requests in one device's history, ``_snapshot()["device_traces"][device]``.

    ``start`` is what was there before, see `BackwardsLayout`, whose ``pools`` belong to it. The
    history does not hold calls of ``empty_cache`` as such: memory that went back to the device is
    read as one, which is also what the allocator does before it gives up; what garbage collection
    or ``max_split_size_mb`` gave back earlier cannot be told from it.
    """
    reader = _Reader(pools=default_pools() if pools is None else pools)
    reader.begin_with(start)
    reader.take_all(entries)
    requests = reader.log.requests()
    address = np.zeros(len(requests), dtype=np.int64)
    address[list(reader.addresses)] = list(reader.addresses.values())
    return History(
        requests=requests,
        address=address,
        segment_addresses=tuple(reader.segment_addresses),
        row_count=np.array(reader.row_count, dtype=np.int64),
        foreign_free_count=reader.foreign_free_count,
        failure_count=reader.failure_count,
    )


def _completes(entries: Sequence[TraceEntry], position: int) -> bool:
    """Return whether the free requested here was completed by the very next entry."""
    if position + 1 == len(entries):
        return True
    after = entries[position + 1]
    same_block = after.get("addr") == entries[position]["addr"]
    return bool(after["action"] == "free_completed" and same_block)


def number_of_pool(pool_id: object, pools: Pools) -> int:
    """Return the number of a pool, a new one for a pool that was not met before."""
    key = tuple(pool_id) if isinstance(pool_id, tuple | list) else None
    return pools.setdefault(key, len(pools))
