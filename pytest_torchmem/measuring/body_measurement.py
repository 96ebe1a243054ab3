"""Measuring one body: recorder and analysis wired together, for the plugin and for scripts."""

from __future__ import annotations

import abc
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from os import PathLike, getpid
from threading import get_ident
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

from pytest_torchmem.analysis.caching_allocator.requests import Requests
from pytest_torchmem.analysis.gpu_questions import GpuQuestions
from pytest_torchmem.analysis.judge.holders import Held, LeftBehind
from pytest_torchmem.analysis.pipeline import MemoryProfile, analyze_trace
from pytest_torchmem.analysis.storages.explanation import OwnPass
from pytest_torchmem.contexts import Around, gc_paused, numpy_in_place
from pytest_torchmem.simulate import GPU_VARIABLE
from pytest_torchmem.values.contributors import Contributor
from pytest_torchmem.values.errors import RecordingError, TorchmemError, is_torchmem_error
from pytest_torchmem.values.picture import Picture
from pytest_torchmem.values.results import Fate, Holder, Peak, ReservedSegment, Result, Retained
from pytest_torchmem.values.trace import LOOP, MarkKind
from pytest_torchmem.values.units import format_size

if TYPE_CHECKING:
    from pytest_torchmem.record.holders.search import Kept
    from pytest_torchmem.record.recorder import Recorder
    from pytest_torchmem.simulate.gaps import Gaps

__tracebackhide__ = is_torchmem_error


class Region(GpuQuestions):
    """The numbers of a measured block: the parts of its result, under their own names.

    Attributes:
        name: The name that it was given.
    """

    name: str

    def __repr__(self) -> str:
        try:  # pytest prints it below an assert
            peak, retained = map(format_size, (self.peak.total, self.retained.total))
        except TorchmemError as error:
            return f"<{error.sentence}>"
        return f"<{self.name!r}: peak {peak}, retained {retained}>"

    @property
    @abc.abstractmethod
    def result(self) -> Result:
        """The numbers as one value."""

    @property
    def peak(self) -> Peak:
        """The largest footprint: ``peak.total``, ``peak.activation``, ``peak.at_peak``."""
        return self.result.peak

    @property
    def retained(self) -> Retained:
        """Memory that was made and left alive: ``retained.total``, ``retained.activation``."""
        return self.result.retained

    @property
    def growth(self) -> int | None:
        """Bytes retained per step after the warm-up; None without two steps."""
        return self.result.growth


class _Noted(NamedTuple):
    """The ways that led to storages at a time, by place.

    They led there from local variables, or from what closed a cycle that nobody else referred to.
    """

    ways: Mapping[tuple[str, int], str] = MappingProxyType({})
    cycles: Mapping[tuple[str, int], str] = MappingProxyType({})
    time_ns: int = 0


_NOTHING_NOTED: Final = _Noted()


class _Stretch(GpuQuestions):
    """A stretch of a recording: the whole, or a region of it."""

    _noted_places = _NOTHING_NOTED
    _segments_before: Collection[int] = ()

    @abc.abstractmethod
    def _analysed(self) -> MemoryProfile:
        """The analysis of what was recorded in it."""

    @property
    def allocator_requests(self) -> Requests:
        """Every allocation and free of it that was recorded so far, in order.

        Raises `RecordingError` where it is a region that is still open.
        """
        return self._analysed().allocator_requests

    @abc.abstractmethod
    def _now_ns(self) -> int:
        """Return the time on the recording's clock, which nobody sets while it runs."""

    def freed(self) -> tuple[Contributor, ...]:
        """Return what it made and freed, by origin. Raises what `allocator_requests` does."""
        return self._analysed().freed()

    def reserved(self) -> tuple[tuple[ReservedSegment, Contributor], ...]:
        """Return the segments that it had reserved and that are still there: `profile.reserved`.

        On the CPU they are those that a GPU's allocator would have. Raises what
        `allocator_requests` and `simulate` do.
        """
        from pytest_torchmem.record.environment import allocator_settings
        from pytest_torchmem.record.torch_api.allocator import segments

        profile = self._analysed()
        if profile.device == "cpu":
            return profile.reserved_if_simulated(allocator_settings())
        there_before = self._segments_before
        new_segments = (s for s in segments(profile.device) if s.address not in there_before)
        return profile.reserved(new_segments)

    def picture(self) -> Picture:
        """Its timeline, sampled. Raises what `allocator_requests` does."""
        from pytest_torchmem.analysis.sampling import sketch

        return sketch(self._analysed())

    def note_holders(self) -> None:
        """Note how local variables lead to what is alive now; at the end they may be gone."""
        # An import makes enough objects for a collection, which would free what is in a cycle.
        with gc_paused():
            from pytest_torchmem.record.holders.local_variables import places_held_now

            self._noted_places = _Noted(*places_held_now(), self._now_ns())


class BodyRegion(_Stretch, Region):
    """A named part of a body. Its numbers are worked out when first asked for, and then stay.

    What a GPU would make of them (`simulate`, `fits`) can be asked as soon as it is over.
    """

    def __init__(
        self, name: str, measurement: BodyMeasurement, begin: int, steps_of: str = ""
    ) -> None:
        self.name = name
        self._steps_of = steps_of
        self._measurement = measurement
        self._begin = begin
        self.end: int | None = None
        self._result: Result | None = None

    @property
    def result(self) -> Result:
        """Everything measured in the region. Raises `RecordingError` while it is still open."""
        if self._result is None:
            profile = self._analysed()
            self._result = self._measurement.told_gaps(profile.result(self.name), profile)
        return self._result

    @property
    def was_read(self) -> bool:
        """True when somebody has asked for its numbers."""
        return self._result is not None

    def find_holders(self) -> tuple[Held, ...]:
        """Return what keeps alive what the region made and left behind; see `find_holders_in`."""
        return self._measurement.find_holders_in(self._analysed(), self._noted_places)

    def _now_ns(self) -> int:
        return self._measurement._now_ns()

    def _analysed(self) -> MemoryProfile:
        if self.end is None:
            raise RecordingError(
                f"the region {self.name!r} is still open; read its numbers after the with block"
            )
        return self._measurement.profile_so_far().region(self._begin, self.end, self._steps_of)


def _on_standard_error(text: str) -> None:
    print(f"torchmem: {text}", file=sys.stderr, flush=True)


class BodyMeasurement(_Stretch):
    """Measures one body on one device: `start`, the body with its `region`s and `step`s, `stop`.

    ``say`` is called with what somebody must know while the body runs.
    ``passes`` are category passes of users. Raises `DeviceError` when the device is missing or
    cannot be measured.
    """

    def __init__(
        self,
        device: str | None = None,
        passes: Sequence[OwnPass] = (),
        say: Callable[[str], None] = _on_standard_error,
    ) -> None:
        from pytest_torchmem.record.devices import find_device

        self._device = find_device(device)
        self.device = str(self._device)
        self.regions: list[BodyRegion] = []
        self._passes = passes
        self._say = say
        self._loop_count = 0
        self._recorder: Recorder | None = None
        self._profile: MemoryProfile | None = None
        self._gaps: Gaps | None = None
        self._is_from_empty_cache = False
        self._notes: tuple[str, ...] = ()
        self._kept_by_place: Mapping[tuple[str, int], Kept] | None = None

    def start(self, *, empties_cache: bool = False) -> None:
        """Settle the device and begin; ``empties_cache`` has CUDA's allocator give its cache back.

        Raises `RecordingError` if another profiler is active, or another thread is measured.
        """
        from pytest_torchmem.record.recorder import Recorder
        from pytest_torchmem.record.torch_api.allocator import segments

        recorder = Recorder(self._device, self._say, empties_cache=empties_cache)
        before = _UnderWay.begin(self)
        try:
            with numpy_in_place():
                recorder.start()
            self._recorder = recorder
            self._is_from_empty_cache = empties_cache
            if empties_cache:
                self._segments_before = frozenset(s.address for s in segments(self.device))
            if GPU_VARIABLE in os.environ:
                from pytest_torchmem.simulate.gaps import gaps_so_far

                self._gaps = gaps_so_far()
        except BaseException:  # a signal's handler may raise anywhere
            _UnderWay.current = before
            recorder.cancel()
            raise

    def region(self, name: str, steps_of: str = "") -> Around[BodyRegion]:
        """Measure the block; its numbers can be read as soon as it is over.

        ``steps_of`` tells the steps that are its own from those of the body.
        """

        def begin() -> BodyRegion:
            mark = self._recording().mark(MarkKind.REGION_BEGIN, name)
            self.regions.append(BodyRegion(name, self, mark, steps_of))
            return self.regions[-1]

        return Around(begin, self._close)

    def _close(self, region: BodyRegion) -> None:
        recorder = self._recording()
        with gc_paused():
            end = recorder.mark(MarkKind.REGION_END, region.name)
            recorder.sample_graphs(end)
            region.end = end

    def steps(self, n: int, warmup: int, steps_of: str = "") -> Iterator[int]:
        """Yield the numbers of the steps of one more loop, and note where those of ``n`` end.

        The loop is the body's own, or that of a region; see `region`.
        """
        self._loop_count += 1
        loop = f"{steps_of}{LOOP}{self._loop_count}"
        for step in range(warmup + n):
            yield step
            if step >= warmup:
                self._recording().mark(MarkKind.STEP, loop)

    def stop(self, *, origins: bool = True) -> Result:
        """End the recording, restore everything and return the body's `numbers`."""
        recorder = self._recording()
        try:
            with numpy_in_place():
                trace = recorder.stop()
                self._notes, self._recorder, _UnderWay.current = recorder.notes, None, None
                self._profile = analyze_trace(trace, passes=self._passes)
                return self.numbers(origins=origins)
        except BaseException:  # a signal's handler may raise before the recorder has ended
            if self.is_under_way:
                self.cancel()
            raise

    def numbers(self, *, origins: bool = True) -> Result:
        """The numbers so far; ``origins`` asks for what was alive, too, and where it comes from."""
        profile = self.profile_so_far()
        result = self.told_gaps(profile.result(origins=origins), profile)
        if result.counters and self._gaps is not None and self._is_from_empty_cache:
            result = replace(result, counters=replace(result.counters, repeatable=True))
        return replace(result, notes=(*result.notes, *self._notes))

    def told_gaps(self, result: Result, profile: MemoryProfile) -> Result:
        """Return a result that says what a simulated GPU could not know of it."""
        if self._gaps is None:
            return result
        from pytest_torchmem.simulate.gaps import with_gaps

        return with_gaps(result, self._gaps, profile.at_most)

    @property
    def is_under_way(self) -> bool:
        """Return whether it has begun, and was neither stopped nor cancelled."""
        return self._recorder is not None

    def cancel(self) -> None:
        """End the recording and restore everything; nothing is analysed."""
        try:
            self._recording().cancel()
        finally:
            self._recorder, _UnderWay.current = None, None

    def profile_so_far(self) -> MemoryProfile:
        """The analysis of what was recorded until now, or of the whole once it has stopped."""
        if self._profile is not None:
            return self._profile
        return analyze_trace(self._recording().trace(), passes=self._passes)

    def _now_ns(self) -> int:
        return self._recording().now_ns()

    def _analysed(self) -> MemoryProfile:
        return self.profile_so_far()

    def paused(self) -> AbstractContextManager[None]:
        """Leave what happens in the block out of the recording, if one is under way."""
        return self._recorder.paused() if self._recorder else nullcontext()

    def find_holders(self) -> tuple[Held, ...]:
        """Return what keeps alive what the body made and left behind; see `find_holders_in`."""
        profile, noted = self.profile_so_far(), self._noted_places
        grown_storages = (s for s in profile.left_by_steps(noted.time_ns) if s.place in noted.ways)
        freed_holders = (
            Held(_holder(s, None, noted), s.contributor, at_end=False) for s in grown_storages
        )
        return (*self.find_holders_in(profile, noted), *freed_holders)

    def find_holders_in(
        self, window: MemoryProfile, noted: _Noted = _NOTHING_NOTED
    ) -> tuple[Held, ...]:
        """Return what keeps alive what a window made and left behind, storage by storage.

        It looks at the objects that are alive now, so ask before anything else runs. The ways to
        what was freed since are in ``noted``: those of a moment after the window's end.
        """
        kept = self._kept_now()
        storages = window.left_behind(noted.time_ns)
        return tuple(Held(_holder(s, kept.get(s.place), noted), s.contributor) for s in storages)

    def _kept_now(self) -> Mapping[tuple[str, int], Kept]:
        """Find the holders of the memory that the body has left behind until now.

        The search frees what only cycles keep, so there is one search for all windows: a second one
        would find nothing that holds its storages.
        """
        from pytest_torchmem.record.holders import search

        if self._kept_by_place is None or self._profile is None:
            storages = self.profile_so_far().left_behind()
            alive = {storage.place: storage.size_bytes for storage in storages if storage.is_alive}
            holders = search.find_holders(alive) if alive else []
            self._kept_by_place = {kept.place: kept for kept in holders}
        return self._kept_by_place

    def save_trace(self, path: str | PathLike[str]) -> None:
        """Write what was recorded until now to a file that `load` reads."""
        self.profile_so_far().tree.trace.save(path)

    def _recording(self) -> Recorder:
        if self._recorder is None:
            raise RecordingError("nothing is being measured now")
        # Another thread cannot end this session, and if it tried, nobody could end it any more.
        running()
        return self._recorder


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """The measurement that is under way: there can be one in a process."""

    measurement: BodyMeasurement
    thread: int = field(default_factory=get_ident)
    process: int = field(default_factory=getpid)
    current: ClassVar[_UnderWay | None] = None

    @classmethod
    def begin(cls, measurement: BodyMeasurement) -> _UnderWay | None:
        """Note one that is about to begin; return what this thread is in the middle of already.

        Two sessions of torch's profiler at once end the process, and to begin one takes a while.
        Raises `RecordingError` like `running`.
        """
        with _BEGINNING:
            running()
            before, cls.current = cls.current, cls(measurement)
        return before


_BEGINNING: Final = threading.Lock()


def running() -> BodyMeasurement | None:
    """Return the measurement that the calling thread is in the middle of; None where there is none.

    Raises `RecordingError` while another thread is measured, and in a child that was forked
    while its parent was: neither can be recorded.
    """
    now = _UnderWay.current
    if now is None:
        return None
    if now.process != getpid():
        raise RecordingError(
            "this process was forked while its parent was measured, and holds half of that "
            "recording; start it with multiprocessing's method 'spawn', or fork before measuring"
        )
    if now.thread != get_ident():
        raise RecordingError(
            "another thread is being measured, and there can be one measurement in a process; "
            "measure there, or one after the other"
        )
    return now.measurement


def _holder(storage: LeftBehind, kept: Kept | None, noted: _Noted) -> Holder:
    place = storage.place
    # What was freed before may have left its place to something else.
    ways, cycles, _ = noted if storage.outlived_note else _NOTHING_NOTED
    if kept is None or not storage.is_alive:
        by = ways.get(place) or cycles.get(place)
        fate = Fate.GARBAGE if place in cycles and not ways.get(place) else Fate.FREED_LATER
    elif kept.in_garbage and place in ways:
        # A variable says more than the cycle that it became part of.
        fate, by = Fate.FREED_LATER, ways[place]
    else:
        fate, by = Fate.GARBAGE if kept.in_garbage else Fate.HELD, kept.by
        fate = Fate.NOT_LOOKED_FOR if by is None else fate
    return Holder(storage.size_bytes, 1, fate, by or "")
