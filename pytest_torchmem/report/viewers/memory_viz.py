"""A profile as a snapshot for https://pytorch.org/memory_viz, with our categories.

The form is that of ``torch.cuda.memory._snapshot()`` as ``torch/cuda/_memory_viz.py`` and its page
read it. One block of memory stands for each storage; since the form is about a caching allocator's
segments, each run of storages gets a segment around it, which says nothing about reserved memory.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Final

import numpy as np

from pytest_torchmem.analysis.pipeline import MemoryProfile
from pytest_torchmem.values.contributors import Contributor
from pytest_torchmem.values.json_values import Json

_PROTOCOL: Final = 4


def snapshot(profile: MemoryProfile) -> dict[str, Json]:
    """Return the snapshot: what was there before, then each allocation and free in order.

    Only the storages of the footprint are in it, so that its highest level is our peak.
    """
    storages, window = profile.storages, profile.window
    rows = np.flatnonzero(profile.evidence.counted)
    number = int(profile.device.partition(":")[2] or 0)
    entries: list[tuple[float, int, dict[str, Json]]] = []
    for row in rows.tolist():
        block = _block(profile, row)
        begin = max(float(storages.born[row]), window.begin)
        entries.append((begin, 1, {"action": "alloc", **block}))
        died = float(storages.died[row])
        if died <= window.end:
            # What is freed at a rank makes room for what is made at it.
            entries.append((died, 0, {"action": "free_completed", **block}))
    entries.sort(key=lambda entry: entry[:2])
    changes = np.searchsorted(profile.ranks, [rank for rank, *_ in entries], side="right") - 1
    times_us = (profile.timeline.times_ns[changes.clip(0)] // 1000).tolist() if entries else []
    trace = [{**e, "time_us": at} for at, (_, _, e) in zip(times_us, entries, strict=True)]
    traces: list[list[dict[str, Json]]] = [[] for _ in range(number)]
    return {"segments": list(_segments(profile, number)), "device_traces": [*traces, trace]}


def pickled(profile: MemoryProfile) -> bytes:
    """Return the snapshot as the bytes of a ``.pickle`` file, which memory_viz opens."""
    return pickle.dumps(snapshot(profile), protocol=_PROTOCOL)


def _block(profile: MemoryProfile, row: int) -> dict[str, Json]:
    origin = profile.attribution.origin(row)
    return {
        "addr": int(profile.storages.ptr[row]),
        "size": int(profile.storages.size_bytes[row]),
        "stream": 0,
        "frames": _frames(origin),
        "category": origin.category.value,
    }


def _frames(origin: Contributor) -> list[dict[str, Json]]:
    """Return the origin of a storage as a stack, innermost first: operator, source line, module."""
    source = origin.source
    places = [
        ("", 0, f"{origin.category.value} ({origin.phase.value})"),
        ("", 0, origin.operator),
        (source.file, source.line, source.function) if source else ("", 0, ""),
        ("", 0, origin.module),
    ]
    return [{"filename": f, "line": n, "name": name} for f, n, name in places if name]


def _segments(profile: MemoryProfile, number: int) -> Iterator[dict[str, Json]]:
    """Yield a segment for each storage that is alive at the end, as the form asks for."""
    storages = profile.storages
    alive = profile.evidence.counted & (storages.died > profile.window.end)
    for row in np.flatnonzero(alive).tolist():
        block = _block(profile, row)
        size_bytes, frames = block["size"], block["frames"]
        state = {"size": size_bytes, "requested_size": size_bytes, "state": "active_allocated"}
        yield {
            "device": number,
            "address": block["addr"],
            "total_size": size_bytes,
            "allocated_size": size_bytes,
            "active_size": size_bytes,
            "requested_size": size_bytes,
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": frames,
            "blocks": [{**state, "address": block["addr"], "frames": frames}],
        }
