"""A snapshot of torch's own allocator, analysed: what it held at its peak, and who asked for it.

``torch.cuda.memory._record_memory_history()`` makes torch write down each allocation and free with
a stack, and ``_dump_snapshot`` writes that to a file beside the segments of the moment. Nobody
knows from it what memory was for, so each storage is UNKNOWN; the operator and the line are known.

Source of the format: ``torch/csrc/cuda/memory_snapshot.cpp`` and ``torch/cuda/_memory_viz.py``.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytest_torchmem.analysis.caching_allocator.allocator_history import (
    History,
    Pools,
    StackFrame,
    TraceEntry,
    default_pools,
    read_history,
)
from pytest_torchmem.analysis.caching_allocator.allocator_run import AllocatorRun, simulate
from pytest_torchmem.analysis.caching_allocator.allocator_settings import AllocatorSettings
from pytest_torchmem.analysis.caching_allocator.backwards import BackwardsLayout
from pytest_torchmem.analysis.caching_allocator.layout import NO_KEY, PlacedSegment
from pytest_torchmem.analysis.caching_allocator.requests import Request, Requests
from pytest_torchmem.analysis.gpu_questions import GpuQuestions
from pytest_torchmem.analysis.sampling import StorageLives, sketch_timeline, with_holders
from pytest_torchmem.analysis.storages.attribution import grouped
from pytest_torchmem.analysis.storages.timeline import Timeline
from pytest_torchmem.values.contributors import Category, CategoryBytes, Contributor, Phase, Source
from pytest_torchmem.values.errors import RequestError, SnapshotError
from pytest_torchmem.values.json_values import WRONG, checked_list, shown, told_damage, whole_number
from pytest_torchmem.values.picture import Picture
from pytest_torchmem.values.results import Peak, Result, Retained
from pytest_torchmem.values.units import Device, device_text, format_size, resolve_device


@dataclass(frozen=True)
class Snapshot(GpuQuestions):
    """One device of a snapshot.

    Attributes:
        device: The device's number.
        settings: The allocator's settings when the snapshot was taken.
        start: What the allocator held before the first entry of the history.
        history: What was asked of it since.
        times_ns: int64, shape (T,); when each request was made, from the first one on.
        sites: The site of each allocation by its key; keys of ``start`` are negative.
        contradiction: Why the history does not lead to the segments beside it; what was there
            before it is not known then. ``""`` where it does. The one of the two that holds more
            is kept: the history alone, or the segments as ``start``.
    """

    device: int
    settings: AllocatorSettings
    start: tuple[PlacedSegment, ...]
    history: History
    times_ns: NDArray[np.int64]
    sites: Mapping[int, Site]
    contradiction: str = ""

    @property
    def name(self) -> str:
        """The device as torch names it: ``cuda:0``."""
        return f"cuda:{self.device}"

    @cached_property
    def start_requested_bytes(self) -> int:
        """The bytes that the program held before the first entry."""
        return sum(block.requested_bytes for segment in self.start for block in segment.blocks)

    @property
    def begins_in_the_middle(self) -> bool:
        """True where memory was in place before the first entry of the history."""
        return bool(self.start)

    @cached_property
    def replay(self) -> AllocatorRun:
        """The history, simulated from its own start under its own settings.

        Of equal free blocks torch takes the one with the lowest address up to 2.11, and that of the
        oldest segment from 2.13; the order that gives the recorded addresses is taken.
        """
        requests, known = self.history.requests, self.history.segment_addresses
        runs = [simulate(requests, self.settings, None, at, self.start) for at in (known, ())]
        return min(runs, key=self._misplaced_count)

    @property
    def misplaced_count(self) -> int:
        """The number of allocations that the replay puts elsewhere than torch did: 0 is exact."""
        return self._misplaced_count(self.replay)

    @property
    def allocator_requests(self) -> Requests:
        """Every allocation and free: what was there before comes first, the largest before all.

        What the device refused was asked for, too. Raises `RequestError` where nobody knows what
        was there before.
        """
        if self.contradiction:
            raise RequestError(self.contradiction)
        before = sorted(self._start_blocks(), key=lambda row: (-row[1], row[0]))
        keys, sizes = np.array(before, np.int64).reshape(-1, 2).T
        start = Requests.from_columns(np.full(len(keys), True), sizes, keys)
        return start + self.history.requests_and_refused

    def simulate(
        self, settings: AllocatorSettings | str = "", capacity: int | str | None = None
    ) -> AllocatorRun:
        """Return what the caching allocator would have made of it, from an empty cache on.

        With nothing given it is the `replay`: its own settings, from its own start.
        """
        if not settings and capacity is None and not self.contradiction:
            return self.replay
        return super().simulate(settings, capacity)

    @cached_property
    def timeline(self) -> Timeline:
        """Requested bytes over time; the first row is what was there before."""
        total = np.concatenate([[self.start_requested_bytes], self.replay.requested_bytes])
        sizes = np.zeros((len(total), len(Category)), np.int64)
        sizes[:, Category.UNKNOWN.column] = total
        return Timeline(np.concatenate([[0], self.times_ns]), sizes)

    def contributors_at(self, row: int) -> tuple[Contributor, ...]:
        """Return what was live after row ``row`` of the timeline, the largest origin first."""
        return _largest_first(self._lives, self._lives.are_live(row))

    def result(self, name: str = "") -> Result:
        """Return the history as a measured window: its peak, and what it made and kept."""
        lives, timeline = self._lives, self.timeline
        peak_row = timeline.peak_row
        live = self.contributors_at(peak_row)
        retained = _largest_first(
            lives, (lives.begins > 0) & lives.are_live(len(timeline.times_ns) - 1)
        )
        at_peak = CategoryBytes(unknown=int(timeline.total[peak_row]))
        at_end = CategoryBytes(unknown=sum(c.size_bytes for c in retained))
        return Result(
            name=name,
            device=self.name,
            estimated=False,
            peak=Peak(
                at_peak.total, int(timeline.times_ns[peak_row]), at_peak, at_peak, live, live
            ),
            retained=Retained(at_end.total, at_end, retained),
            counters=replace(self.replay.peak, estimated=self.misplaced_count > 0),
            has_backward=any(who.phase is Phase.BACKWARD for who, _ in lives.groups),
            notes=tuple(self._notes()),
        )

    def picture(self) -> Picture:
        """The timeline, sampled, with the origins that held most."""
        keys, calls = tuple(self._rows), Counter[str]()
        for who, members in self._lives.groups:
            calls[who.operator] += len(members)
        return with_holders(
            sketch_timeline(self.timeline),
            self._lives,
            calls,
            (),
            lambda place: self.sites[keys[place]].stack,
        )

    def _misplaced_count(self, run: AllocatorRun) -> int:
        return len(run.misplaced_rows(self.history.address))

    def _start_blocks(self) -> Iterator[tuple[int, int]]:
        for segment in self.start:
            for block in segment.blocks:
                if block.key != NO_KEY:
                    yield block.key, block.requested_bytes

    @cached_property
    def _rows(self) -> dict[int, tuple[int, int, int]]:
        """By its key the life of each allocation over the rows of the timeline, and its bytes."""
        requests = self.history.requests
        end = len(requests) + 1
        lives_by_block = {key: (0, end, size) for key, size in self._start_blocks()}
        columns = (requests.kind, requests.key, requests.size_bytes)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for row, (kind, key, size) in enumerate(rows, start=1):
            if kind == Request.ALLOC:
                lives_by_block[key] = (row, end, size)
            elif kind == Request.FREE:
                begin, _, size_bytes = lives_by_block[key]
                lives_by_block[key] = (begin, row, size_bytes)
        return lives_by_block

    @cached_property
    def _lives(self) -> StorageLives:
        keys, rows = tuple(self._rows), np.array([*self._rows.values()], np.int64).reshape(-1, 3)
        begins, ends, sizes = rows.T
        groups = grouped(range(len(keys)), lambda place: self.sites[keys[place]].origin)
        return StorageLives(begins, ends, sizes, tuple(groups))

    def _notes(self) -> Iterator[str]:
        if self.contradiction and len(self.history.row_count):
            yield f"{self.contradiction}; it is shown alone, as if nothing had been there before it"
        elif self.contradiction:
            yield f"{self.contradiction}; this is what was alive when the snapshot was written"
        elif not len(self.history.row_count):
            yield "the snapshot has no history: this is what was alive when it was written"
        elif self.begins_in_the_middle:
            yield (
                f"the history begins in the middle: {format_size(self.start_requested_bytes)} were "
                "in place before its first entry, and of these only those that are there at its "
                "end have a stack"
            )
        if self.misplaced_count:
            yield (
                f"the replay puts {self.misplaced_count} allocations elsewhere than torch did, so "
                "its allocated and reserved bytes are estimated"
            )
        for refusal in self.history.refused:
            yield (
                f"the device ran out of memory: it refused {format_size(refusal.size_bytes)} at "
                f"entry {refusal.entry} of the history"
            )


def _largest_first(lives: StorageLives, wanted: NDArray[np.bool_]) -> tuple[Contributor, ...]:
    contributors = lives.contributors(wanted)
    return tuple(sorted(contributors, key=lambda c: (-c.size_bytes, c.operator, str(c.source))))


def read_snapshot(data: object, device: Device | int | None = None) -> Snapshot:
    """Return one device of what ``torch.cuda.memory._snapshot()`` gave, by default the busiest.

    The list of segments that ``torch.cuda.memory_snapshot()`` gives is one without a history.
    Raises `SnapshotError` for anything else, and `DeviceError` for a device that is not in it.
    """
    with _errors_of_snapshots():
        traces, segments, settings = _parts(data)
        number = _busiest(traces, segments) if device is None else _number_of(device, traces)
        return _read_device(traces[number], segments, settings, number)


def read_snapshots(data: object) -> list[Snapshot]:
    """Return each device of a snapshot that has memory or a history, the fullest first.

    Raises `SnapshotError`.
    """
    with _errors_of_snapshots():
        traces, segments, settings = _parts(data)
        used = [n for n, held in enumerate(_held_bytes(traces, segments)) if any(held)]
        numbers = used or [_busiest(traces, segments)]
        devices = [_read_device(traces[n], segments, settings, n) for n in numbers]
    return sorted(devices, key=lambda one: (not one.history.refused, -max(one.timeline.total)))


_Traces = Sequence[Sequence[TraceEntry]]
_Segments = Sequence[Mapping[str, object]]


@contextlib.contextmanager
def _errors_of_snapshots() -> Iterator[None]:
    """Raise `SnapshotError` for whatever a file may hold that is no snapshot."""
    try:
        yield
    except (*WRONG, AssertionError, OverflowError) as error:
        raise SnapshotError(
            f"this is no snapshot of torch's allocator: {told_damage(error)}; write one "
            "with torch.cuda.memory._dump_snapshot(path) after _record_memory_history()"
        ) from None


def _parts(data: object) -> tuple[_Traces, _Segments, AllocatorSettings]:
    """Return a list of entries for each device, the segments of all, and the settings."""
    if isinstance(data, list) and data:
        data = {"segments": data}
    if not isinstance(data, dict) or "segments" not in data:
        raise ValueError("it has no segments")
    segments = checked_list(data["segments"])
    traces = list(checked_list(data.get("device_traces") or []))
    last = max((whole_number(segment.get("device", 0)) for segment in segments), default=-1)
    if last > _MOST_DEVICES:
        raise ValueError(f"it has memory of device {last}")
    traces += [[] for _ in range(last + 1 - len(traces))]
    return traces, segments, _settings(data.get("allocator_settings") or {})


def _read_device(
    entries: Sequence[TraceEntry], segments: _Segments, settings: AllocatorSettings, number: int
) -> Snapshot:
    for entry in checked_list(entries):
        _check_numbers(entry)
    mine = [segment for segment in segments if segment.get("device", 0) == number]

    def read(
        entries: Sequence[TraceEntry],
        start: tuple[PlacedSegment, ...],
        pools: Pools,
        contradiction: str = "",
    ) -> Snapshot:
        history = read_history(entries, start, pools)
        times_ns = _times_ns(entries, history)
        sites = {**sites_of_start(start, mine), **sites_of(entries)}
        return Snapshot(number, settings, start, history, times_ns, sites, contradiction)

    pools = default_pools()
    try:
        return read(entries, BackwardsLayout(mine, settings, pools).take_back(entries), pools)
    except RequestError as error:
        # A recording that was ended before the snapshot was written, or that lacks entries.
        alone = read(entries, (), default_pools(), error.sentence)
        pools = default_pools()
        alive = BackwardsLayout(mine, settings, pools).take_back(())
        held = read((), alive, pools, error.sentence)
    return max(alone, held, key=lambda one: max(one.timeline.total))


def _number_of(device: Device | int, traces: _Traces) -> int:
    """Return the number of the device that is meant; ``cuda`` is the one that allocated."""
    name = f"cuda:{device}" if isinstance(device, int) else device_text(device)
    there = [f"cuda:{n}" for n, entries in enumerate(traces) if entries or ":" in name]
    return int(resolve_device(name, there, "the snapshot").partition(":")[2])


def _check_numbers(entry: Mapping[str, object]) -> None:
    """Raise `ValueError` for an entry whose numbers no machine has."""
    for name in ("addr", "size", "time_us"):
        whole_number(entry.get(name, 0))
    if not isinstance(entry.get("stream", 0), int):
        raise ValueError(f"{shown(entry['stream'])} is no stream")


def _settings(options: Mapping[str, object]) -> AllocatorSettings:
    """Return the settings that torch says it has; the defaults where a release says nothing."""
    settings = AllocatorSettings()
    split = options.get("max_split_size", -1)
    if isinstance(split, int) and split > 0:
        settings = replace(settings, max_split_bytes=split)
    threshold = options.get("garbage_collection_threshold", 0.0)
    if isinstance(threshold, float):
        settings = replace(settings, garbage_collection_threshold=threshold)
    divisions = options.get("roundup_power2_divisions")
    if isinstance(divisions, dict) and len(divisions) == len(settings.power2_divisions):
        settings = replace(settings, power2_divisions=tuple(divisions.values()))
    return replace(settings, expandable_segments=bool(options.get("expandable_segments", False)))


def _busiest(traces: _Traces, segments: _Segments) -> int:
    """Return the device with the longest history; without any, the one that holds most."""
    held_bytes = _held_bytes(traces, segments)
    if not any(any(pair) for pair in held_bytes):
        raise SnapshotError(
            "the snapshot has no history and no memory: call "
            "torch.cuda.memory._record_memory_history() before the code to look at"
        )
    return max(range(len(held_bytes)), key=lambda number: held_bytes[number])


def _held_bytes(traces: _Traces, segments: _Segments) -> list[tuple[int, int]]:
    """Return the entries of the history and the reserved bytes of each device."""
    sizes = [0] * len(traces)
    for segment in segments:
        sizes[whole_number(segment.get("device", 0))] += whole_number(segment["total_size"])
    return [(len(entries), size) for entries, size in zip(traces, sizes, strict=True)]


def _times_ns(entries: Sequence[TraceEntry], history: History) -> NDArray[np.int64]:
    """When each request was made, from the first entry on: int64, shape (T,)."""
    times = np.array([entry.get("time_us", 0) for entry in entries], np.int64) * 1000
    times -= times[0] if len(times) else 0
    first_entry = np.searchsorted(history.row_count, np.arange(1, len(history.requests) + 1))
    return np.maximum.accumulate(times[first_entry]) if len(times) else times


# torch joins an operator and its overload with an underscore: ``add_Tensor``, ``sum_dim_IntList``.
_OVERLOAD: Final = r"(?:out|dim|int|self|start|dtype|device|memory_format|names)"
_OPERATOR: Final = re.compile(rf"at::_ops::(\w+?)(?:_(?:{_OVERLOAD}+|{_OVERLOAD}*[A-Z]\w*))?::")
_LONGEST_NAME: Final = 300
"""Operators have names of up to 60 letters; a frame with far more is none of an operator's."""
_MOST_DEVICES: Final = 127
"""torch numbers its devices in 8 bits."""
# On a simulated GPU torch lies among what was fetched for that.
# A file, the code of `python -c`, and what was typed into Python.
_PYTHON: Final = re.compile(r"\.py$|^<(string|stdin|ipython-input-.*)>$")
_LIBRARY: Final = re.compile(
    r"[/\\](?:site-packages|dist-packages|lib[/\\]python3\.\d+|pytest-torchmem[/\\]simulate)[/\\]"
)
_ENGINE: Final = "torch::autograd::Engine"
_OPTIMIZER: Final = re.compile(r"[/\\]torch[/\\]optim[/\\]")


@dataclass(frozen=True, slots=True)
class Site:
    """The place that an allocation was made from.

    Attributes:
        origin: The outermost ATen operator on the stack, the innermost line of Python outside of
            libraries, and the phase: BACKWARD below autograd's engine, OPTIMIZER below
            ``torch.optim``, PREEXISTING for what was there before the history, FORWARD otherwise.
            Nobody knows what the memory was for.
        stack: The calls around it, innermost first: those of Python, or of C++ where there are
            none, as in autograd's threads.
    """

    origin: Contributor
    stack: tuple[Source, ...]


def sites_of(entries: Sequence[TraceEntry]) -> dict[int, Site]:
    """Return the site of each allocation of a history, by its key."""
    read = _reader()
    allocs = (entry for entry in entries if entry["action"] == "alloc")
    return {key: read(entry.get("frames", ())) for key, entry in enumerate(allocs)}


def sites_of_start(
    start: Sequence[PlacedSegment], segments: Sequence[Mapping[str, object]]
) -> dict[int, Site]:
    """Return the site of what was there before: known where it is there at the end, too."""
    read, frames = _reader(Phase.PREEXISTING), dict[int, Sequence[StackFrame]]()
    for block in (block for segment in segments for block in checked_list(segment["blocks"])):
        if "address" in block:
            frames[block["address"]] = block.get("frames", ())
    return {
        block.key: read(frames.get(block.address, ()))
        for segment in start
        for block in segment.blocks
        if block.key != NO_KEY
    }


def _reader(phase: Phase | None = None) -> Callable[[Sequence[StackFrame]], Site]:
    """Return a function that reads stacks, of which many are one object in a snapshot.

    Where they are not, their sites have one stack all the same.
    """
    sites: dict[int, Site] = {}
    stacks: dict[tuple[Source, ...], tuple[Source, ...]] = {}

    def read(frames: Sequence[StackFrame]) -> Site:
        if id(frames) not in sites:
            site = _site(frames, phase)
            sites[id(frames)] = Site(site.origin, stacks.setdefault(site.stack, site.stack))
        return sites[id(frames)]

    return read


def _site(frames: Sequence[StackFrame], phase: Phase | None) -> Site:
    operators = [
        match[1] for frame in frames if (match := _OPERATOR.match(frame["name"], 0, _LONGEST_NAME))
    ]
    python = [frame for frame in frames if _PYTHON.search(frame["filename"])]
    own = [frame for frame in python if not _LIBRARY.search(frame["filename"])] or python
    # What a library generates, such as the methods of a dataclass, is named like what was typed.
    own = sorted(own, key=lambda frame: frame["filename"].startswith("<"))
    source = Source(own[0]["filename"], own[0]["line"], own[0]["name"]) if own else None
    if phase is None and any(frame["name"].startswith(_ENGINE) for frame in frames):
        phase = Phase.BACKWARD
    elif phase is None:
        steps = any(_OPTIMIZER.search(frame["filename"]) for frame in python)
        phase = Phase.OPTIMIZER if steps else Phase.FORWARD
    # A frame of C++ whose file torch does not know is said to be in ``??``.
    stack = tuple(
        Source(frame["filename"].replace("??", ""), frame["line"], frame["name"])
        for frame in python or frames
    )
    operator = f"aten::{operators[-1]}" if operators else ""
    return Site(Contributor(Category.UNKNOWN, 0, 0, operator, "", source, phase), stack)
