"""The caching allocator's rules, one by one, with numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from pytest_torchmem.allocator import (
    BlockState,
    Request,
    RequestError,
    RequestLog,
    Requests,
    fits,
    simulate,
)
from pytest_torchmem.values.units import GiB, KiB, MiB
from tests.analysis.caching_allocator.allocator_logs import last, log_of, run

# --- columns ---------------------------------------------------------------------------------


def test_columns_become_requests_and_one_row_each():
    requests = Requests.from_columns([True, True, False], [100, 3 * MiB, 0], [1, 2, 1])
    result = simulate(requests)
    assert result.requested_bytes.tolist() == [100, 100 + 3 * MiB, 3 * MiB]
    assert result.allocated_bytes.tolist() == [512, 512 + 3 * MiB, 3 * MiB]
    assert result.reserved_bytes.tolist() == [2 * MiB, 22 * MiB, 22 * MiB]
    assert result.segment_count.tolist() == [1, 2, 2]
    for column in (result.requested_bytes, result.segment_count, result.address):
        assert column.dtype == np.int64
        assert column.shape == (3,)


def test_no_requests_are_no_rows_and_peaks_of_zero():
    result = simulate(RequestLog().requests())
    assert len(result.reserved_bytes) == 0
    assert result.peak.reserved == 0
    assert result.fragmentation == 0.0
    assert result.segments == ()


def test_a_run_that_asks_for_nothing_has_what_was_there_before():
    before = run(log_of(("a", 3 * MiB)))
    after = simulate(RequestLog().requests(), start=before.segments)
    assert (after.peak.requested, after.peak.reserved) == (3 * MiB, 20 * MiB)
    assert after.reserved_peak.free_bytes == 17 * MiB


def test_a_cache_that_is_given_back_first_is_the_most_that_was_reserved():
    before = run(log_of(("a", 3 * MiB), "a"))
    log = RequestLog()
    log.empty_cache()
    log.alloc(2, 100)
    after = simulate(log.requests(), start=before.segments)
    assert after.reserved_bytes.tolist() == [0, 2 * MiB]
    assert after.peak.reserved == after.reserved_peak.reserved_bytes == 20 * MiB


def test_columns_of_different_lengths_are_refused():
    with pytest.raises(RequestError, match="differ in length"):
        Requests.from_columns([True, False], [1, 2, 3], [1, 1])


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (log_of(("a", 1), ("a", 1)), "row 1 allocates key 97, which is live already"),
        (log_of(("a", 1), "a", "a"), "row 2 frees key 97, which is not live"),
        (log_of(("a", -1)), "row 0 asks for -1 bytes"),
    ],
)
def test_what_no_program_can_ask_is_an_error_with_its_row(log, message):
    with pytest.raises(RequestError, match=message):
        run(log)


def test_an_unknown_kind_of_request_is_an_error():
    requests = Requests.from_columns([True], [1], [1])
    requests.kind[0] = 99
    with pytest.raises(RequestError, match="kind 99"):
        simulate(requests)


# --- sizes and pools -------------------------------------------------------------------------


def test_nothing_is_allocated_for_zero_bytes():
    result = run(log_of(("a", 0), "a", ("a", 0)))
    assert last(result)["reserved"] == 0
    assert result.address.tolist() == [0, 0, 0]


def test_one_mebibyte_is_small_and_one_byte_more_is_large():
    assert last(run(log_of(("a", MiB))))["reserved"] == 2 * MiB
    assert last(run(log_of(("a", MiB + 1))))["reserved"] == 20 * MiB


def test_rounding_decides_the_pool():
    # 1 MiB - 1 rounds to 1 MiB: still small. 900 KiB rounds up to 1 MiB with two divisions.
    assert last(run(log_of(("a", MiB - 1))))["reserved"] == 2 * MiB
    assert last(run(log_of(("a", 900 * KiB)), "roundup_power2_divisions:2")) == {
        "requested": 900 * KiB,
        "allocated": MiB,
        "active": MiB,
        "reserved": 2 * MiB,
        "inactive_split": MiB,
        "segments": 1,
    }


def test_ten_mebibytes_get_a_segment_of_their_own():
    result = run(log_of(("a", 10 * MiB), ("b", 11 * MiB)))
    assert result.reserved_bytes.tolist() == [10 * MiB, 22 * MiB]


def test_a_larger_segment_size_serves_requests_below_ten_mebibytes():
    assert last(run(log_of(("a", 9 * MiB)), "large_segment_size_mb:64"))["reserved"] == 64 * MiB


def test_small_and_large_blocks_do_not_share_segments():
    # 19 MiB of the large segment are free, yet 1 MiB comes from a new small one.
    assert last(run(log_of(("a", 2 * MiB), ("b", MiB))))["reserved"] == 22 * MiB


# --- splitting -------------------------------------------------------------------------------


def test_small_blocks_are_split_down_to_512_bytes():
    result = run(log_of(("a", 512), ("b", 2 * MiB - 1024 - MiB), ("c", MiB - 512), ("d", 512)))
    assert result.reserved_bytes.tolist() == [2 * MiB] * 4
    assert result.inactive_split_bytes.tolist() == [2 * MiB - 512, MiB + 512, 1024, 512]


def test_a_large_block_keeps_a_tail_of_up_to_one_mebibyte():
    result = run(log_of(("a", 19 * MiB), "a", ("a", 9 * MiB)))
    # 19 MiB get a segment of 20 MiB; exactly 1 MiB is not split off.
    assert result.allocated_bytes.tolist()[0] == 20 * MiB
    assert result.requested_bytes.tolist()[0] == 19 * MiB
    assert result.inactive_split_bytes.tolist() == [0, 0, 11 * MiB]


def test_a_large_block_is_split_when_more_than_one_mebibyte_is_left():
    result = run(log_of(("a", 9 * MiB), ("b", 10 * MiB - 512)))
    assert result.allocated_bytes.tolist() == [9 * MiB, 19 * MiB - 512]
    assert result.inactive_split_bytes.tolist() == [11 * MiB, MiB + 512]


# --- reuse -----------------------------------------------------------------------------------


def test_freed_memory_stays_reserved_and_is_reused():
    result = run(log_of(("a", 30 * MiB), "a", ("b", 30 * MiB)))
    assert result.reserved_bytes.tolist() == [30 * MiB] * 3
    assert result.active_bytes.tolist() == [30 * MiB, 0, 30 * MiB]
    assert result.address[0] == result.address[2]
    assert result.device_alloc_count == 1


def test_the_smallest_free_block_that_serves_is_taken():
    log = log_of(("a", 40 * MiB), ("b", 30 * MiB), ("c", 50 * MiB), "c", "a", "b", ("d", 31 * MiB))
    result = run(log)
    assert result.address[-1] == result.address[0]


def test_of_equal_blocks_the_oldest_segment_is_taken():
    log = log_of(("a", 30 * MiB), ("b", 30 * MiB), "b", "a", ("c", 30 * MiB))
    result = run(log)
    assert result.address[-1] == result.address[0]


def test_known_addresses_break_ties_between_equal_blocks():
    log = log_of(("a", 30 * MiB), ("b", 30 * MiB), "b", "a", ("c", 30 * MiB))
    result = simulate(log.requests(), segment_addresses=[200 * MiB, 100 * MiB])
    assert result.address.tolist() == [200 * MiB, 100 * MiB, 0, 0, 100 * MiB]


def test_neighbours_that_are_free_become_one_block():
    log = log_of(("a", 4 * MiB), ("b", 4 * MiB), ("c", 4 * MiB), "a", "c", "b", ("d", 20 * MiB))
    result = run(log)
    # a; c with the tail of 8 MiB; everything.
    assert result.inactive_split_bytes.tolist()[3:6] == [12 * MiB, 16 * MiB, 0]
    assert last(result)["reserved"] == 20 * MiB


def test_a_hole_too_small_for_the_next_request_is_fragmentation():
    log = log_of(("a", 6 * MiB), ("b", 6 * MiB), ("c", 6 * MiB), "a", "c", ("d", 9 * MiB))
    result = run(log)
    # Free: 6 and 8 of 20 MiB, none of which takes 9; a second segment brings 11 MiB more.
    assert last(result)["reserved"] == 40 * MiB
    assert result.fragmentation == (40 - 15) / 40
    assert str(result.reserved_peak) == (
        "fragmentation 62% (estimated): of 40.0 MiB, 25.0 MiB were free when the last 20.0 MiB "
        "were reserved for an allocation of 9.0 MiB; none of that could be given back "
        "(inactive split)"
    )


def test_a_cache_that_is_free_later_is_no_fragmentation():
    log = log_of(("a", 12 * MiB), ("b", 30 * MiB), "a", "b")
    result = run(log)
    assert last(result)["active"] == 0
    assert last(result)["reserved"] == 42 * MiB
    assert result.fragmentation == 0.0
    assert result.reserved_peak.row == 1


def test_free_segments_are_told_from_what_could_not_be_given_back():
    log = log_of(("a", 30 * MiB), ("b", 6 * MiB), "a", ("c", 40 * MiB))
    peak = run(log).reserved_peak
    # All of a's segment, and what b left of its own.
    assert peak.free_bytes == (30 + 14) * MiB
    assert peak.inactive_split_bytes == 14 * MiB
    assert (peak.requested_bytes, peak.grown_bytes) == (40 * MiB, 40 * MiB)
    assert str(peak).endswith("; 14.0 MiB of that could not be given back (inactive split)")


def test_expandable_segments_have_no_inactive_split_bytes():
    log = log_of(("a", 6 * MiB), ("b", 6 * MiB), "a", ("c", 40 * MiB))
    peak = run(log, "expandable_segments:True").reserved_peak
    assert peak.free_bytes > 0
    assert peak.inactive_split_bytes == 0
    assert str(peak).endswith("were reserved for an allocation of 40.0 MiB")


# --- streams ---------------------------------------------------------------------------------


def test_streams_do_not_share_blocks():
    log = log_of(("a", 30 * MiB, 1), "a", ("b", 30 * MiB, 2))
    assert last(run(log))["reserved"] == 60 * MiB


def test_a_block_used_on_another_stream_stays_active_until_that_stream_is_done():
    log = RequestLog()
    log.alloc(1, 30 * MiB, stream=1)
    log.record_stream(1, 2)
    log.free(1)
    log.alloc(2, 30 * MiB, stream=1)
    log.stream_done(2)
    log.alloc(3, 30 * MiB, stream=1)
    result = run(log)
    assert [m // MiB for m in result.allocated_bytes.tolist()] == [30, 30, 0, 30, 30, 60]
    assert [m // MiB for m in result.requested_bytes.tolist()] == [30, 30, 30, 60, 60, 60]
    assert [m // MiB for m in result.active_bytes.tolist()] == [30, 30, 30, 60, 60, 60]
    assert [m // MiB for m in result.reserved_bytes.tolist()] == [30, 30, 30, 60, 60, 60]
    assert result.address[5] == result.address[0]


def test_a_block_waits_for_every_stream_that_used_it():
    log = RequestLog()
    log.alloc(1, 30 * MiB)
    log.record_stream(1, 2)
    log.record_stream(1, 3)
    log.free(1)
    log.stream_done(3)
    log.alloc(2, 512)
    log.stream_done(2)
    log.alloc(3, 512)
    assert [m // MiB for m in run(log).active_bytes.tolist()][4:] == [30, 30, 30, 0]


def test_work_queued_after_a_stream_was_done_is_waited_for():
    log = RequestLog()
    log.alloc(1, 30 * MiB)
    log.record_stream(1, 2)
    log.stream_done(2)
    log.free(1)
    log.alloc(2, 512)
    assert last(run(log))["active"] == 30 * MiB + 512


def test_a_completion_can_be_said_of_one_block():
    log = RequestLog()
    for key in (1, 2):
        log.alloc(key, 30 * MiB)
        log.record_stream(key, 2)
    log.free(1)
    log.free(2)
    log.block_done(2)
    log.alloc(3, 30 * MiB)
    result = run(log)
    assert result.address[-1] == result.address[2]


def test_without_completions_a_block_is_back_by_the_next_allocation():
    log = RequestLog()
    log.alloc(1, 30 * MiB)
    log.record_stream(1, 2)
    log.free(1)
    log.alloc(2, 30 * MiB)
    result = run(log)
    assert [m // MiB for m in result.active_bytes.tolist()] == [30, 30, 30, 30]
    assert last(result)["reserved"] == 30 * MiB


def test_a_stream_recorded_on_its_own_block_changes_nothing():
    log = RequestLog()
    log.alloc(1, 30 * MiB, stream=5)
    log.record_stream(1, 5)
    log.free(1)
    assert last(run(log))["active"] == 0


# --- empty_cache -----------------------------------------------------------------------------


def test_emptying_the_cache_keeps_segments_that_are_partly_in_use():
    log = log_of(("a", 2 * MiB), ("b", 2 * MiB), ("c", 30 * MiB), "c", "a")
    log.empty_cache()
    result = run(log)
    assert result.reserved_bytes.tolist()[-2:] == [50 * MiB, 20 * MiB]
    assert last(result)["segments"] == 1
    assert last(result)["inactive_split"] == 18 * MiB


def test_emptying_the_cache_waits_for_other_streams():
    log = RequestLog()
    log.alloc(1, 30 * MiB)
    log.record_stream(1, 2)
    log.stream_done(2)
    log.free(1)
    log.empty_cache()
    assert last(run(log)) == dict.fromkeys(last(run(log)), 0)


# --- layout and fit --------------------------------------------------------------------------


def test_the_layout_at_the_end_lists_every_block():
    log = log_of(("a", 4 * MiB), ("b", 4 * MiB, 3), ("c", 6 * MiB), "a")
    log.record_stream(ord("b"), 4)
    log.free(ord("b"))
    first, second = run(log).segments
    assert [(b.size_bytes // MiB, b.state) for b in first.blocks] == [
        (4, BlockState.FREE),
        (6, BlockState.IN_USE),
        (10, BlockState.FREE),
    ]
    assert (first.size_bytes, first.stream, first.pool) == (20 * MiB, 0, 0)
    assert [(b.size_bytes // MiB, b.state) for b in second.blocks] == [
        (4, BlockState.WAITING),
        (16, BlockState.FREE),
    ]
    assert second.stream == 3


def test_a_fit_says_what_is_to_spare():
    fit = fits(log_of(("a", 22 * GiB), ("b", 900 * MiB)).requests(), 24 * GiB)
    assert fit
    assert fit.spare_bytes == 2 * GiB - 900 * MiB
    assert str(fit) == "fits in 24.0 GiB with 1.1 GiB to spare; fragmentation 0% (estimated)"


def test_a_fit_says_how_often_the_cache_was_given_back():
    fit = fits(log_of(("a", 60 * MiB), "a", ("b", 70 * MiB)).requests(), 100 * MiB)
    assert str(fit) == (
        "fits in 100.0 MiB with 30.0 MiB to spare after giving back cached memory once; "
        "fragmentation 0% (estimated)"
    )


def test_what_does_not_fit_says_what_was_missing():
    fit = fits(log_of(("a", 60 * MiB), ("b", 70 * MiB)).requests(), 100 * MiB)
    assert not fit
    assert str(fit) == (
        "does not fit in 100.0 MiB (estimated): an allocation of 70.0 MiB needs 70.0 MiB where "
        "40.0 MiB are free and 60.0 MiB are reserved, 60.0 MiB of them in use"
    )


def test_every_kind_of_request_is_served():
    log = RequestLog(completions_given=True)
    log.rows.append((Request.ALLOC, 1, 512, 0, 0))
    for kind in Request:
        if kind is not Request.ALLOC:
            log.rows.append((kind, 1, 0, 2, 1))
    # FREE comes before RECORD_STREAM in the enum: swap them.
    log.rows[1], log.rows[2] = log.rows[2], log.rows[1]
    assert last(run(log))["reserved"] == 0
