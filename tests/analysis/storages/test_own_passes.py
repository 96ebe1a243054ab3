"""Category passes of users: what they see, what they decide, and what happens when one raises."""

from __future__ import annotations

from pytest_torchmem.analysis.judge.causes import origin
from pytest_torchmem.analysis.pipeline import MemoryProfile, analyze_trace
from pytest_torchmem.analysis.storages.explanation import StorageClaim
from pytest_torchmem.values.contributors import (
    Category,
    Contributor,
)
from pytest_torchmem.values.trace import MarkKind, Ownership
from tests.builders import TraceBuilder


def a_run(*passes) -> MemoryProfile:
    """A weight of 8 bytes, a cache of 32 and scratch of 64."""
    b = TraceBuilder()
    weight = b.existing(8, Ownership.PARAMETER)
    with b.module(1, "Net"):
        with b.op("aten::cat", reads=[weight]):
            b.alloc(32)
        with b.op("aten::relu", reads=[weight]):
            scratch = b.alloc(64)
    b.free(scratch)
    return analyze_trace(b.build(), passes=passes)


def cache(storages):
    for found in storages:
        if found.storage.operator == "aten::cat":
            yield StorageClaim(found, Category.BUFFER, "the cache")


def broken(storages):
    yield from cache(storages)
    raise KeyError("layer")


def told(profile):
    return [(e.storage.category.value, e.decided_by, e.reason) for e in profile.explain()][1:]


def labelled_by_us():
    reason = "the body made it, and no graph, module or optimizer has it"
    return [("temporary", "temporaries", reason)] * 2


def test_a_claim_decides_and_is_told_as_evidence():
    profile = a_run(cache)
    assert told(profile) == [("buffer", "cache", "the cache"), labelled_by_us()[1]]
    assert (profile.peak.at_peak.buffer, profile.peak.at_peak.temporary) == (32, 64)
    (held,) = (c for c in profile.result().peak.live if c.category is Category.BUFFER)
    assert origin(held) == "of buffer (the cache) from aten::cat in Net"


def test_a_pass_moves_bytes_and_makes_none():
    assert a_run(cache).peak.total == a_run().peak.total


def test_passes_see_what_ours_decided_and_the_first_claim_counts():
    seen = []

    def second(storages):
        seen.extend(s.storage.category for s in storages)
        return [StorageClaim(storages[1], Category.INPUT, "too late")]

    assert told(a_run(cache, second))[0][0] == "buffer"
    assert seen == [Category.PARAMETER, Category.TEMPORARY, Category.TEMPORARY]


def test_a_pass_that_raises_claims_nothing_and_is_named():
    profile = a_run(broken, cache)
    assert profile.failed_passes == (
        "the category pass broken raised KeyError: 'layer'; none of its claims counts",
    )
    assert told(profile)[0] == ("buffer", "cache", "the cache")
    assert told(a_run(broken)) == labelled_by_us()


def test_what_is_no_claim_is_named_like_what_raises():
    (sentence,) = a_run(lambda storages: ["buffer"]).failed_passes
    assert "expected a StorageClaim, got 'buffer'" in sentence
    odd = a_run(lambda storages: [StorageClaim(storages[0], "kv", "it")])  # type: ignore[arg-type]
    (sentence,) = odd.failed_passes
    assert "a claim has a Category" in sentence


def test_a_part_of_a_recording_is_labelled_as_the_whole():
    b = TraceBuilder()
    begin = b.mark(MarkKind.REGION_BEGIN, "part")
    with b.op("aten::cat"):
        b.alloc(32)
    end = b.mark(MarkKind.REGION_END, "part")
    profile = analyze_trace(b.build(), passes=[cache])
    assert profile.region(begin, end).peak.at_peak.buffer == 32


def test_the_reason_travels_with_a_contributor():
    (held,) = (c for c in a_run(cache).result().peak.live if c.claimed)
    assert Contributor.from_json(held.to_json()) == held
    plain: Contributor = a_run().result().peak.live[0]
    assert "claimed" not in plain.to_json()
