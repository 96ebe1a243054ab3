"""Snapshots as torch writes them, made from runs of the simulated allocator."""

from __future__ import annotations

from typing import Any

from pytest_torchmem.allocator import AllocatorRun, BlockState, Request, Requests

_STATES = {BlockState.IN_USE: "active_allocated", BlockState.FREE: "inactive"}


def frame(name: str, filename: str = "??", line: int = 0) -> dict[str, Any]:
    return {"name": name, "filename": filename, "line": line}


def entry(action: str, addr: int, size: int = 0, **more: Any) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": 0, "time_us": 0, **more}


def segments_of(run: AllocatorRun) -> list[dict[str, Any]]:
    return [
        {
            "device": 0,
            "address": segment.address,
            "total_size": segment.size_bytes,
            "stream": segment.stream,
            "segment_type": "small" if segment.is_small else "large",
            "segment_pool_id": (0, segment.pool),
            "is_expandable": segment.is_expandable,
            "blocks": [
                {
                    "address": block.address,
                    "size": block.size_bytes,
                    "requested_size": block.requested_bytes,
                    "state": _STATES[block.state],
                    "frames": [],
                }
                for block in segment.blocks
            ],
        }
        for segment in run.segments
    ]


def snapshot_of(requests: Requests, run: AllocatorRun, first: int = 0) -> dict[str, Any]:
    """What torch would have written at the end of a run whose history began at row ``first``.

    The requests are allocations and frees under default settings.
    """
    sizes = {segment.address: segment.size_bytes for segment in run.segments}
    addresses, requested = {}, {}
    segments = iter(run.segment_addresses)
    reserved_bytes, entries = 0, []
    columns = (requests.kind, requests.key, requests.size_bytes, run.address, run.reserved_bytes)
    for row, values in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        kind, key, size, address, now_bytes = values
        found = []
        if now_bytes > reserved_bytes:
            segment = next(segments)
            found.append(entry("segment_alloc", segment, sizes[segment]))
        reserved_bytes = now_bytes
        if kind == Request.ALLOC:
            addresses[key], requested[key] = address, size
            frames = [frame(f"f{key}", "/home/me/model.py", key + 1)]
            found.append(entry("alloc", address, size, frames=frames))
        else:
            freed = (addresses[key], requested[key])
            found += [entry("free_requested", *freed), entry("free_completed", *freed)]
        if row >= first:
            entries += found
    return {
        "segments": segments_of(run),
        "device_traces": [entries],
        "allocator_settings": {"expandable_segments": False, "max_split_size": -1},
    }
