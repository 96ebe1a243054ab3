"""torch's own allocator history, as requests.

``torch.cuda.memory._record_memory_history()`` keeps a list of entries per device, which
``_snapshot()["device_traces"]`` hands out. Replaying the requests in it answers what the same
program would have reserved under other settings or on a smaller device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final, TypedDict

import numpy as np
from numpy.typing import NDArray

from pytest_torchmem.analysis.caching_allocator.layout import BlockState, PlacedSegment
from pytest_torchmem.analysis.caching_allocator.requests import Request, RequestLog, Requests

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

    Blocks from before the history are left out, with their frees: what they held is missing from
    every count.

    Attributes:
        requests: What was asked for. Keys are numbered in order of allocation.
        address: int64, shape (T,); where the block of an allocation was, 0 for other requests.
        segment_addresses: What successive calls of cudaMalloc returned.
        row_count: int64, shape (E,); how many requests were made up to and with each entry.
        refused: Allocations that failed for want of memory; they are not among the requests.
    """

    requests: Requests
    address: NDArray[np.int64]
    segment_addresses: tuple[int, ...]
    row_count: NDArray[np.int64]
    refused: tuple[Refusal, ...]

    @property
    def requests_and_refused(self) -> Requests:
        """The requests and what was refused, each of these given back at once."""
        rows = [refusal.row for refusal in self.refused for _ in range(2)]
        free_key = int(self.requests.key.max(initial=0)) + 1
        sizes = [size for refusal in self.refused for size in (refusal.size_bytes, 0)]
        requests = Requests.from_columns(
            np.arange(len(rows)) % 2 == 0,
            np.array(sizes, np.int64),
            free_key + np.arange(len(rows)) // 2,
            np.array([refusal.stream for refusal in self.refused for _ in range(2)], np.int64),
        )
        return self.requests.with_rows(rows, requests)


@dataclass(frozen=True, slots=True)
class Refusal:
    """An allocation that the device had no memory for.

    Attributes:
        row: How many requests were made before it.
        entry: Its number in the history, from 0 on.
        size_bytes: What was asked for.
        stream: The stream that it was asked for.
    """

    row: int
    entry: int
    size_bytes: int
    stream: int


@dataclass(slots=True)
class _Reader:
    """Writes the requests down. ``live`` and ``waiting`` have the keys of blocks, by address."""

    live: dict[int, int]
    waiting: dict[int, int]
    pools: Pools
    log: RequestLog = field(default_factory=RequestLog)
    keys: Iterator[int] = field(default_factory=count)

    def take(self, entry: TraceEntry, action_before: str, after: TraceEntry | None) -> None:
        match entry["action"]:
            case "alloc":
                pool = number_of_pool(entry.get("pool_id"), self.pools)
                self.log.scopes = [(pool, frozenset())] if pool else []
                key = self.live[entry["addr"]] = next(self.keys)
                self.log.alloc(key, entry["size"], entry["stream"])
            case "free_requested" if (freed := self.live.pop(entry["addr"], None)) is not None:
                self.free(entry["addr"], freed, after)
            case "free_completed" if (done := self.waiting.pop(entry["addr"], None)) is not None:
                self.log.block_done(done)
            case "segment_free" | "segment_unmap" if action_before not in _GIVES_BACK:
                self.log.empty_cache()

    def free(self, address: int, key: int, after: TraceEntry | None) -> None:
        """Free at once, unless the next entry is of something else than the free's completion."""
        completion = ("free_completed", address)
        if after is not None and (after["action"], after.get("addr")) != completion:
            self.log.record_stream(key, _SOME_OTHER_STREAM)
            self.waiting[address] = key
        self.log.free(key)


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
    blocks = [block for segment in start for block in segment.blocks]
    reader = _Reader(
        live={b.address: b.key for b in blocks if b.state is BlockState.IN_USE},
        waiting={b.address: b.key for b in blocks if b.state is BlockState.WAITING},
        pools=default_pools() if pools is None else pools,
    )
    actions = [entry["action"] for entry in entries]
    row_count, refused = list[int](), list[Refusal]()
    around = zip(entries, ["", *actions], [*entries[1:], None], strict=False)
    for number, (entry, before, after) in enumerate(around):
        reader.take(entry, before, after)
        row_count.append(len(reader.log.rows))
        if entry["action"] == "oom":
            refused.append(
                Refusal(row_count[-1], number, entry.get("size", 0), entry.get("stream", 0))
            )
    requests = reader.log.requests()
    address = np.zeros(len(requests), dtype=np.int64)
    address[requests.kind == Request.ALLOC] = _addresses(entries, "alloc")
    return History(
        requests=requests,
        address=address,
        segment_addresses=tuple(_addresses(entries, "segment_alloc")),
        row_count=np.array(row_count, dtype=np.int64),
        refused=tuple(refused),
    )


def _addresses(entries: Sequence[TraceEntry], action: str) -> list[int]:
    return [entry["addr"] for entry in entries if entry["action"] == action]


def number_of_pool(pool_id: object, pools: Pools) -> int:
    """Return the number of a pool, a new one for a pool that was not met before."""
    key = tuple(pool_id) if isinstance(pool_id, tuple | list) else None
    return pools.setdefault(key, len(pools))
