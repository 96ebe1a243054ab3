"""The metrics of events, beside what torch's own evaluation said of the same profiles."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.profiler import DeviceType, profile

from pytest_torchmem import analyze
from pytest_torchmem.analysis.events.averages import find_total
from pytest_torchmem.analysis.events.device_queue import Intervals, find_device_queue
from pytest_torchmem.analysis.events.op_tree import build_op_tree
from pytest_torchmem.measuring.events import Events
from pytest_torchmem.store.traces import load_trace
from pytest_torchmem.values.trace import (
    DEVICE_EVENT,
    EVENT,
    DeviceEventKind,
    EventKind,
    Scope,
    Trace,
)
from tests.analysis.events.recorded_metrics import (
    FILE,
    LOST,
    NEVER,
    PROFILES,
    Profile,
    made_up,
)

RECORDED: dict[str, dict[str, list[int]]] = json.loads(FILE.read_text())["profiles"]
KINDS = {
    "cudaLaunchKernel": DeviceEventKind.LAUNCH,
    "gemm": DeviceEventKind.KERNEL,
    "Memcpy HtoD": DeviceEventKind.COPY,
}


def trace_from(profile: Profile) -> Trace:
    strings = dict.fromkeys(str(name) for name, *_ in (*profile.events, *profile.device))
    numbers = {text: number for number, text in enumerate(strings)}
    events = np.zeros(len(profile.events), EVENT)
    for row, (name, start, end, parent) in enumerate(profile.events):
        events[row]["name"], events[row]["parent"] = numbers[name], parent
        events[row]["start_ns"], events[row]["end_ns"] = start, end
        events[row]["end"] = row + 1
        is_python = name.endswith("main") or "step" in name
        events[row]["kind"] = EventKind.PY_CALL if is_python else EventKind.TORCH_OP
        above = parent
        while above >= 0:
            events[above]["end"] = row + 1
            above = events[above]["parent"]
    events["file"] = events["sequence"] = -1
    events["scope"] = Scope.FUNCTION
    device = [
        (KINDS[name], correlation, start, end, numbers[name], -1, -1)
        for name, _, correlation, start, end in profile.device
    ]
    return Trace(
        events=events, device_events=np.array(device, DEVICE_EVENT), strings=tuple(strings)
    )


@pytest.fixture(params=PROFILES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def events(name: str) -> Events:
    return Events.of(trace_from(PROFILES[name]))


def test_times_and_queue_depths_are_those_of_torchs_evaluation(name: str, events: Events) -> None:
    metrics, theirs = events.metrics, RECORDED[name]
    durations = [end - start for _, start, end, _ in PROFILES[name].events]
    assert metrics.duration_ns.tolist() == durations
    assert metrics.self_time_ns.tolist() == theirs["self_time_ns"]
    assert metrics.queue_depth.tolist() == theirs["queue_depth"]
    assert metrics.idle_ns.tolist() == theirs["idle_ns"]


def test_events_are_ranked_as_by_torch(name: str, events: Events) -> None:
    assert [event.row for event in events.ranked(10)] == RECORDED[name]["ranked"]
    assert [event.row for event in events.ranked(3)] == RECORDED[name]["ranked"][:3]


def test_events_are_walked_through_as_by_torch(name: str, events: Events) -> None:
    assert [event.row for event in events.breadth_first()] == RECORDED[name]["breadth_first"]
    names = [event.name for event in events.depth_first()]
    assert names == [row[0] for row in PROFILES[name].events]


def test_frames_that_never_return_leave_sums_in_bounds(events: Events, name: str) -> None:
    rows = {row.name: row for row in events.averages()}
    assert max(end for _, _, end, _ in PROFILES[name].events) == NEVER
    open_ended = [row for row in rows.values() if row.name.endswith("main")]
    assert [row.total_time_ns for row in open_ended] == [
        NEVER - start for _, start, _, _ in PROFILES[name].events[:3]
    ]
    # The first frame's own time and all within it are its time.
    on_its_thread = [row for row in rows.values() if row.name not in KINDS]
    assert sum(row.self_time_ns for row in on_its_thread) == open_ended[0].total_time_ns
    assert find_total(rows.values()).total_time_ns > NEVER


def test_an_event_says_where_it_is_and_how_long_the_gpu_waited() -> None:
    text = Events.of(trace_from(PROFILES["made up 1"])).optimizable(4)
    assert "event:      train.py(7): step_1" in text
    assert "source:     train.py(7): step_" in text
    assert re.search(r"idle time:  \d+\.\d\d% of \d+\.\d{3} us", text)
    assert "no events" in Events.of(trace_from(PROFILES["no GPU"])).optimizable()


def test_where_one_idle_interval_lies_within_another_both_count_once() -> None:
    """Torch skips the interval behind one that lies within another."""
    starts, ends = np.array([0]), np.array([100])
    idle = Intervals.union([(10, 50), (20, 30), (40, 60), (90, 80)])
    assert idle.shared_ns(starts, ends).tolist() == [50]


def test_a_full_queue_that_runs_dry_is_an_interval() -> None:
    trace = trace_from(PROFILES["made up 1"])
    queue = find_device_queue(build_op_tree(trace))
    falling = queue.falling()
    assert len(falling.begins_ns)
    for begin, end in zip(falling.begins_ns, falling.ends_ns, strict=True):
        assert queue.entry_depth[queue.entry_starts_ns == begin].max() >= 4
        assert queue.entry_depth[queue.entry_starts_ns == end].min() == 0


def test_a_launch_leads_to_no_kernel_that_is_earlier_than_the_one_before() -> None:
    """An operator that launches two kernels gives both its number, and another comes between."""
    launches = [("cudaLaunchKernel", False, n, at, at + 1) for at, n in ((1, 5), (2, 6), (3, 5))]
    kernels = [("gemm", True, n, at, at + 1) for at, n in ((10, 5), (20, 6), (30, 5))]
    events = [("aten::a", at, at + 1, -1) for at in (0, 2, 4, 11, 25, 40)]
    metrics = Events.of(trace_from(Profile(events, [*launches, *kernels]))).metrics
    assert metrics.queue_depth.tolist() == [0, 2, 3, 2, 1, 0]


def test_no_interval_is_lost_where_the_queue_is_empty_several_times() -> None:
    events = Events.of(trace_from(made_up(LOST)))
    falling = events.metrics.queue.falling()
    assert len(falling.begins_ns) == 3
    for begin, end in zip(falling.begins_ns, falling.ends_ns, strict=True):
        during = [e for e in events.ranked(1000) if begin < e.start_ns + e.duration_ns]
        assert any(e.start_ns < end and e.duration_ns < 1e6 for e in during)


# --- profiles of torch's profiler -------------------------------------------------------------


class KinetoEvent:
    """A stand-in for a flat event of a GPU's."""

    def __init__(self, name: str, on_gpu: bool, correlation: int, start: int, end: int) -> None:
        self.name = lambda: name
        self.device_type = lambda: DeviceType.CUDA if on_gpu else DeviceType.CPU
        self.linked_correlation_id = lambda: correlation
        self.start_ns = lambda: start
        self.duration_ns = lambda: end - start
        self.is_user_annotation = lambda: name == "label"
        self.device_index = lambda: 0
        self.device_resource_id = lambda: 7


def profiled(body: Callable[[], object], **options: Any) -> Any:
    with profile(profile_memory=True, record_shapes=True, **options) as finished:
        body()
    return finished


def with_gpu(finished: Any) -> Any:
    """A finished profile of the CPU, as if each ``aten::mm`` of it had run on a GPU."""
    result = finished.profiler.kineto_results
    waiting, flat = list(result.experimental_event_tree()), []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.name in ("aten::mm", "label"):
            number, start = event.correlation_id, event.start_time_ns
            ran = event.end_time_ns + 1000
            if event.name == "aten::mm":
                flat.append(KinetoEvent("cudaLaunchKernel", False, number, start + 1, start + 11))
                flat.append(KinetoEvent("gemm", True, number, ran, ran + 200))
                flat.append(KinetoEvent("Memset (Device)", True, number, ran + 200, ran + 205))
            else:
                flat.append(KinetoEvent("label", True, number, ran, ran + 5000))
    inner = SimpleNamespace(
        use_device="cuda",
        kineto_results=SimpleNamespace(
            experimental_event_tree=result.experimental_event_tree, events=lambda: flat
        ),
    )
    return SimpleNamespace(profiler=inner)


def body() -> None:
    x = torch.ones(32, 32)
    with torch.profiler.record_function("label"):
        for _ in range(3):
            (x @ x).relu()


@pytest.mark.parametrize("options", [{}, {"with_stack": True}])
def test_every_event_of_a_profile_has_its_times(options: dict[str, bool]) -> None:
    finished = profiled(body, **options)
    waiting, theirs = list(finished.profiler.kineto_results.experimental_event_tree()), []
    while waiting:
        event = waiting.pop(0)
        within = sum(child.duration_time_ns for child in event.children)
        theirs.append((event.start_time_ns, event.duration_time_ns - within))
        waiting += event.children
    events = Events.of(finished)
    ours = [(event.start_ns, event.self_time_ns) for event in events.breadth_first()]
    assert sorted(ours) == sorted(theirs)
    assert len(ours) == len(events.tree.trace.events)


def test_kernels_count_for_the_operator_that_launched_them() -> None:
    events = Events.of(with_gpu(profiled(body)))
    rows = {(row.name, row.on_device): row for row in events.averages()}
    assert rows["aten::mm", False].self_device_time_ns == 3 * 205
    assert rows["aten::matmul", False].device_time_ns == 3 * 205
    assert rows["aten::matmul", False].self_device_time_ns == 0
    assert rows["gemm", True].calls == 3
    assert rows["gemm", True].self_device_time_ns == 600
    assert rows["gemm", True].total_time_ns == 0
    # The launch lies within the operator, whose own time is without it.
    assert rows["cudaLaunchKernel", False].self_time_ns == 30
    assert rows["label", True].self_device_time_ns == 5000
    assert "self GPU time in all: 5.615 us" in events.table()
    assert events.metrics.queue_depth.max() >= 1


def test_a_saved_profile_says_the_same(tmp_path: Path) -> None:
    events = Events.of(with_gpu(profiled(body, with_stack=True)))
    events.tree.trace.save(tmp_path / "events.trace")
    again = Events.of(load_trace(tmp_path / "events.trace"))
    assert again.averages(by_inputs=True, by_stack=3) == events.averages(by_inputs=True, by_stack=3)
    assert again.metrics.idle_ns.tolist() == events.metrics.idle_ns.tolist()
    assert again.memory == events.memory
    assert again.labels == events.labels


def test_what_ran_at_the_peak_is_named_from_the_outside_in() -> None:
    x = torch.randn(64, 64)

    def attention() -> None:
        with torch.profiler.record_function("attention"):
            x.double()

    running = analyze(profiled(attention), "cpu").running_at_peak
    assert [span.name for span in running][:2] == ["attention", "aten::to"]
    durations = [span.end_ns - span.begin_ns for span in running]
    assert durations == sorted(durations, reverse=True)


def test_without_kernels_queue_and_idle_time_are_zero() -> None:
    trace = replace(trace_from(PROFILES["made up 1"]), device_events=np.empty(0, DEVICE_EVENT))
    queue = find_device_queue(build_op_tree(trace))
    assert not np.any(queue.depth)
    assert not np.any(queue.idle_ns)
    assert not len(queue.falling().begins_ns)
