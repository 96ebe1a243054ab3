"""What a recording lacks is found, and what it has is not called missing."""

from __future__ import annotations

import pytest

from pytest_torchmem.analysis.pipeline import analyze_trace
from pytest_torchmem.analysis.storages.timeline import Reconciliation
from pytest_torchmem.values.trace import MarkKind, Ownership
from tests.builders import Block, TraceBuilder


def test_a_survivor_that_was_made_in_the_recording_is_explained():
    builder = TraceBuilder()
    block = builder.alloc(64)
    builder.owner(block, Ownership.SURVIVOR, builder.mark(MarkKind.STEP))
    profile = analyze_trace(builder.build())
    assert (profile.unexplained_bytes, profile.result().blind_spots) == (0, ())


def test_a_survivor_from_nowhere_is_unseen_and_is_no_part_of_the_footprint():
    builder = TraceBuilder()
    block = builder.alloc(64)
    builder.free(block)
    builder.owner(block, Ownership.SURVIVOR, builder.mark(MarkKind.STEP))
    profile = analyze_trace(builder.build())
    assert profile.unexplained_bytes == 64
    assert profile.peak.total == 64
    assert (
        profile.result()
        .blind_spots[0]
        .startswith("64 B that are alive at the end were made unseen")
    )


def test_memory_of_another_gpu_is_named_and_that_of_the_cpu_is_not():
    builder = TraceBuilder(devices=("cuda:0", "cuda:1", "cpu"))
    builder.alloc(64, device=0)
    builder.alloc(128, device=1)
    builder.free(builder.alloc(256, device=1))
    builder.alloc(512, device=2)
    trace = builder.build()
    assert analyze_trace(trace, "cuda:0").result().blind_spots == (
        "384 B were allocated on cuda:1, which is not measured",
    )
    assert len(analyze_trace(trace, "cpu").result().blind_spots) == 2


@pytest.mark.parametrize(("counted_bytes", "unrecorded_bytes"), [(1192, 0), (1292, 100), (1100, 0)])
def test_a_peak_that_was_counted_and_not_recorded_is_told(counted_bytes, unrecorded_bytes):
    """Frees before the peak make room. A body that resets the counters makes them say less."""
    builder = TraceBuilder(devices=("cuda:0",))
    before = builder.existing(64, Ownership.PARAMETER)
    builder.free(before)
    builder.free(builder.alloc(256))
    trace = builder.build()
    names = ("requested", "allocated", "active", "reserved")
    trace.meta["counters"] = dict.fromkeys(names, counted_bytes)
    trace.meta["counters_before"] = dict.fromkeys(names, 1000)
    profile = analyze_trace(trace)
    assert profile.reconciliation.unrecorded_bytes == unrecorded_bytes
    told = [spot for spot in profile.result().blind_spots if "the allocator's own peak" in spot]
    assert bool(told) == bool(unrecorded_bytes)


def test_what_survives_within_a_larger_storage_is_explained():
    builder = TraceBuilder()
    file = builder.alloc(4096)
    part = Block(99, file.ptr + 1024, 512)
    builder.read(part)
    builder.owner(part, Ownership.SURVIVOR, builder.mark(MarkKind.STEP))
    profile = analyze_trace(builder.build())
    assert (profile.unexplained_bytes, profile.result().blind_spots) == (0, ())


@pytest.mark.parametrize(("offset", "unseen_bytes"), [(4095, 0), (4096, 512)])
def test_what_survives_right_behind_a_storage_is_no_part_of_it(offset, unseen_bytes):
    builder = TraceBuilder()
    file = builder.alloc(4096)
    survivor = Block(99, file.ptr + offset, 512)
    builder.owner(survivor, Ownership.SURVIVOR, builder.mark(MarkKind.STEP))
    assert analyze_trace(builder.build()).unexplained_bytes == unseen_bytes


def test_a_total_of_all_threads_tells_what_others_hold_between_operators():
    """Threads that share an operator's work have 700 B of scratch while its second event comes."""
    builder = TraceBuilder()
    with builder.op("aten::softmax"):
        builder.alloc(10)
        builder.free(builder.alloc(20))
    first = builder.alloc(30)
    builder.free(first)
    builder.alloc(40)
    trace = builder.build()
    seen = [10, 30, 10, 40, 10, 50]
    others = [0, 700, 0, 50, 50, 8]
    trace.allocations["total_allocated"] = [100 + a + b for a, b in zip(seen, others, strict=True)]
    assert analyze_trace(trace).unexplained_bytes == 700
    trace.meta["totals_of_all_threads"] = True
    profile = analyze_trace(trace)
    assert (profile.others_bytes, profile.unexplained_bytes) == (50, 0)


def test_what_others_free_is_not_looked_for_where_they_make_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The look takes as much memory as all else that a long body's allocations need."""
    monkeypatch.setattr(Reconciliation, "_freed_again", property(lambda _: pytest.fail("a look")))
    builder = TraceBuilder()
    builder.free(builder.alloc(10))
    trace = builder.build()
    trace.meta["totals_of_all_threads"] = True
    trace.allocations["total_allocated"] = [110, 100]
    profile = analyze_trace(trace)
    assert (profile.others_bytes, profile.unexplained_bytes) == (0, 0)
    trace.allocations["total_allocated"] = [110, 104]
    with pytest.raises(pytest.fail.Exception):
        analyze_trace(trace).others_bytes  # noqa: B018 - it is computed when asked for


def test_what_a_thread_made_is_gone_once_the_recorded_one_frees_it():
    builder = TraceBuilder()
    builder.alloc(10)
    for _ in range(2):
        made = builder.unheard_of(500)
        with builder.op("aten::sum", reads=[made]):
            pass
        builder.free(made)
    trace = builder.build()
    trace.meta["totals_of_all_threads"] = trace.meta["live_at_start_known"] = True
    # The second was made when the first was gone.
    trace.allocations["total_allocated"] = [10, 10, 10]
    assert analyze_trace(trace).others_bytes == 500
    # Both were there at the same time.
    trace.allocations["total_allocated"] = [10, 510, 10]
    assert analyze_trace(trace).others_bytes == 1000
