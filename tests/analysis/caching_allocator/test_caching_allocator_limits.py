"""What the allocator does at its limits and off its defaults, with numbers worked out by hand."""

from __future__ import annotations

import pytest

from pytest_torchmem.allocator import RequestError, RequestLog
from pytest_torchmem.values.errors import AllocatorSettingsError
from pytest_torchmem.values.units import MiB
from tests.analysis.caching_allocator.allocator_logs import last, log_of, run

# --- max_split_size --------------------------------------------------------------------------


def test_blocks_above_the_split_limit_serve_only_requests_above_it():
    log = log_of(("a", 100 * MiB), "a", ("b", 30 * MiB))
    assert last(run(log))["reserved"] == 100 * MiB
    assert last(run(log, "max_split_size_mb:64"))["reserved"] == 130 * MiB


def test_blocks_above_the_split_limit_are_never_split():
    log = log_of(("a", 100 * MiB), "a", ("b", 81 * MiB))
    result = run(log, "max_split_size_mb:64")
    # 19 MiB more than asked for is within the rounding limit of 20 MiB.
    assert last(result)["allocated"] == 100 * MiB
    assert last(result)["reserved"] == 100 * MiB


def test_a_block_larger_than_the_rounding_limit_is_not_wasted_on_a_request():
    log = log_of(("a", 100 * MiB), "a", ("b", 80 * MiB))
    assert last(run(log, "max_split_size_mb:64"))["reserved"] == 180 * MiB
    assert (
        last(run(log, "max_split_size_mb:64,max_non_split_rounding_mb:32"))["reserved"] == 100 * MiB
    )


def test_before_anything_else_one_large_enough_oversize_block_is_given_back():
    log = log_of(
        ("a", 100 * MiB), ("b", 200 * MiB), ("c", 30 * MiB), "a", "b", "c", ("d", 150 * MiB)
    )
    result = run(log, "max_split_size_mb:64", capacity_bytes=400 * MiB)
    # 330 are reserved; the 200 are not for 150 (more than 20 too large) but make room.
    assert last(result)["reserved"] == (100 + 30 + 150) * MiB
    assert result.retry_count == 0


def test_several_oversize_blocks_are_given_back_largest_first():
    log = log_of(
        ("a", 100 * MiB), ("b", 120 * MiB), ("c", 140 * MiB), "a", "b", "c", ("d", 250 * MiB)
    )
    result = run(log, "max_split_size_mb:64", capacity_bytes=400 * MiB)
    # 140 and 120 are enough for 250: 100 stays, and nothing else was tried.
    assert last(result)["reserved"] == 350 * MiB
    assert result.retry_count == 0


# --- out of memory ---------------------------------------------------------------------------


def test_a_full_device_gets_cached_segments_back_and_tries_again():
    log = log_of(("a", 60 * MiB), ("b", 30 * MiB), "a", ("c", 70 * MiB))
    result = run(log, capacity_bytes=100 * MiB)
    assert result.out_of_memory == ()
    assert result.retry_count == 1
    assert last(result)["reserved"] == 100 * MiB


def test_what_does_not_fit_is_reported_and_not_raised():
    log = log_of(("a", 60 * MiB), ("b", 30 * MiB), ("c", 70 * MiB), "c", "b")
    result = run(log, capacity_bytes=100 * MiB)
    (oom,) = result.out_of_memory
    assert (oom.row, oom.requested_bytes, oom.segment_bytes) == (2, 70 * MiB, 70 * MiB)
    assert (oom.free_bytes, oom.reserved_bytes, oom.allocated_bytes) == (
        10 * MiB,
        90 * MiB,
        90 * MiB,
    )
    assert result.retry_count == 1
    # The program goes on: freeing what it never got does nothing.
    assert [m // MiB for m in result.allocated_bytes.tolist()] == [60, 90, 90, 90, 60]
    assert result.address[2] == 0


def test_a_small_request_fails_for_lack_of_a_whole_segment():
    log = log_of(("a", 99 * MiB), ("b", 512))
    (oom,) = run(log, capacity_bytes=101 * MiB).out_of_memory
    assert (oom.requested_bytes, oom.segment_bytes, oom.free_bytes) == (512, 2 * MiB, MiB)


def test_an_early_refusal_gives_nothing_back():
    log = log_of(("a", 60 * MiB), "a", ("b", 70 * MiB))
    result = run(log, "throw_on_cudamalloc_oom:True", capacity_bytes=100 * MiB)
    (oom,) = result.out_of_memory
    assert oom.reserved_bytes == 60 * MiB
    assert result.retry_count == 0


def test_the_process_may_be_allowed_less_than_the_device_has():
    log = log_of(("a", 60 * MiB))
    result = run(log, "per_process_memory_fraction:0.5", capacity_bytes=100 * MiB)
    (oom,) = result.out_of_memory
    assert oom.free_bytes == 50 * MiB


def test_a_fraction_needs_a_capacity():
    with pytest.raises(AllocatorSettingsError, match="give the capacity"):
        run(log_of(("a", 1)), "per_process_memory_fraction:0.5")


# --- garbage collection ----------------------------------------------------------------------

COLLECTING = "garbage_collection_threshold:0.5,per_process_memory_fraction:0.5"


def test_segments_unused_for_longest_are_collected_above_the_threshold():
    # Allowed: 200 MiB, collected above 100 MiB.
    log = log_of(("x", 8 * MiB), ("a", 60 * MiB), ("b", 50 * MiB), "a")
    log.alloc(1, 2 * MiB)
    log.alloc(2, 2 * MiB)
    log.free(ord("b"))
    log.alloc(3, 70 * MiB)
    result = run(log, COLLECTING, capacity_bytes=400 * MiB)
    # 130 MiB are reserved. a is three searches old and b one: a is above the average of two.
    assert result.reserved_bytes.tolist()[-2:] == [130 * MiB, (130 - 60 + 70) * MiB]
    assert result.retry_count == 0


def test_a_small_request_that_finds_no_block_collects_too():
    log = log_of(("a", 60 * MiB), ("b", 50 * MiB), "a", ("c", 512))
    assert last(run(log, COLLECTING, capacity_bytes=400 * MiB))["reserved"] == 52 * MiB


def test_collection_goes_on_until_enough_is_back():
    log = log_of(("x", 8 * MiB), ("a", 30 * MiB), ("b", 28 * MiB), ("c", 60 * MiB), "a")
    log.alloc(1, 2 * MiB)
    log.free(ord("b"))
    log.alloc(2, 64 * MiB)
    result = run(log, COLLECTING, capacity_bytes=400 * MiB)
    # 38 of 138 MiB are too many: a goes for being two searches old, b because 30 are too few.
    assert last(result)["reserved"] == (138 - 30 - 28 + 64) * MiB


def test_nothing_is_collected_without_a_fraction():
    log = log_of(("a", 60 * MiB), "a", ("b", 70 * MiB))
    assert last(run(log, "garbage_collection_threshold:0.1", 400 * MiB))["reserved"] == 130 * MiB


# --- expandable segments ---------------------------------------------------------------------

EXPANDABLE = "expandable_segments:True"


def test_expandable_segments_grow_by_whole_pages():
    result = run(log_of(("a", 30 * MiB), ("b", 25 * MiB), ("c", 512)), EXPANDABLE)
    # 30 MiB need two pages of 20; b uses the 10 that are left and one page more; c a small page.
    assert [m // MiB for m in result.reserved_bytes.tolist()] == [40, 60, 62]
    assert result.segment_count.tolist() == [0, 0, 0]
    assert result.inactive_split_bytes.tolist() == [0, 0, 0]
    assert result.address[1] == result.address[0] + 30 * MiB


def test_expandable_blocks_are_split_down_to_512_bytes():
    result = run(log_of(("a", 19 * MiB + 512)), EXPANDABLE)
    assert last(result)["allocated"] == 19 * MiB + 512


def test_holes_that_plain_segments_keep_are_closed_by_expandable_ones():
    steps = [("a", 12 * MiB), ("b", 12 * MiB), "a", "b", ("c", 24 * MiB)]
    assert last(run(log_of(*steps)))["reserved"] == 48 * MiB
    # Two pages of 20 MiB hold a and b, and then c at the same place.
    result = run(log_of(*steps), EXPANDABLE)
    assert [m // MiB for m in result.reserved_bytes.tolist()] == [20, 40, 40, 40, 40]
    assert result.address[-1] == result.address[0]


def test_a_block_that_can_grow_is_taken_last():
    # Behind c lies all unmapped space; the hole of a is smaller than what c's hole can become.
    steps = [("a", 10 * MiB), ("b", 10 * MiB), ("c", 16 * MiB), "a", ("d", 4 * MiB)]
    result = run(log_of(*steps), EXPANDABLE)
    # The tail behind c holds 4 MiB and would fit best, but it could grow.
    assert result.address[-1] == result.address[0]


def test_emptying_the_cache_unmaps_whole_pages_of_expandable_segments():
    log = log_of(("a", 50 * MiB), ("b", 20 * MiB), "a")
    log.empty_cache()
    log.alloc(ord("c"), 30 * MiB)
    result = run(log, EXPANDABLE)
    # Four pages. a lay on [0, 50) MiB: pages 0 and 1 go, [40, 50) stays. c needs pages 0 and 1
    # again, or it would not lie at the lowest address.
    assert [m // MiB for m in result.reserved_bytes.tolist()] == [60, 80, 80, 40, 80]
    assert result.address[-1] == result.address[0]


def test_an_expandable_segment_that_is_all_free_is_gone_after_emptying_the_cache():
    log = log_of(("a", 50 * MiB), "a")
    log.empty_cache()
    result = run(log, EXPANDABLE)
    assert last(result)["reserved"] == 0
    assert result.segments == ()
    # What comes next lies in a new range of addresses.
    log.alloc(1, 50 * MiB)
    result = run(log, EXPANDABLE)
    assert result.address[-1] > result.address[0]


def test_the_addresses_of_an_expandable_segment_end_an_eighth_behind_the_memory():
    log = log_of(("a", 40 * MiB), ("b", 1 * MiB + 512), "a")
    log.empty_cache()
    log.alloc(ord("c"), 60 * MiB)
    # A hole of [0, 40) MiB, b behind it, and c behind b on [41, 101): 4 pages, b's with them.
    assert run(log, EXPANDABLE).peak.reserved == 80 * MiB
    # 9/8 of 88 MiB are 5 pages of addresses, which end at 100 MiB; a new range takes c's 3 pages.
    crowded = run(log, EXPANDABLE, capacity_bytes=88 * MiB)
    assert crowded.address[-1] == crowded.address[0] + 100 * MiB
    assert crowded.peak.reserved == 80 * MiB
    # 512 bytes more are 4 pages there, and 20 + 80 MiB are not to be had.
    log.free(ord("c"))
    log.empty_cache()
    log.alloc(ord("d"), 60 * MiB + 512)
    assert run(log, EXPANDABLE, capacity_bytes=88 * MiB).out_of_memory
    assert not run(log, EXPANDABLE, capacity_bytes=89 * MiB).out_of_memory
    assert run(log, EXPANDABLE).peak.reserved == 80 * MiB


def test_unmapped_neighbours_are_mapped_again_in_one_go():
    log = log_of(("a", 20 * MiB), ("b", 20 * MiB), ("c", 20 * MiB), "a")
    log.empty_cache()
    log.free(ord("b"))
    log.empty_cache()
    log.alloc(ord("d"), 40 * MiB)
    result = run(log, EXPANDABLE)
    assert result.address[-1] == result.address[0]
    assert result.device_alloc_count == 4


def test_expandable_segments_give_pages_back_before_they_run_out():
    log = log_of(("a", 40 * MiB), ("s", 512), "a", ("b", 39 * MiB, 7))
    result = run(log, EXPANDABLE, capacity_bytes=50 * MiB)
    assert result.out_of_memory == ()
    assert result.retry_count == 1
    assert last(result)["reserved"] == 42 * MiB


def test_an_expandable_segment_runs_out_when_its_pages_do_not_fit():
    (oom,) = run(log_of(("a", 30 * MiB)), EXPANDABLE, capacity_bytes=39 * MiB).out_of_memory
    assert oom.free_bytes == 39 * MiB


# --- private pools and graph captures --------------------------------------------------------


def test_private_pools_do_not_share_with_the_default_pool():
    log = log_of(("a", 30 * MiB), "a")
    log.begin_pool(1)
    log.alloc(1, 30 * MiB)
    log.free(1)
    log.end_pool(1)
    log.alloc(2, 30 * MiB)
    result = run(log)
    assert last(result)["reserved"] == 60 * MiB
    assert result.address[-1] == result.address[0]


def test_the_newest_pool_that_takes_the_stream_is_used():
    log = RequestLog()
    log.begin_pool(1)
    log.begin_pool(2, frozenset({5}))
    log.alloc(1, 512, stream=5)
    log.alloc(2, 512, stream=6)
    log.end_pool(2)
    log.alloc(3, 512, stream=5)
    assert log.requests().pool.tolist() == [2, 1, 1]


def test_a_pool_has_one_scope_at_a_time():
    log = RequestLog()
    log.begin_pool(1)
    with pytest.raises(RequestError, match="in use already"):
        log.begin_pool(1)
    with pytest.raises(RequestError, match="not in use"):
        log.end_pool(2)


def test_a_private_pool_gives_nothing_back_before_it_is_released():
    log = RequestLog()
    log.begin_pool(1)
    log.alloc(1, 30 * MiB)
    log.free(1)
    log.end_pool(1)
    log.empty_cache()
    log.release_pool(1)
    log.empty_cache()
    assert [m // MiB for m in run(log).reserved_bytes.tolist()] == [30, 30, 30, 30, 0]


def test_in_a_capture_nothing_is_waited_for_until_its_end():
    log = RequestLog()
    log.begin_pool(1, capture=True)
    log.alloc(1, 30 * MiB)
    log.record_stream(1, 2)
    log.free(1)
    log.alloc(2, 30 * MiB)
    log.end_pool(1, capture=True)
    log.alloc(3, 512)
    assert [m // MiB for m in run(log).active_bytes.tolist()] == [0, 30, 30, 30, 60, 60, 30]


def test_after_a_capture_streams_recorded_before_it_are_still_waited_for():
    log = RequestLog()
    log.alloc(1, 30 * MiB)
    log.record_stream(1, 2)
    log.begin_pool(1, capture=True)
    log.record_stream(1, 3)
    log.free(1)
    log.end_pool(1, capture=True)
    log.stream_done(3)
    log.alloc(2, 512)
    log.stream_done(2)
    log.alloc(3, 512)
    active = [m // MiB for m in run(log).active_bytes.tolist()]
    assert active[-4:] == [30, 30, 30, 0]


def test_a_capture_cannot_give_memory_back_to_make_room():
    log = log_of(("a", 60 * MiB), "a")
    log.begin_pool(1, capture=True)
    log.alloc(1, 70 * MiB)
    result = run(log, capacity_bytes=100 * MiB)
    assert len(result.out_of_memory) == 1
    assert result.retry_count == 0


def test_a_hole_that_is_mapped_again_as_a_whole_joins_its_neighbours():
    log = log_of(("a", 20 * MiB), ("b", 20 * MiB), ("c", 20 * MiB), "b")
    log.empty_cache()
    log.alloc(ord("d"), 20 * MiB)
    for name in "acd":
        log.free(ord(name))
    log.alloc(ord("e"), 60 * MiB)
    result = run(log, EXPANDABLE)
    assert result.address[-1] == result.address[0]
    assert result.peak.reserved == 60 * MiB
