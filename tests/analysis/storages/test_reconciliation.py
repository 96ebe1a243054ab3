"""What a recording lacks is found, and what it has is not called missing."""

from __future__ import annotations

import pytest

from pytest_torchmem.analysis.pipeline import analyze_trace
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


@pytest.mark.parametrize(
    ("parts", "unseen_bytes"),
    [
        ([(0, 4096), (64, 1024), (1088, 3008)], 4096),
        ([(0, 512), (0, 512)], 512),
        ([(0, 512), (256, 512), (1024, 8)], 776),
    ],
)
def test_memory_that_was_unseen_counts_once_where_storages_overlap(parts, unseen_bytes):
    """As the tensors of a file that ``torch.load`` maps lie within the file."""
    builder = TraceBuilder()
    builder.alloc(16)
    mark = builder.mark(MarkKind.STEP)
    for number, (offset, size) in enumerate(parts):
        builder.owner(Block(90 + number, 1 << 40 | offset, size), Ownership.SURVIVOR, mark)
    assert analyze_trace(builder.build()).unexplained_bytes == unseen_bytes


def test_frees_without_a_total_say_nothing_of_what_reconciles():
    """The recorder's library tells no totals; what was there before is freed with its size."""
    builder = TraceBuilder()
    before = [builder.existing(size, Ownership.PARAMETER) for size in (100, 200)]
    builder.alloc(10)
    for block in before:
        builder.free(block)
    trace = builder.build()
    assert analyze_trace(trace).result().blind_spots == ()
    trace.allocations["total_allocated"] = [310, 210, 14]
    assert analyze_trace(trace).unexplained_bytes == 4


@pytest.mark.parametrize(
    ("asked_bytes", "requests", "in_use_bytes", "told"),
    [
        (1024, 1, 0, "1.0 KiB of pinned host memory were made, of which at most 0 B are"),
        (1024, 2, 512, "1.0 KiB of pinned host memory were made, of which at most 512 B are"),
        (1024, 2, 4096, "1.0 KiB of pinned host memory were made, of which at most 1.0 KiB are"),
        (800, 100, 8, ""),
        (0, 0, 4096, ""),
    ],
)
def test_pinned_memory_is_told_and_numbers_that_the_host_reads_are_not(
    asked_bytes, requests, in_use_bytes, told
):
    builder = TraceBuilder(devices=("cuda:0",))
    builder.alloc(16)
    trace = builder.build()
    names = ("requested", "allocated", "active", "reserved")
    before = {"pinned": 5000, "pinned_requests": 7, "pinned_in_use": 4096}
    trace.meta["counters_before"] = dict.fromkeys(names, 0) | before
    trace.meta["counters"] = dict.fromkeys(names, 16) | {
        "pinned": 5000 + asked_bytes,
        "pinned_requests": 7 + requests,
        "pinned_in_use": in_use_bytes,
    }
    (said,) = analyze_trace(trace).result().blind_spots or ("",)
    assert said.startswith(told)
    assert bool(said) == bool(told)
