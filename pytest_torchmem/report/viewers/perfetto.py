"""A profile as a Chrome trace: operators beside memory counters, one for each category.

Perfetto (https://ui.perfetto.dev) and chrome://tracing open it. The format is the "Trace Event
Format" of Chromium, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from pytest_torchmem.analysis.pipeline import MemoryProfile
from pytest_torchmem.analysis.sampling import find_spans
from pytest_torchmem.values.contributors import Category, Phase
from pytest_torchmem.values.json_values import Json
from pytest_torchmem.values.trace import EventKind

_PID: Final = 1
_SPANS_TID: Final = 0
_SHOWN: Final = (EventKind.TORCH_OP, EventKind.PY_CALL)


def chrome_trace(profile: MemoryProfile) -> dict[str, Json]:
    """Return a profile as a JSON value in Chrome's trace event format.

    Times are in microseconds since the start of the recording. ``memory`` has one counter for each
    category that ever held bytes, at every change; ``footprint`` is their sum. There is no
    ``displayTimeUnit``: Perfetto took it for the unit of the times until 2022, and its default is
    the same.
    """
    events = [*_metadata(profile), *_operators(profile), *_counters(profile), *_spans(profile)]
    return {
        "traceEvents": events,
        "otherData": {"device": profile.device, "source": "pytest-torchmem"},
    }


def _metadata(profile: MemoryProfile) -> Iterator[dict[str, Json]]:
    yield _name_event("process_name", 0, f"memory of {profile.device}")
    yield _name_event("thread_name", _SPANS_TID, "regions and phases")
    for number, tid in enumerate(sorted(set(_threads(profile).values()))):
        yield _name_event("thread_name", tid, "main thread" if number == 0 else f"thread {number}")


def _name_event(kind: str, tid: int, name: str) -> dict[str, Json]:
    return {"ph": "M", "pid": _PID, "tid": tid, "name": kind, "args": {"name": name}}


def _threads(profile: MemoryProfile) -> dict[int, int]:
    """Number the threads in the order in which they first appear, from 1."""
    threads: dict[int, int] = {}
    for thread in profile.tree.trace.events["thread"].tolist():
        threads.setdefault(thread, len(threads) + 1)
    return threads


def _operators(profile: MemoryProfile) -> Iterator[dict[str, Json]]:
    tree, events = profile.tree, profile.tree.trace.events
    if not len(events):
        return
    start_ns = int(events["start_ns"].min())
    threads, phases = _threads(profile), tuple(Phase)
    columns = ("kind", "thread", "name", "start_ns", "end_ns")
    rows = zip(*(events[column].tolist() for column in columns), tree.phase.tolist(), strict=True)
    shown_rows = sorted((row for row in rows if row[0] in _SHOWN), key=lambda r: (r[3], -r[4]))
    ends: dict[int, list[int]] = defaultdict(list)
    for kind, thread, name, start, end_ns, phase in shown_rows:
        begin_ns = _begin(ends[thread], start, end_ns)
        yield {
            "ph": "X",
            "pid": _PID,
            "tid": threads[thread],
            "cat": "operator" if kind == EventKind.TORCH_OP else "python",
            "name": tree.trace.strings[name],
            "ts": _microseconds(begin_ns - start_ns),
            "dur": _microseconds(max(0, end_ns - begin_ns)),
            "args": {"phase": phases[phase].value},
        }


def _begin(open_ends: list[int], begin_ns: int, end_ns: int) -> int:
    """Return where a slice begins so that the slices of its thread nest, as the format asks.

    ``record_function`` begins inside the Python call of its ``__enter__`` and outlives it: such a
    slice is moved to the end of the call that it began in.
    """
    while open_ends and (open_ends[-1] <= begin_ns or open_ends[-1] < end_ns):
        begin_ns = max(begin_ns, open_ends.pop())
    open_ends.append(max(end_ns, begin_ns))
    return begin_ns


def _microseconds(time_ns: int) -> float:
    """Return what readers turn back into ``time_ns``, whether they round or cut off.

    Perfetto cuts off: 1.001 µs would be 1000 ns, and a slice that begins as another ends would lie
    in it.
    """
    time_us = time_ns / 1e3
    return time_us if int(time_us * 1e3) == time_ns else math.nextafter(time_us, math.inf)


def _counters(profile: MemoryProfile) -> Iterator[dict[str, Json]]:
    """Yield a counter event for each category when its bytes change, and once at the start."""
    timeline = profile.timeline
    times_us = [_microseconds(at) for at in timeline.times_ns.tolist()]
    for category in Category:
        levels = timeline.of(category).tolist()
        if any(levels):
            yield from _counter(f"memory {category.value}", times_us, levels)
    yield from _counter("memory footprint", times_us, timeline.total.tolist())


def _counter(name: str, times_us: list[float], levels: list[int]) -> Iterator[dict[str, Json]]:
    before = None
    for at, level in zip(times_us, levels, strict=True):
        if level != before:
            yield {"ph": "C", "pid": _PID, "name": name, "ts": at, "args": {"bytes": level}}
        before = level


def _spans(profile: MemoryProfile) -> Iterator[dict[str, Json]]:
    for span in find_spans(profile):
        event = {"pid": _PID, "tid": _SPANS_TID, "cat": span.kind, "name": span.name or span.kind}
        event["ts"] = _microseconds(span.begin_ns)
        if span.end_ns > span.begin_ns:
            yield {**event, "ph": "X", "dur": _microseconds(span.end_ns - span.begin_ns)}
        else:
            yield {**event, "ph": "i", "s": "p"}
