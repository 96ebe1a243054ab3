"""A GPU allocator's counters around a body, and its history where that is asked for."""

from __future__ import annotations

import gc

from pytest_torchmem.simulate.gaps import gaps_so_far, with_gaps
from pytest_torchmem.values.contributors import CategoryBytes
from pytest_torchmem.values.results import Counters, Level, Peak, Result, Retained


class CounterMeasurement:
    """Reads a GPU allocator's counters around a body, and its history where that is asked for.

    Neither slows the body down much: the operators, Python's calls and who owns what are not
    recorded. ``empties_cache``: see `CounterReader`.

    Attributes:
        level: `Level.COUNTERS`, or `Level.EVENTS` for the history, and so what is retained, too.
        least: After `stop`, the same result with the smallest footprint that the counters allow:
            nothing of what was there before is in it.
    """

    def __init__(
        self, device: str, level: Level = Level.COUNTERS, *, empties_cache: bool = False
    ) -> None:
        from pytest_torchmem.record.devices import AllocatorHistory, CounterReader, find_device

        self.level = level
        self._device = find_device(device)
        self._reader = CounterReader(self._device, empties_cache=empties_cache)
        self._history = AllocatorHistory(self._device) if level is Level.EVENTS else None

    def start(self) -> None:
        """Settle the device and reset its counters."""
        from pytest_torchmem.record.devices import holds_memory, settle

        settle(self._device)
        if holds_memory(self._device):
            gc.collect()
            settle(self._device)
        if self._history:
            self._history.start()
            self._history.begin()
        self._reader.start()
        self._gaps = gaps_so_far()

    def stop(self) -> Result:
        """Return the counters' peaks; the footprint is at most ``peak.total``."""
        from pytest_torchmem.record.devices import synchronize

        synchronize(self._device)
        self._reader.stop()
        retained_bytes = self._retained()
        peaks = self._reader.peaks or {}
        counters = Counters.of(peaks, self._reader.before)
        most_bytes = peaks.get(self._reader.of_footprint, 0)
        least_bytes = most_bytes - self._reader.before.get(self._reader.of_footprint, 0)
        self.least = self._counted(counters, max(0, least_bytes), retained_bytes)
        return self._counted(counters, most_bytes, retained_bytes)

    def _retained(self) -> int:
        from pytest_torchmem.record.devices import settle

        if self._history is None:
            return 0
        # The workspaces that libraries made in the body are given back: it does not retain them.
        settle(self._device)
        self._history.end()
        try:
            return self._history.made_and_kept()
        finally:
            self._history.stop()

    def _counted(self, counters: Counters, total_bytes: int, retained_bytes: int) -> Result:
        nothing = CategoryBytes()
        result = Result(
            name="",
            device=str(self._device),
            estimated=False,
            peak=Peak(total_bytes, 0, nothing, nothing),
            retained=Retained(retained_bytes, nothing),
            counters=counters,
            level=self.level,
        )
        return with_gaps(
            result, self._gaps, lambda scratch: total_bytes + max(most for _, most in scratch)
        )
