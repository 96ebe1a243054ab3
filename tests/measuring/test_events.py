"""The front end over events, beside the public one of torch's profiler on the same profiles."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import profile, record_function, schedule

from pytest_torchmem import TorchmemError, analyze, load, measure
from pytest_torchmem.analysis.events.averages import NUMBERS, Average, find_total
from pytest_torchmem.measuring.events import Events
from pytest_torchmem.record.profiled.from_profiler import kind_by_name
from pytest_torchmem.values.errors import MarkerError
from pytest_torchmem.values.trace import DeviceEventKind, EventKind, Scope
from tests.builders import TraceBuilder

pytestmark = pytest.mark.slow

ADDRESS = re.compile(r"[ _]at[ _]0x[0-9a-f]+")
MS = 1_000_000
OPERATORS = {"cpu_op", "user_annotation", "operator"}
LABEL, OUT = Scope.OTHER, EventKind.OUT_OF_MEMORY


def train(steps: int, finished: profile) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        with record_function("forward"):
            loss = (
                model(torch.ones(8, 16)).sum()
                + torch.cat([torch.ones(step + 1), loss_of(step)]).sum()
            )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        finished.step()


def loss_of(size: int) -> torch.Tensor:
    return torch.full((size + 2,), 2.0)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stacks": {"with_stack": True},
    "verbose": {"with_stack": True, "verbose": True},
    "steps": {"schedule": True},
}


@cache
def imported() -> None:
    """Have torch import what its profiler imports in the first session of a process, within it."""
    with profile(profile_memory=True, with_stack=True) as first:
        train(1, first)


@cache
def finished(options: str) -> Any:
    """A finished profile of three training steps."""
    from torch._C._profiler import _ExperimentalConfig

    imported()
    chosen = dict(OPTIONS[options])
    if chosen.pop("verbose", False):
        chosen["experimental_config"] = _ExperimentalConfig(
            verbose=True, capture_overload_names=True
        )
    if chosen.pop("schedule", False):
        chosen["schedule"] = schedule(wait=0, warmup=1, active=10, repeat=1)
    with profile(record_shapes=True, profile_memory=True, **chosen) as done:
        train(3, done)
    return done


@pytest.fixture(params=OPTIONS)
def done(request: pytest.FixtureRequest) -> Any:
    return finished(str(request.param))


def summed(rows: Iterable[tuple[tuple[Any, ...], tuple[int, ...]]]) -> dict[Any, tuple[int, ...]]:
    """Rows by key. Torch tells built-in methods apart by the address of their object; we do not."""
    found: dict[Any, tuple[int, ...]] = {}
    for key, values in rows:
        before = found.get(key, (0,) * len(values))
        found[key] = tuple(map(int.__add__, before, values))
    return found


def theirs(events: Any, **options: Any) -> dict[Any, tuple[int, ...]]:
    inputs, stack = options.get("group_by_input_shapes"), options.get("group_by_stack_n", 0)
    return summed(
        (
            (
                ADDRESS.sub("", row.key),
                row.overload_name,
                str(row.input_shapes) if inputs else "",
                tuple(ADDRESS.sub("", frame) for frame in row.stack[:stack]),
            ),
            (
                row.count,
                round(row.self_cpu_time_total * 1000),
                round(row.cpu_time_total * 1000),
                row.self_cpu_memory_usage,
                row.cpu_memory_usage,
            ),
        )
        for row in events.key_averages(**options)
    )


def ours(rows: Iterable[Average]) -> dict[Any, tuple[int, ...]]:
    return summed(
        (
            (row.name, row.overload, row.inputs, row.stack),
            (row.calls, row.self_time_ns, row.total_time_ns, row.self_cpu_bytes, row.cpu_bytes),
        )
        for row in rows
    )


def test_averages_are_those_of_key_averages(done: Any) -> None:
    averages = ours(Events.of(done).averages())
    assert averages == theirs(done.events())
    assert len(averages) > 40
    assert list(averages) == list(theirs(done.events()))


def test_averages_by_the_sizes_of_inputs_are_torchs(done: Any) -> None:
    averages = ours(Events.of(done).averages(by_inputs=True))
    assert averages == theirs(done.events(), group_by_input_shapes=True)
    assert len(averages) > len(ours(Events.of(done).averages()))


def test_averages_by_overload_are_torchs() -> None:
    done = finished("verbose")
    averages = Events.of(done).averages(by_overload=True)
    assert ours(averages) == theirs(done.events(), group_by_overload_name=True)
    assert {"Tensor", "out"} & {row.overload for row in averages}


@pytest.mark.parametrize("count", [1, 3])
def test_averages_by_stack_are_torchs_where_it_was_asked_to_be_verbose(count: int) -> None:
    done = finished("verbose")
    averages = Events.of(done).averages(by_stack=count)
    assert ours(averages) == theirs(done.events(), group_by_stack_n=count)
    assert len(averages) > len(Events.of(done).averages())


def test_stacks_are_known_without_being_verbose_and_a_backward_pass_has_its_forwards() -> None:
    rows = Events.of(finished("stacks")).averages(by_stack=3)
    products = {row.stack[:2] for row in rows if row.name == "aten::mm"}
    forward = next(row.stack for row in rows if row.name == "aten::addmm")
    assert any("linear" in frame for frame in forward)
    assert forward[:2] in products


def test_the_total_is_torchs(done: Any) -> None:
    total, expected = find_total(Events.of(done).averages()), done.events().total_average()
    assert total.calls == expected.count
    assert total.self_time_ns == round(expected.self_cpu_time_total * 1000)
    assert total.self_cpu_bytes == expected.self_cpu_memory_usage
    assert total.self_time_ns == round(done.profiler.self_cpu_time_total * 1000)


def test_top_level_calls_are_those_within_no_other() -> None:
    done = finished("plain")
    text = done.key_averages().table(top_level_events_only=True)
    rows = Events.of(done).averages(top_level=True)
    assert {"forward", "aten::ones"} & {row.name for row in rows} == {"forward"}
    assert [row.name for row in rows if row.name not in text and len(row.name) < 50] == []
    calls = [event.name for event in done.events() if event.cpu_parent is None]
    assert sum(row.calls for row in rows) == len(calls)


def test_memory_outside_of_every_call_has_a_row_of_its_own() -> None:
    rows = {row.name: row for row in Events.of(finished("plain")).averages()}
    assert rows["[memory]"].cpu_bytes < 0
    assert "[memory]" not in {row.name for row in Events.of(finished("stacks")).averages()}


def test_the_table_is_sorted_and_says_what_it_left_out() -> None:
    events = Events.of(finished("verbose"))
    lines = events.table("allocated_bytes", 3, by_inputs=True, by_overload=True).splitlines()
    largest = sorted((row.allocated_bytes for row in events.averages(by_inputs=True)), reverse=True)
    assert "overload" in lines[0]
    assert lines[0].index("allocated") < lines[0].index("inputs")
    assert largest[0] > largest[5]
    assert re.fullmatch(r"\.\.\. and \d+ more", lines[4])
    assert "GPU" not in lines[0]
    with pytest.raises(ValueError, match="sort_by must be one of calls, self_time_ns"):
        events.table("speed")


def test_a_table_can_be_sorted_by_every_number() -> None:
    events = Events.of(finished("plain"))
    for column in NUMBERS:
        first = max(events.averages(), key=lambda row: int(getattr(row, column)))
        shown = events.table(column, 5).splitlines()[1].partition("  ")[0]
        assert first.name.startswith(shown.removesuffix("...")), column  # long names are cut


def test_what_was_allocated_counts_without_frees() -> None:
    b = TraceBuilder()
    with b.op("aten::outer"):
        first = b.alloc(100)
        with b.op("aten::inner"):
            b.alloc(40)
        b.free(first)
    rows = {row.name: row for row in Events.of(b.build()).averages()}
    outer = rows["aten::outer"]
    assert (outer.self_cpu_bytes, outer.cpu_bytes) == (0, 40)
    assert (outer.self_allocated_bytes, outer.allocated_bytes) == (100, 140)


def test_bytes_of_a_gpu_are_counted_apart() -> None:
    b = TraceBuilder(("cpu", "cuda:0"))
    with b.op("aten::outer"):
        b.alloc(7)
        b.alloc(100, device=1)
        with b.op("aten::inner"):
            b.alloc(40, device=1)
    rows = {row.name: row for row in Events.of(b.build()).averages()}
    outer = rows["aten::outer"]
    assert (outer.self_cpu_bytes, outer.cpu_bytes) == (7, 7)
    assert (outer.self_device_bytes, outer.device_bytes) == (100, 140)


# --- memory events, labels, own cost ----------------------------------------------------------


def test_each_allocation_has_its_operator_and_labels() -> None:
    b = TraceBuilder()
    with b.op("step", is_operator=False, scope=LABEL), b.op("aten::mm"), b.op("aten::empty"):
        block = b.alloc(64)
    b.free(block)
    made, freed = Events.of(b.build()).memory
    assert (made.operator, made.labels, made.size_bytes) == ("aten::empty", ("step",), 64)
    assert (freed.operator, freed.labels, freed.size_bytes) == ("", (), -64)
    assert freed.top_level
    assert not made.top_level
    assert freed.time_ns > made.time_ns


def test_top_level_memory_is_what_torch_calls_so() -> None:
    done = finished("plain")
    expected = [e.cpu_memory_usage for e in done.events() if e.name == "[memory]"]
    found = [event.size_bytes for event in Events.of(done).memory if event.top_level]
    assert found == expected
    assert found


def test_an_allocation_that_failed_is_an_event() -> None:
    b = TraceBuilder()
    with b.op("aten::empty", kind=OUT):
        pass
    events = Events.of(b.build())
    (failed,) = events.memory
    assert failed.out_of_memory
    assert failed.size_bytes == 0
    assert "[OutOfMemory]" in {row.name for row in events.averages()}
    assert next(iter(events.depth_first())).name == "[OutOfMemory]"


def test_the_profilers_second_event_of_a_failed_allocation_is_no_row_of_its_own() -> None:
    assert kind_by_name("[OutOfMemory]", on_gpu=True) is None
    assert kind_by_name("Memset (Device)", on_gpu=True) is DeviceEventKind.COPY


def test_labels_and_steps_have_their_times() -> None:
    done = finished("steps")
    spans = Events.of(done).labels
    steps = [span.name for span in spans if span.kind == "step"]
    assert steps[:2] == ["ProfilerStep#1", "ProfilerStep#2"]
    labels = [span for span in spans if span.name == "forward"]
    expected = [e.time_range.elapsed_us() for e in done.events() if e.name == "forward"]
    assert [s.end_ns - s.begin_ns for s in labels] == [round(us * 1000) for us in expected]
    (row,) = (r for r in Events.of(done).averages() if r.name.startswith("ProfilerStep"))
    assert (row.name, row.calls) == ("ProfilerStep*", len(steps))


def test_the_profilers_own_cost_is_known() -> None:
    events = Events.of(finished("plain"))
    assert 0 < events.own_cost_ns < 60_000 * MS
    assert Events.of(TraceBuilder().build()).own_cost_ns == 0


# --- files ------------------------------------------------------------------------------------


def lines_of(path: Path) -> Iterator[tuple[str, int]]:
    for line in path.read_text().splitlines():
        stack, weight = line.rsplit(" ", 1)
        yield ADDRESS.sub("", stack), int(weight)


def test_stacks_by_time_are_those_of_export_stacks(tmp_path: Path) -> None:
    done = finished("verbose")
    done.export_stacks(str(tmp_path / "theirs"), "self_cpu_time_total")
    analyze(done).export(tmp_path / "ours", "stacks", weight="time")
    expected: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for stack, weight in lines_of(tmp_path / "theirs"):
        expected[stack] += weight
        lines[stack] += 1
    found: Counter[str] = Counter()
    for stack, weight in lines_of(tmp_path / "ours"):
        # Ours end in the call itself.
        found[stack.rpartition(";")[0]] += weight
    assert len(expected) > 20
    for stack, weight in expected.items():
        # Torch cuts off the fraction of a microsecond of every call, we that of their sum.
        assert weight - 1 <= found[stack] <= weight + lines[stack] + len(expected), stack


def test_stacks_by_bytes_hold_the_peak(tmp_path: Path) -> None:
    done = finished("stacks")
    analyze(done, "cpu").export(tmp_path / "peak", "stacks")
    weights = dict(lines_of(tmp_path / "peak"))
    assert sum(weights.values()) == analyze(done, "cpu").peak.total
    analyze(done, "cpu").export(tmp_path / "allocated", "stacks", weight="allocated")
    made = [event.size_bytes for event in Events.of(done).memory if event.size_bytes > 0]
    assert 0 < sum(weight for _, weight in lines_of(tmp_path / "allocated")) <= sum(made)
    deepest = max((stack for stack in weights if ";" in stack), key=lambda s: s.count(";"))
    assert re.search(r"test_events\.py\(\d+\):_train;", deepest)


def test_a_recording_of_ours_has_stacks_too(tmp_path: Path) -> None:
    with measure(device="cpu") as block:
        kept = loss_of(1000)
    block.save_trace(tmp_path / "body.trace")
    load(tmp_path / "body.trace").export(tmp_path / "stacks", "stacks")
    ((stack, weight),) = lines_of(tmp_path / "stacks")
    assert weight == kept.nbytes
    assert re.search(r"test_events\.py\(\d+\):_loss_of;aten::", stack)


def test_a_stack_has_a_known_weight(tmp_path: Path) -> None:
    profile = analyze(finished("plain"))
    with pytest.raises(MarkerError, match="export, weight: 'speed' is none of 'peak', 'allocated'"):
        profile.export(tmp_path / "x", "stacks", weight="speed")
    with pytest.raises(MarkerError, match="export, as_: 'flames' is none of 'timeline', 'trace'"):
        profile.export(tmp_path / "x", "flames")  # type: ignore[arg-type]


def test_a_profile_that_has_not_finished_is_refused() -> None:
    with pytest.raises(TorchmemError, match="after it has stopped"):
        Events.of(profile())


def test_the_chrome_trace_has_the_operators_of_torchs(tmp_path: Path) -> None:
    done = finished("plain")
    done.export_chrome_trace(str(tmp_path / "theirs.json"))
    analyze(done, "cpu").export(tmp_path / "ours.json", "trace")
    found = [
        json.loads((tmp_path / name).read_text())["traceEvents"]
        for name in ("theirs.json", "ours.json")
    ]
    expected, slices = (
        sorted((e["ts"], e["name"], e["dur"]) for e in events if e.get("cat") in OPERATORS)
        for events in found
    )
    assert [name for _, name, _ in slices] == [name for _, name, _ in expected]
    assert len(slices) > 100
    for (at, _, took), (their_at, name, they_took) in zip(slices, expected, strict=True):
        assert took == pytest.approx(they_took, abs=0.002), name
        assert at - slices[0][0] == pytest.approx(their_at - expected[0][0], abs=0.002), name
