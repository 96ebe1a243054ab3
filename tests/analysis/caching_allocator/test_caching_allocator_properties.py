"""What holds for every sequence of requests, under every setting."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from pytest_torchmem.allocator import (
    AllocatorSettings,
    BlockState,
    PlacedBlock,
    PlacedSegment,
    Request,
    RequestLog,
    Requests,
    fits,
    simulate,
)
from pytest_torchmem.analysis.caching_allocator import expandable
from pytest_torchmem.values.units import KiB, MiB

pytestmark = pytest.mark.slow

CONFS = (
    "",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[1:8,16:2,>:1]",
    "max_split_size_mb:24",
    "max_split_size_mb:24,max_non_split_rounding_mb:64",
    "large_segment_size_mb:32",
    "expandable_segments:True",
    "expandable_segments:True,max_split_size_mb:24",
    "garbage_collection_threshold:0.3,per_process_memory_fraction:0.8",
)
SIZES = st.one_of(
    st.integers(0, 4 * KiB),
    st.integers(1, MiB + 1),
    st.integers(MiB, 12 * MiB),
    st.integers(10 * MiB, 70 * MiB),
    st.sampled_from([MiB, 2 * MiB, 10 * MiB, 20 * MiB, 24 * MiB]),
)
# A busy machine is no reason to fail.
unhurried = settings(deadline=None)
CAPACITIES = st.sampled_from([64 * MiB, 150 * MiB, 400 * MiB])


@st.composite
def logs(draw, streams=2, pools=True):
    """A program with a few dozen live allocations on some streams, and all that can happen."""
    log = RequestLog()
    live = []
    for key in range(draw(st.integers(0, 60))):
        choice = draw(st.integers(0, 11 if pools else 9))
        stream = draw(st.integers(0, streams - 1))
        if choice <= 4 or not live:
            log.alloc(key, draw(SIZES), stream)
            live.append(key)
        elif choice <= 7:
            log.free(live.pop(draw(st.integers(0, len(live) - 1))))
        elif choice == 8:
            log.record_stream(draw(st.sampled_from(live)), stream)
        elif choice == 9:
            if draw(st.booleans()):
                log.empty_cache()
            else:
                log.stream_done(stream)
        elif log.scopes:
            log.end_pool(7, capture=True)
        else:
            log.begin_pool(7, frozenset({0}), capture=True)
    if log.scopes and draw(st.booleans()):
        log.end_pool(7, capture=True)
    return log


@st.composite
def runs(draw):
    log, conf = draw(logs()), draw(st.sampled_from(CONFS))
    parsed = AllocatorSettings.parse(conf)
    capacity = draw(CAPACITIES if parsed.limits_process else st.none() | CAPACITIES)
    result = simulate(log.requests(), parsed, capacity)
    event(f"{len(log.rows) // 10 * 10} requests, out of memory: {bool(result.out_of_memory)}")
    return log.requests(), parsed, capacity, result


def require_disjoint(segments):
    """Raise unless segments lie one behind the other, each wholly covered by its blocks."""
    end = 0
    for segment in segments:
        assert segment.address >= end
        position = segment.address
        for block in segment.blocks:
            assert block.address == position
            assert block.size_bytes > 0
            position += block.size_bytes
        end = segment.address + segment.size_bytes
        assert position == end


@unhurried
@given(runs())
def test_blocks_never_overlap_and_fill_their_segments(run):
    *_, result = run
    require_disjoint(result.segments)


def test_the_check_for_overlaps_can_fail():
    block, next_block = (
        PlacedBlock(0, 1024, BlockState.IN_USE),
        PlacedBlock(512, 512, BlockState.FREE),
    )
    with pytest.raises(AssertionError):
        require_disjoint([PlacedSegment(0, 1536, 0, 0, (block, next_block), True, False)])


def bytes_in(segments, *states):
    return sum(b.size_bytes for s in segments for b in s.blocks if b.state in states)


@unhurried
@given(runs())
def test_bytes_are_conserved(run):
    *_, result = run
    if not len(result.reserved_bytes):
        return
    segments = result.segments
    assert sum(segment.size_bytes for segment in segments) == result.reserved_bytes[-1]
    assert bytes_in(segments, *BlockState) == result.reserved_bytes[-1]
    assert bytes_in(segments, BlockState.IN_USE) == result.allocated_bytes[-1]
    active = bytes_in(segments, BlockState.IN_USE, BlockState.WAITING)
    assert active == result.active_bytes[-1]


@unhurried
@given(runs())
def test_free_parts_of_split_segments_are_what_inactive_split_counts(run):
    _, parsed, _, result = run
    if parsed.expandable_segments:
        assert not result.inactive_split_bytes.any()
        assert not result.segment_count.any()
    elif len(result.reserved_bytes):
        split = [segment for segment in result.segments if len(segment.blocks) > 1]
        assert bytes_in(split, BlockState.FREE) == result.inactive_split_bytes[-1]
        assert len(result.segments) == result.segment_count[-1]


@unhurried
@given(runs())
def test_neighbours_are_never_both_free(run):
    *_, result = run
    for segment in result.segments:
        states = [block.state for block in segment.blocks]
        assert (BlockState.FREE, BlockState.FREE) not in pairwise(states)


@unhurried
@given(runs())
def test_reserved_holds_active_holds_allocated_holds_live_requests(run):
    _, _, capacity, result = run
    assert (result.reserved_bytes >= result.active_bytes).all()
    assert (result.active_bytes >= result.allocated_bytes).all()
    # What waits for other streams still counts as requested, so compare with what is active.
    assert (result.active_bytes >= result.requested_bytes).all()
    assert (result.reserved_bytes >= result.active_bytes + result.inactive_split_bytes).all()
    assert (result.allocated_bytes >= 0).all()
    assert (result.requested_bytes >= 0).all()
    if capacity is not None:
        assert (result.reserved_bytes <= capacity).all()


@unhurried
@given(runs())
def test_requested_is_what_was_asked_for_and_not_freed(run):
    requests, *_, result = run
    if Request.RECORD_STREAM in requests.kind or result.out_of_memory:
        return
    live, expected = {}, []
    for kind, key, size in zip(requests.kind, requests.key, requests.size_bytes, strict=True):
        if kind == Request.ALLOC:
            live[key] = int(size)
        elif kind == Request.FREE:
            del live[key]
        expected.append(sum(live.values()))
    assert result.requested_bytes.tolist() == expected


@unhurried
@given(runs())
def test_a_second_run_is_the_same(run):
    requests, parsed, capacity, result = run
    again = simulate(requests, parsed, capacity)
    for name in ("requested", "allocated", "active", "reserved", "inactive_split"):
        first = getattr(result, f"{name}_bytes")
        assert (first == getattr(again, f"{name}_bytes")).all()
    assert (result.address == again.address).all()
    assert result.segments == again.segments
    assert result.out_of_memory == again.out_of_memory


@unhurried
@given(runs(), st.data())
def test_what_happens_later_does_not_change_what_was(run, data):
    requests, parsed, capacity, result = run
    cut = data.draw(st.integers(0, len(requests)))
    columns = ("kind", "key", "size_bytes", "stream", "pool")
    earlier = type(requests)(
        **{name: getattr(requests, name)[:cut] for name in columns},
        completions_given=requests.completions_given,
    )
    shorter = simulate(earlier, parsed, capacity)
    assert (shorter.address == result.address[:cut]).all()
    assert (shorter.reserved_bytes == result.reserved_bytes[:cut]).all()


@unhurried
@given(logs(pools=False), st.sampled_from(CONFS))
def test_an_empty_cache_with_nothing_live_reserves_nothing(log, conf):
    parsed = AllocatorSettings.parse(conf)
    kept = {}
    for kind, key, *_ in log.rows:
        if kind == Request.ALLOC:
            kept[key] = True
        elif kind == Request.FREE:
            del kept[key]
    for key in kept:
        log.free(key)
    log.empty_cache()
    result = simulate(log.requests(), parsed, 4000 * MiB)
    assert result.reserved_bytes[-1] == 0
    assert result.active_bytes[-1] == 0
    assert result.requested_bytes[-1] == 0
    assert result.segment_count[-1] == 0
    assert result.segments == ()


def unlimited_run(log, parsed, addresses_for_bytes):
    """Run with as many pages as are asked for, in the address ranges of a device of that size."""
    range_bytes = addresses_for_bytes + addresses_for_bytes // 8
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expandable, "ENDLESS_RANGE_BYTES", range_bytes)
        return simulate(log.requests(), parsed)


def hole_in_front():
    """A hole of 40 MiB, 1 MiB kept behind it, and 60 MiB that find no room in 100 MiB."""
    log = RequestLog()
    for key, size_bytes in enumerate([13806593, 28135425, 1048577]):
        log.alloc(key, size_bytes)
    log.free(0)
    log.free(1)
    log.empty_cache()
    log.alloc(3, 62914561)
    return log


@unhurried
@given(logs(), st.sampled_from(CONFS[:-1]))
@example(log=hole_in_front(), conf="expandable_segments:True")
def test_what_fits_exactly_fits(log, conf):
    """A device with just the peak of an unlimited run never has to give anything back.

    An expandable segment has an eighth more addresses than the device has memory. Where that is
    too little for the holes in it, or lets best fit choose another block, a device with the peak
    of a run with endless addresses may need more: it fits if the run with its addresses does.
    """
    parsed = AllocatorSettings.parse(conf)
    peak_bytes = simulate(log.requests(), parsed).peak.reserved
    if not peak_bytes:
        return
    unlimited = unlimited_run(log, parsed, peak_bytes)
    assert parsed.expandable_segments or unlimited.peak.reserved == peak_bytes
    fit = fits(log.requests(), peak_bytes, parsed)
    is_enough = unlimited.peak.reserved <= peak_bytes
    event(f"expandable: {parsed.expandable_segments}, enough: {is_enough}")
    assert (bool(fit) and fit.retry_count == 0) == is_enough
    if is_enough:
        assert fit.peak_reserved_bytes == unlimited.peak.reserved


def part_of(requests, rows):
    columns = (requests.kind, requests.key, requests.size_bytes, requests.stream, requests.pool)
    return Requests(*(column[rows] for column in columns))


def plain(requests):
    """Leave out what no layout tells: allocations without a block, and uses by other streams."""
    empty = requests.key[(requests.kind == Request.ALLOC) & (requests.size_bytes == 0)]
    kinds = np.isin(requests.kind, [Request.ALLOC, Request.FREE, Request.EMPTY_CACHE])
    named = requests.kind != Request.EMPTY_CACHE
    return part_of(requests, kinds & ~(named & np.isin(requests.key, empty)))


@unhurried
@given(logs(), st.sampled_from(CONFS[:-1]), st.integers(0, 100))
def test_a_run_goes_on_from_the_layout_of_another(log, conf, cut):
    requests, parsed = plain(log.requests()), AllocatorSettings.parse(conf)
    whole = simulate(requests, parsed)
    first = simulate(part_of(requests, slice(0, cut)), parsed)
    second = simulate(part_of(requests, slice(cut, None)), parsed, start=first.segments)
    names = ["requested_bytes", "allocated_bytes", "active_bytes", "inactive_split_bytes"]
    if not (parsed.expandable_segments and Request.EMPTY_CACHE in requests.kind):
        # Holes before the first page of an expandable segment are in no layout.
        names += ["reserved_bytes", "segment_count"]
    for name in names:
        assert getattr(second, name).tolist() == getattr(whole, name)[cut:].tolist(), name
