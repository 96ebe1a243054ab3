"""Public names of the simulated caching allocator; docs/caching-allocator.md describes them."""

from pytest_torchmem.analysis.caching_allocator.allocator_history import (
    History,
    Refusal,
    StackFrame,
    TraceEntry,
    default_pools,
    read_history,
)
from pytest_torchmem.analysis.caching_allocator.allocator_run import (
    AllocatorRun,
    Fit,
    ReservedPeak,
    fits,
    simulate,
)
from pytest_torchmem.analysis.caching_allocator.allocator_settings import (
    UNLIMITED_BYTES,
    AllocatorSettings,
)
from pytest_torchmem.analysis.caching_allocator.backwards import BackwardsLayout
from pytest_torchmem.analysis.caching_allocator.device import OutOfMemory
from pytest_torchmem.analysis.caching_allocator.layout import BlockState, PlacedBlock, PlacedSegment
from pytest_torchmem.analysis.caching_allocator.requests import (
    DEFAULT_POOL,
    DEFAULT_STREAM,
    Request,
    RequestLog,
    Requests,
)
from pytest_torchmem.analysis.snapshot import Snapshot
from pytest_torchmem.values.errors import AllocatorSettingsError, RequestError

__all__ = [
    "DEFAULT_POOL",
    "DEFAULT_STREAM",
    "UNLIMITED_BYTES",
    "AllocatorRun",
    "AllocatorSettings",
    "AllocatorSettingsError",
    "BackwardsLayout",
    "BlockState",
    "Fit",
    "History",
    "OutOfMemory",
    "PlacedBlock",
    "PlacedSegment",
    "Refusal",
    "Request",
    "RequestError",
    "RequestLog",
    "Requests",
    "ReservedPeak",
    "Snapshot",
    "StackFrame",
    "TraceEntry",
    "default_pools",
    "fits",
    "read_history",
    "simulate",
]
