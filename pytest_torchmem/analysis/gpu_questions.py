"""Questions to torch's CUDA caching allocator about memory that was measured or estimated.

A footprint counts the bytes that storages asked for. The allocator of a GPU reserves more than
that. It is simulated here, so every answer is estimated, also where the requests were measured.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pytest_torchmem.analysis.caching_allocator.requests import Requests
from pytest_torchmem.analysis.storages.evidence import Evidence
from pytest_torchmem.values.findings import COUNTERS
from pytest_torchmem.values.results import Result
from pytest_torchmem.values.units import format_size, parse_size

if TYPE_CHECKING:  # few tests ask
    from pytest_torchmem.analysis.caching_allocator.allocator_run import AllocatorRun, Fit
    from pytest_torchmem.analysis.caching_allocator.allocator_settings import AllocatorSettings


class GpuQuestions(abc.ABC):
    """Questions to anything that knows what was allocated and freed, and in which order."""

    __slots__ = ()

    @property
    @abc.abstractmethod
    def allocator_requests(self) -> Requests:
        """Every allocation and free on the device looked at, in order."""

    def simulate(
        self, settings: AllocatorSettings | str = "", capacity: int | str | None = None
    ) -> AllocatorRun:
        """Return what the caching allocator would have made of it, from an empty cache on.

        ``settings`` are those of ``PYTORCH_CUDA_ALLOC_CONF``; ``capacity`` is what the device has
        for the allocator, in bytes or as ``"24GiB"``, None for one that never runs out.
        ``.peak.reserved`` of the answer is what ``torch.cuda.max_memory_reserved()`` would say.
        Raises `AllocatorSettingsError` and `SizeError`.
        """
        from pytest_torchmem.analysis.caching_allocator.allocator_run import simulate

        capacity_bytes = None if capacity is None else parse_size(capacity)
        return simulate(self.allocator_requests, _parsed(settings), capacity_bytes)

    def fits(self, capacity: int | str, settings: AllocatorSettings | str = "") -> Fit:
        """Say whether it would fit into a device with ``capacity`` for the allocator.

        The answer is true or false, and as text a sentence with the numbers that decide. Raises
        what `simulate` raises.
        """
        from pytest_torchmem.analysis.caching_allocator.allocator_run import fits

        return fits(self.allocator_requests, parse_size(capacity), _parsed(settings))


def storages_of_window(evidence: Evidence) -> NDArray[np.int64]:
    """Return the storages of a window's footprint: int64, shape (N,).

    What the window found comes first, in the order in which it was made. Of what is older than the
    recording nobody knows that order: the largest is taken to be the first.
    """
    storages = evidence.storages
    rows: NDArray[np.int64] = np.flatnonzero(evidence.counted)
    columns = (storages.died, -storages.size_bytes, storages.born)
    return rows[np.lexsort(tuple(column[rows] for column in columns))]


def requests_of_window(evidence: Evidence) -> Requests:
    """Return the requests of a window's footprint; keys are places in `storages_of_window`."""
    storages, window = evidence.storages, evidence.window
    rows = storages_of_window(evidence)
    died = storages.died[rows]
    died = np.where(died > window.end, np.inf, died)
    begin = np.maximum(storages.born[rows], window.begin)
    return Requests.from_lifetimes(storages.size_bytes[rows], begin, died)


def with_counters(
    result: Result, limits: Mapping[str, int], source: GpuQuestions, settings: str
) -> Result:
    """Return ``result`` with estimated counters where a limit asks for one and none can be read.

    A GPU counts for itself: where its counters are missing, an estimate must not hide that. Raises
    what `GpuQuestions.simulate` raises.
    """
    counters = [key for key in COUNTERS if key in limits]
    counts_itself = result.device != "cpu" and not result.estimated
    if not counters or result.counters is not None or counts_itself:
        return result
    run = source.simulate(settings)
    note = (
        f"{' and '.join(counters)} memory is estimated: torch's CUDA caching allocator, simulated "
        f"{f'with {settings} ' if settings else ''}over the allocations on {result.device}, "
        f"reserves {format_size(run.peak.reserved)}; {run.reserved_peak}"
    )
    return replace(result, counters=run.peak, notes=(*result.notes, note))


def _parsed(settings: AllocatorSettings | str) -> AllocatorSettings:
    from pytest_torchmem.analysis.caching_allocator.allocator_settings import AllocatorSettings

    return AllocatorSettings.parse(settings) if isinstance(settings, str) else settings
