"""From requests to bytes over time, and to the question whether they fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytest_torchmem.analysis.caching_allocator.allocator_settings import (
    UNLIMITED_BYTES,
    AllocatorSettings,
)
from pytest_torchmem.analysis.caching_allocator.blocks import DeviceMemory
from pytest_torchmem.analysis.caching_allocator.device import Device, OutOfMemory
from pytest_torchmem.analysis.caching_allocator.layout import PlacedSegment, layout_of, restore
from pytest_torchmem.analysis.caching_allocator.requests import Request, Requests
from pytest_torchmem.values.errors import AllocatorSettingsError, RequestError
from pytest_torchmem.values.results import Counters
from pytest_torchmem.values.units import format_size

_DEFAULTS = AllocatorSettings()
_AT_THE_END: Final = (None, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True, eq=False)
class AllocatorRun:
    """The allocator's counters after each request. All of them are estimated.

    Row t is the state after request t. The counters are those of ``torch.cuda.memory_stats()``.

    Attributes:
        requested_bytes: int64, shape (T,); what the program asked for and was given.
        allocated_bytes: int64, shape (T,); the blocks that hold it.
        active_bytes: int64, shape (T,); with the freed blocks that other streams still use.
        reserved_bytes: int64, shape (T,); what was taken from the device.
        inactive_split_bytes: int64, shape (T,); free parts of segments that are partly in use;
            those of expandable segments are not counted.
        segment_count: int64, shape (T,); segments from cudaMalloc, so no expandable ones.
        address: int64, shape (T,); where the block of an allocation begins. 0 for other requests
            and for allocations that got no block.
        device_alloc_count: Calls of cudaMalloc, or mappings of pages.
        retry_count: How often everything cached was given back to make room.
        out_of_memory: The allocations that failed. The run goes on after one as if the program
            had caught the error; what it says from there on is worth less.
        segment_addresses: Where successive segments began: what cudaMalloc returned, or the ranges
            of expandable segments.
        segments: The layout at the end.
        limit_bytes: What could be reserved; `UNLIMITED_BYTES` when no capacity was given.
        reserved_peak: What was free when the most was reserved; zeros if nothing was.
        start: The counters before the first request.
    """

    requested_bytes: NDArray[np.int64]
    allocated_bytes: NDArray[np.int64]
    active_bytes: NDArray[np.int64]
    reserved_bytes: NDArray[np.int64]
    inactive_split_bytes: NDArray[np.int64]
    segment_count: NDArray[np.int64]
    address: NDArray[np.int64]
    device_alloc_count: int
    retry_count: int
    out_of_memory: tuple[OutOfMemory, ...]
    segment_addresses: tuple[int, ...]
    segments: tuple[PlacedSegment, ...]
    limit_bytes: int
    reserved_peak: ReservedPeak
    start: Counters

    @property
    def peak(self) -> Counters:
        """Each counter's own largest value, as ``memory_stats()`` gives them."""
        start = self.start
        return Counters(
            requested=int(self.requested_bytes.max(initial=start.requested)),
            allocated=int(self.allocated_bytes.max(initial=start.allocated)),
            active=int(self.active_bytes.max(initial=start.active)),
            reserved=int(self.reserved_bytes.max(initial=start.reserved)),
            estimated=True,
            split=int(self.inactive_split_bytes.max(initial=0)),
        )

    @property
    def fragmentation(self) -> float:
        """See `ReservedPeak.fragmentation`."""
        return self.reserved_peak.fragmentation

    def misplaced_rows(self, recorded: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the allocations whose block is elsewhere in its segment than it was recorded.

        ``recorded`` is like `address`. A segment may lie anywhere: its first block tells where. An
        allocation that got a block in only one of both is misplaced, too.
        """
        rows = np.flatnonzero(self.address)
        segments = np.searchsorted(np.unique(self.segment_addresses), self.address[rows], "right")
        _, first, segment = np.unique(segments, return_index=True, return_inverse=True)
        shift = recorded[rows] - self.address[rows]
        elsewhere = rows[shift != shift[first][segment]]
        return np.union1d(elsewhere, np.flatnonzero((self.address != 0) != (recorded != 0)))


@dataclass(frozen=True, slots=True)
class Fit:
    """The answer to whether requests fit into a device; all of it is estimated.

    Attributes:
        capacity_bytes: What the device has for the allocator.
        reserved_peak: What was free when the most was reserved of it.
        retry_count: How often cached memory had to be given back to make room.
        out_of_memory: The first allocation that failed; None when all fitted.
    """

    capacity_bytes: int
    reserved_peak: ReservedPeak
    retry_count: int
    out_of_memory: OutOfMemory | None

    def __bool__(self) -> bool:
        return self.out_of_memory is None

    @property
    def peak_reserved_bytes(self) -> int:
        """The most that was reserved."""
        return self.reserved_peak.reserved_bytes

    @property
    def fragmentation(self) -> float:
        """See `ReservedPeak.fragmentation`."""
        return self.reserved_peak.fragmentation

    @property
    def spare_bytes(self) -> int:
        """The bytes that were never reserved."""
        return self.capacity_bytes - self.peak_reserved_bytes

    def __str__(self) -> str:
        """One sentence with the numbers that decide."""
        capacity = format_size(self.capacity_bytes)
        oom = self.out_of_memory
        if oom is not None:
            return (
                f"does not fit in {capacity} (estimated): an allocation of "
                f"{format_size(oom.requested_bytes)} needs {format_size(oom.segment_bytes)} where "
                f"{format_size(oom.free_bytes)} are free and {format_size(oom.reserved_bytes)} are "
                f"reserved, {format_size(oom.allocated_bytes)} of them in use"
            )
        retries = {0: "", 1: " after giving back cached memory once"}.get(
            self.retry_count, f" after giving back cached memory {self.retry_count} times"
        )
        return (
            f"fits in {capacity} with {format_size(self.spare_bytes)} to spare{retries}; "
            f"{self.reserved_peak}"
        )


def simulate(
    requests: Requests,
    settings: AllocatorSettings = _DEFAULTS,
    capacity_bytes: int | None = None,
    segment_addresses: Sequence[int] = (),
    start: Sequence[PlacedSegment] = (),
) -> AllocatorRun:
    """Run torch's native CUDA caching allocator over requests to one device.

    ``capacity_bytes`` is what the device can give to the allocator: its memory less the CUDA
    context and whatever else lives there; None means that it never runs out.
    ``per_process_memory_fraction`` is a fraction of it. ``segment_addresses`` are the addresses
    that successive cudaMalloc calls return, if known: releases that break ties by address then
    break them the same way. ``start`` is what the allocator held before, such as the ``segments``
    of an earlier run; requests free its blocks by their keys.

    Raises `RequestError` for requests that no program could make, such as a second free, and
    `AllocatorSettingsError` when a fraction is set and there is no capacity.
    """
    memory = _device_memory(settings, capacity_bytes, segment_addresses)
    device = Device(settings, memory, requests.completions_given)
    counters, address = _serve(device, start, requests)
    requested, allocated, active, reserved, *_ = counters[:, 0].tolist()
    return AllocatorRun(
        requested_bytes=counters[0, 1:],
        allocated_bytes=counters[1, 1:],
        active_bytes=counters[2, 1:],
        reserved_bytes=counters[3, 1:],
        inactive_split_bytes=counters[4, 1:],
        segment_count=counters[5, 1:],
        address=address,
        device_alloc_count=memory.alloc_count,
        retry_count=device.retry_count,
        out_of_memory=tuple(device.out_of_memory),
        segment_addresses=tuple(memory.segment_addresses),
        segments=layout_of(device),
        limit_bytes=memory.limit_bytes,
        reserved_peak=_reserved_peak(requests, counters),
        start=Counters(requested, allocated, active, reserved, estimated=True),
    )


def fits(requests: Requests, capacity_bytes: int, settings: AllocatorSettings = _DEFAULTS) -> Fit:
    """Say whether requests fit into a device with ``capacity_bytes`` for the allocator.

    Raises what `simulate` raises.
    """
    run = simulate(requests, settings, capacity_bytes)
    return Fit(
        capacity_bytes=run.limit_bytes,
        reserved_peak=run.reserved_peak,
        retry_count=run.retry_count,
        out_of_memory=next(iter(run.out_of_memory), None),
    )


def _device_memory(
    settings: AllocatorSettings, capacity_bytes: int | None, addresses: Sequence[int]
) -> DeviceMemory:
    allowed_bytes = UNLIMITED_BYTES
    if settings.limits_process:
        if capacity_bytes is None:
            raise AllocatorSettingsError(
                "per_process_memory_fraction is a fraction of the device's memory; "
                "give the capacity in bytes"
            )
        allowed_bytes = round(settings.per_process_memory_fraction * capacity_bytes)
    capacity_bytes = UNLIMITED_BYTES if capacity_bytes is None else capacity_bytes
    return DeviceMemory(capacity_bytes, allowed_bytes, iter(addresses))


def _serve(
    device: Device, start: Sequence[PlacedSegment], requests: Requests
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Make the requests after ``start``. Return the counters before each and at the end: (6, T+1).

    And the address of each allocation: (T,). Integers rather than enum members and bound methods:
    this loop is most of the run time.
    """
    restore(device, start)
    alloc, free, other, memory = device.alloc, device.free, _serve_rare, device.memory
    is_alloc, is_free = int(Request.ALLOC), int(Request.FREE)
    columns = (requests.kind, requests.key, requests.size_bytes, requests.stream, requests.pool)
    asked = zip(*(column.tolist() for column in columns), strict=True)
    counters, addresses = list[int](), list[int]()
    for row, (kind, key, size, stream, pool) in enumerate((*asked, _AT_THE_END)):
        counters += (
            device.requested,
            device.allocated,
            device.active,
            memory.reserved,
            device.inactive_split,
            memory.segment_count,
        )
        if kind == is_alloc:
            addresses.append(alloc(row, key, size, stream, pool))
        elif kind == is_free:
            free(row, key)
        elif kind is not None:
            other(device, row, kind, key, stream, pool)
    address = np.zeros(len(requests), np.int64)
    address[requests.kind == is_alloc] = addresses
    table = np.array(counters, np.int64).reshape(-1, 6)
    return np.ascontiguousarray(table.T), address


def _serve_rare(device: Device, row: int, kind: int, key: int, stream: int, pool: int) -> None:
    match kind:
        case Request.RECORD_STREAM:
            device.record_stream(row, key, stream)
        case Request.STREAM_DONE:
            device.stream_done(stream)
        case Request.BLOCK_DONE:
            device.block_done(key)
        case Request.EMPTY_CACHE:
            device.empty_cache()
        case Request.CAPTURE_BEGIN:
            device.capture_depth += 1
        case Request.CAPTURE_END:
            device.capture_depth -= 1
        case Request.POOL_RELEASE:
            device.released_pools.add(pool)
        case _:
            raise RequestError(f"row {row} has kind {kind}, which is no request")


def _reserved_peak(requests: Requests, counters: NDArray[np.int64]) -> ReservedPeak:
    _, _, active, reserved, inactive_split, _ = counters
    place = int(np.argmax(reserved))
    grown_bytes = int(reserved[place] - reserved[place - 1]) if place else 0
    if place == 0:
        # It was all reserved before. The fullest moment is the one that left least of it free.
        place = int(np.argmax(np.where(reserved == reserved[0], active, -1)))
    return ReservedPeak(
        row=max(0, place - 1),
        requested_bytes=int(requests.size_bytes[place - 1]) if place else 0,
        grown_bytes=grown_bytes,
        reserved_bytes=int(reserved[place]),
        active_bytes=int(active[place]),
        inactive_split_bytes=int(inactive_split[place]),
    )


@dataclass(frozen=True, slots=True)
class ReservedPeak:
    """The first moment at which the most was reserved, and what was free then. All estimated.

    At that moment a request had just been turned down by every free block, so what was free served
    no purpose: that is fragmentation. Later moments may have as much reserved and more of it free,
    up to all of it when the program is done; that is a cache, and would have served a request.

    torch's own words for it: what its out-of-memory error calls "reserved by PyTorch but
    unallocated" is `free_bytes`, and with it freed blocks that other streams still use, for which
    fragmentation is not to blame. ``inactive_split_bytes`` of ``torch.cuda.memory_stats()``, its
    "inactive, non-releasable memory", is the part of `free_bytes` that could not be given back to
    the device either, because the rest of its segment was in use.

    Attributes:
        row: The request that more was reserved for; 0 where no later moment was fuller than the
            start.
        requested_bytes: What it asked for.
        grown_bytes: How much more was reserved for it: a segment, or pages of an expandable one. 0
            where a run began with the most reserved, and the moment is the fullest one.
        reserved_bytes: What was reserved then.
        active_bytes: How much of that was in use.
        inactive_split_bytes: Free parts of segments that were partly in use, the rest of a new one
            included; those of expandable segments are not counted, as by torch.
    """

    row: int = 0
    requested_bytes: int = 0
    grown_bytes: int = 0
    reserved_bytes: int = 0
    active_bytes: int = 0
    inactive_split_bytes: int = 0

    @property
    def free_bytes(self) -> int:
        """The bytes that were reserved and not in use."""
        return self.reserved_bytes - self.active_bytes

    @property
    def fragmentation(self) -> float:
        """The share of the reserved bytes that was free; 0.0 where nothing was reserved."""
        return self.free_bytes / self.reserved_bytes if self.reserved_bytes else 0.0

    def __str__(self) -> str:
        """The share, and where it comes from: ``fragmentation 62% (estimated): of 40.0 MiB, ...``.

        At 0% there is no more to say.
        """
        share = f"fragmentation {self.fragmentation:.0%} (estimated)"
        if share.startswith("fragmentation 0%"):
            return share
        reserved, free = format_size(self.reserved_bytes), format_size(self.free_bytes)
        if not self.grown_bytes:
            return (
                f"{share}: of {reserved}, {free} were free at the fullest moment{self._kept_text}"
            )
        return (
            f"{share}: of {reserved}, {free} were free when the last "
            f"{format_size(self.grown_bytes)} were reserved for an allocation of "
            f"{format_size(self.requested_bytes)}{self._kept_text}"
        )

    @property
    def _kept_text(self) -> str:
        if not self.inactive_split_bytes:
            return ""
        if self.inactive_split_bytes == self.free_bytes:
            return "; none of that could be given back (inactive split)"
        size = format_size(self.inactive_split_bytes)
        return f"; {size} of that could not be given back (inactive split)"
