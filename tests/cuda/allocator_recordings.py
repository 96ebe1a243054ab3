"""Recordings of the real caching allocator: their file format, and the comparison with a replay.

A recording holds what was asked of the allocator, row by row, and what torch said afterwards: the
counters of ``torch.cuda.memory_stats()`` after some rows, where each block was put, and how often
the device was asked. It is made by ``record_allocator.py``.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from pytest_torchmem.allocator import (
    AllocatorRun,
    AllocatorSettings,
    Requests,
    simulate,
)

# 1: first format.
FORMAT = 1
FOLDER = Path(__file__).parent.parent / "data" / "caching_allocator"

# A column of samples, its name in memory_stats() and the column of a run that must equal it.
COUNTERS = {
    "requested": ("requested_bytes.all.current", "requested_bytes"),
    "allocated": ("allocated_bytes.all.current", "allocated_bytes"),
    "active": ("active_bytes.all.current", "active_bytes"),
    "reserved": ("reserved_bytes.all.current", "reserved_bytes"),
    "inactive_split": ("inactive_split_bytes.all.current", "inactive_split_bytes"),
    "segments": ("segment.all.current", "segment_count"),
}
_REQUEST_COLUMNS = ("kind", "key", "size_bytes", "stream", "pool")


@dataclass(frozen=True)
class Recording:
    """One recorded run.

    ``samples`` has a column ``row`` and one for each of `COUNTERS`; ``address`` one entry per
    request; ``counts`` holds ``device_allocs``, ``retries`` and ``ooms`` over the whole run.
    """

    scenario: str
    torch: str
    device: str
    conf: str
    fraction: float
    capacity_bytes: int
    completions_given: bool
    requests: dict[str, list[int]]
    address: list[int]
    segment_addresses: list[int]
    samples: dict[str, list[int]]
    counts: dict[str, int]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": FORMAT, **asdict(self)}, separators=(",", ":"))
        # No time stamp: the same recording is the same file.
        path.write_bytes(gzip.compress(text.encode(), mtime=0))

    @classmethod
    def load(cls, path: Path) -> Recording:
        data = json.loads(gzip.decompress(path.read_bytes()))
        if data.pop("format") != FORMAT:
            raise ValueError(f"{path} has a format that this version does not read")
        return cls(**data)

    @property
    def release(self) -> tuple[int, int]:
        """The release of torch, such as ``(2, 13)``."""
        major, minor, *_ = self.torch.split(".")
        return int(major), int(minor)

    def settings(self) -> AllocatorSettings:
        parsed = AllocatorSettings.parse(self.conf, self.release)
        return replace(parsed, per_process_memory_fraction=self.fraction)

    def as_requests(self) -> Requests:
        columns = {name: np.array(self.requests[name], np.int64) for name in _REQUEST_COLUMNS}
        columns["kind"] = columns["kind"].astype(np.int8)
        return Requests(**columns, completions_given=self.completions_given)  # type: ignore[arg-type]

    def replay(self, *, by_address: bool) -> AllocatorRun:
        """Simulate the requests. ``by_address``: ties go to the lowest of the real addresses.

        Otherwise they go to the oldest segment.
        """
        addresses = self.segment_addresses if by_address else ()
        return simulate(self.as_requests(), self.settings(), self.capacity_bytes, addresses)


def differences(recording: Recording, run: AllocatorRun) -> list[str]:
    """What a replay got wrong, one sentence for each kind of thing; empty when it is exact."""
    found = []
    rows = np.array(recording.samples["row"], dtype=np.int64)
    for name, (_, column) in COUNTERS.items():
        measured = np.array(recording.samples[name], dtype=np.int64)
        replayed = getattr(run, column)[rows]
        wrong = np.flatnonzero(replayed != measured)
        if len(wrong):
            at = wrong[0]
            found.append(
                f"{name} differs after {len(wrong)} of {len(rows)} sampled requests, first after "
                f"row {rows[at]}: measured {measured[at]}, replayed {replayed[at]}"
            )
    misplaced = run.misplaced_rows(np.array(recording.address, dtype=np.int64))
    if len(misplaced):
        found.append(f"{len(misplaced)} blocks lie elsewhere, first that of row {misplaced[0]}")
    counts = {
        "device_allocs": run.device_alloc_count,
        "retries": run.retry_count,
        "ooms": len(run.out_of_memory),
    }
    for name, count in recording.counts.items():
        if counts[name] != count:
            found.append(f"{name}: measured {count}, replayed {counts[name]}")
    return found
