"""Measuring one body: recorder and analysis wired together, for the plugin and for scripts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pytest_torchmem.analysis.picture import Picture
from pytest_torchmem.analysis.pipeline import MemoryProfile, analyze
from pytest_torchmem.analysis.results import Peak, Result, Retained
from pytest_torchmem.errors import RecordingError
from pytest_torchmem.trace import MarkKind

if TYPE_CHECKING:
    from pytest_torchmem.record.recorder import Recorder


class Region:
    """A named part of a body. Its numbers are worked out when first asked for, and then stay."""

    def __init__(self, name: str, measurement: BodyMeasurement, begin: int) -> None:
        self.name = name
        self._measurement = measurement
        self._begin = begin
        self._end: int | None = None
        self._result: Result | None = None

    def close(self, end: int) -> None:
        self._end = end

    @property
    def result(self) -> Result:
        """Everything measured in the region. Raises `RecordingError` while it is still open."""
        if self._result is None:
            if self._end is None:
                raise RecordingError(
                    f"the region {self.name!r} is still open; read its numbers after the with block"
                )
            self._result = self._profile(self._end).result(self.name)
        return self._result

    def picture(self) -> Picture:
        """The region's timeline, sampled. Raises `RecordingError` while it is still open."""
        from pytest_torchmem.analysis.sampling import sketch

        if self._end is None:
            raise RecordingError(f"the region {self.name!r} is still open")
        return sketch(self._profile(self._end))

    def _profile(self, end: int) -> MemoryProfile:
        return self._measurement.profile_so_far().region(self._begin, end)

    @property
    def peak(self) -> Peak:
        return self.result.peak

    @property
    def retained(self) -> Retained:
        return self.result.retained

    @property
    def growth(self) -> int | None:
        return self.result.growth


class BodyMeasurement:
    """Measures one body on one device: `start`, the body with its `region`s and `step`s, `stop`.

    Raises `DeviceError` when the device is missing or cannot be measured.
    """

    def __init__(self, device: str | None = None) -> None:
        from pytest_torchmem.record.devices import find_device

        self._device = find_device(device)
        self.device = str(self._device)
        self.regions: list[Region] = []
        self._recorder: Recorder | None = None
        self._profile: MemoryProfile | None = None

    def start(self) -> None:
        """Settle the device and begin. Raises `RecordingError` if another profiler is active."""
        from pytest_torchmem.record.recorder import Recorder

        recorder = Recorder(self._device)
        recorder.start()
        self._recorder = recorder

    @contextmanager
    def region(self, name: str) -> Iterator[Region]:
        """Measure the block; its numbers can be read as soon as it is over."""
        recorder = self._recording()
        region = Region(name, self, recorder.mark(MarkKind.REGION_BEGIN, name))
        self.regions.append(region)
        try:
            yield region
        finally:
            end = recorder.mark(MarkKind.REGION_END, name)
            recorder.sample_graphs(end)
            region.close(end)

    def step(self) -> None:
        """Note the end of a step."""
        self._recording().mark(MarkKind.STEP)

    def stop(self) -> Result:
        """End the recording, restore everything and return the body's numbers."""
        trace = self._recording().stop()
        self._recorder = None
        self._profile = analyze(trace)
        return self._profile.result()

    def cancel(self) -> None:
        """End the recording and restore everything; nothing is analysed."""
        recorder, self._recorder = self._recording(), None
        recorder.cancel()

    def profile_so_far(self) -> MemoryProfile:
        """The analysis of what was recorded until now, or of the whole once it has stopped."""
        if self._profile is not None:
            return self._profile
        return analyze(self._recording().trace())

    def picture(self) -> Picture:
        """The body's timeline, sampled."""
        from pytest_torchmem.analysis.sampling import sketch

        return sketch(self.profile_so_far())

    def _recording(self) -> Recorder:
        if self._recorder is None:
            raise RecordingError("nothing is being measured now")
        return self._recorder


def environment(device: str) -> dict[str, str]:
    """What a number depends on beside the code; see `record.devices.environment`."""
    from pytest_torchmem.record import devices

    return devices.environment(device)
