"""A counter over its limit names the allocator's state, and the line whose memory is in it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from pytest_torchmem.analysis.judge.counters import told_by_allocator
from pytest_torchmem.analysis.judge.verdict import judge_limits
from pytest_torchmem.values.contributors import (
    Category,
    CategoryBytes,
    Contributor,
    Phase,
    Source,
)
from pytest_torchmem.values.results import Counters, Peak, ReservedSegment, Result, Retained
from pytest_torchmem.values.units import MiB


def made(size_bytes: int, line: int) -> Contributor:
    source = Source("net.py", line, "forward")
    return Contributor(Category.TEMPORARY, size_bytes, 1, "aten::cat", "", source, Phase.FORWARD)


@dataclass
class Allocated:
    private_bytes: int = 0
    shared_bytes: int = 0
    segment_bytes: int = 99 * MiB
    asked: int = 0

    def freed(self) -> tuple[Contributor, ...]:
        self.asked += 1
        return made(9 * MiB, 3), made(4 * MiB, 7), made(8 * MiB, 7)

    def reserved(self) -> tuple[tuple[ReservedSegment, Contributor], ...]:
        sizes = ((True, self.private_bytes, 5), (False, self.shared_bytes, 6))
        return tuple(
            (ReservedSegment(line, self.segment_bytes, is_private), made(size_bytes, line))
            for is_private, size_bytes, line in sizes
            if size_bytes
        )


def measured(counters: Counters) -> Result:
    composition = CategoryBytes(temporary=30 * MiB)
    live = (replace(made(30 * MiB, 1)),)
    peak = Peak(composition.total, 0, composition, composition, live)
    return Result(
        "", "cuda:0", False, peak, Retained(0, CategoryBytes(), ()), (), counters=counters
    )


FREED = "; the body allocated and freed 12.0 MiB in all of temporary from aten::cat at net.py:7"


@pytest.mark.parametrize(
    ("key", "counters", "pooled", "told"),
    [
        (
            "reserved",
            Counters(30 * MiB, 30 * MiB, 90 * MiB, 100 * MiB, split=4 * MiB),
            0,
            "at least 60.0 MiB of that had been freed and waited for another stream that still "
            f"used it{FREED}, 10.0 MiB more held no tensor either",
        ),
        (
            "active",
            Counters(30 * MiB, 30 * MiB, 90 * MiB, 100 * MiB),
            0,
            "at least 60.0 MiB of that had been freed and waited for another stream that still "
            f"used it{FREED}",
        ),
        (
            "reserved",
            Counters(30 * MiB, 30 * MiB, 30 * MiB, 100 * MiB, split=50 * MiB),
            0,
            "at least 50.0 MiB of that was free in segments of which other parts were in use"
            f"{FREED}, 20.0 MiB more held no tensor either",
        ),
        (
            "reserved",
            Counters(30 * MiB, 30 * MiB, 30 * MiB, 100 * MiB, split=50 * MiB),
            64 * MiB,
            "at least 64.0 MiB of that was free in the private pools of CUDA graphs; segments "
            "reserved from aten::cat at net.py:5 had 64.0 MiB that no tensor held, "
            "6.0 MiB more held no tensor either",
        ),
        (
            "reserved",
            Counters(30 * MiB, 30 * MiB, 30 * MiB, 100 * MiB),
            0,
            f"at least 70.0 MiB of that was free and kept by the cache{FREED}",
        ),
        (
            "allocated",
            Counters(30 * MiB, 80 * MiB, 80 * MiB, 100 * MiB),
            0,
            "at least 50.0 MiB of that was the ends of blocks, too small to be split off; "
            "largest 30.0 MiB of temporary from aten::cat at net.py:1",
        ),
        # What lives is most of it.
        (
            "reserved",
            Counters(90 * MiB, 90 * MiB, 90 * MiB, 100 * MiB),
            0,
            "largest 30.0 MiB of temporary from aten::cat at net.py:1",
        ),
        # Much of it was there before.
        (
            "reserved",
            Counters(30 * MiB, 30 * MiB, 30 * MiB, 100 * MiB, reserved_before=45 * MiB),
            20 * MiB,
            "45.0 MiB of that was reserved before the body began, for fixtures or for what ran "
            "earlier; at least 50.0 MiB of that was free and kept by the cache; segments reserved "
            "from aten::cat at net.py:5 had 20.0 MiB that no tensor held, "
            "20.0 MiB more held no tensor either",
        ),
        (
            "active",
            Counters(50 * MiB, 50 * MiB, 50 * MiB, 50 * MiB, active_before=9 * MiB),
            0,
            "9.0 MiB of that was active before the body began, for fixtures or for what ran "
            "earlier; largest 30.0 MiB of temporary from aten::cat at net.py:1",
        ),
        # So is what was there before.
        (
            "reserved",
            Counters(30 * MiB, 30 * MiB, 30 * MiB, 100 * MiB, reserved_before=70 * MiB),
            0,
            "70.0 MiB of that was reserved before the body began, for fixtures or for what ran "
            "earlier; the body added 30.0 MiB",
        ),
    ],
)
def test_the_largest_state_of_a_counter_is_named(key, counters, pooled, told):
    result = measured(counters)
    (finding,) = told_by_allocator(
        judge_limits(result, {key: 40 * MiB}), result, Allocated(private_bytes=pooled)
    )
    assert finding.sentence.partition(" over the limit of 40.0 MiB: ")[2] == told


@pytest.mark.parametrize(
    ("segment_bytes", "told"),
    [
        (50 * MiB, "free and kept by the cache"),
        (60 * MiB, "free in segments of which other parts were in use"),
    ],
)
def test_the_line_that_free_segments_were_reserved_for_is_named(segment_bytes, told) -> None:
    # The most that was free in segments partly in use was so at another moment.
    result = measured(Counters(30 * MiB, 30 * MiB, 30 * MiB, 100 * MiB, split=40 * MiB))
    source = Allocated(20 * MiB, 50 * MiB, segment_bytes)
    (finding,) = told_by_allocator(judge_limits(result, {"reserved": 40 * MiB}), result, source)
    assert finding.cause == (
        f"at least 50.0 MiB of that was {told}; segments reserved from "
        "aten::cat at net.py:6 had 50.0 MiB that no tensor held"
    )
    assert str(finding.place) == "net.py:6"
    assert finding.others == ", 20.0 MiB more held no tensor either"


def test_blocks_that_wait_for_a_stream_are_not_told_as_free_a_second_time() -> None:
    # Blocks that wait count as requested, too.
    result = measured(Counters(90 * MiB, 30 * MiB, 90 * MiB, 95 * MiB))
    source = Allocated(shared_bytes=60 * MiB, segment_bytes=60 * MiB)
    (finding,) = told_by_allocator(judge_limits(result, {"reserved": 40 * MiB}), result, source)
    assert finding.cause.startswith("at least 60.0 MiB of that had been freed and waited")
    assert finding.others == ", 5.0 MiB more held no tensor either"


def test_what_no_segment_tells_is_told_by_counters() -> None:
    result = measured(Counters(30 * MiB, 30 * MiB, 30 * MiB, 130 * MiB, split=60 * MiB))
    source = Allocated(shared_bytes=50 * MiB)
    (finding,) = told_by_allocator(judge_limits(result, {"reserved": 40 * MiB}), result, source)
    assert finding.cause.startswith("at least 60.0 MiB of that was free in segments of which other")
    assert finding.others == ", 40.0 MiB more held no tensor either"


def test_nobody_is_asked_within_a_limit_or_about_another_one():
    result, source = measured(Counters(30 * MiB, 30 * MiB, 90 * MiB, 100 * MiB)), Allocated()
    for limits in ({"reserved": 100 * MiB}, {"total": MiB}):
        findings = judge_limits(result, limits)
        assert told_by_allocator(findings, result, source) == findings
    assert source.asked == 0
