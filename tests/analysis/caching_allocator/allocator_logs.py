"""Short ways to write requests down and to read what became of them."""

from __future__ import annotations

from pytest_torchmem.allocator import AllocatorSettings, RequestLog, simulate


def run(log, conf="", capacity_bytes=None):
    return simulate(log.requests(), AllocatorSettings.parse(conf), capacity_bytes)


def last(result):
    """The counters after the last request."""
    return {
        "requested": int(result.requested_bytes[-1]),
        "allocated": int(result.allocated_bytes[-1]),
        "active": int(result.active_bytes[-1]),
        "reserved": int(result.reserved_bytes[-1]),
        "inactive_split": int(result.inactive_split_bytes[-1]),
        "segments": int(result.segment_count[-1]),
    }


def log_of(*steps):
    """A log written shortly: ``("a", size)`` allocates a, ``"a"`` frees it."""
    log = RequestLog()
    for step in steps:
        if isinstance(step, str):
            log.free(ord(step))
        else:
            log.alloc(ord(step[0]), *step[1:])
    return log
