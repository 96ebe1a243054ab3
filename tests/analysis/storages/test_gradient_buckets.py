"""DDP's buckets: found by what is copied to them, from the first moment to the last."""

from __future__ import annotations

from dataclasses import replace

from pytest_torchmem.analysis.pipeline import MemoryProfile, analyze_trace
from tests.builders import Block, TraceBuilder

GRADIENT, BUCKET = 100, 300


def copied(b: TraceBuilder, bucket: Block, name: str = "mul_out") -> None:
    """A gradient is made, and goes to the bucket."""
    with b.backward(), b.node("torch::autograd::AccumulateGrad"):
        gradient = b.alloc(GRADIENT)
        with b.op(f"torch::distributed::reducer::{name}", writes=[bucket], is_operator=False):
            b.read(gradient, name="aten::mul")
        b.free(gradient)


def finished(b: TraceBuilder) -> MemoryProfile:
    trace = b.build()
    return analyze_trace(replace(trace, meta={**trace.meta, "live_at_start_known": True}))


def test_a_bucket_that_nobody_holds_is_a_gradient():
    for name in ("mul_out", "copy_"):
        b = TraceBuilder()
        copied(b, b.unheard_of(BUCKET), name)
        profile = finished(b)
        assert profile.peak.total == BUCKET + GRADIENT
        assert profile.peak.by_category.gradient >= BUCKET
        assert not [*profile.reconciliation.sentences()]


def test_what_something_else_writes_to_stays_foreign():
    b = TraceBuilder()
    with b.op("aten::mul", writes=[b.unheard_of(BUCKET)]):
        pass
    profile = finished(b)
    assert profile.peak.total == 0
    assert "not in the figures" in next(profile.reconciliation.sentences())


def test_an_old_bucket_is_gone_when_a_forward_pass_makes_a_new_one():
    b = TraceBuilder()
    old = b.unheard_of(BUCKET)
    copied(b, old)
    with b.module(1, "DistributedDataParallel"):
        new = b.alloc(BUCKET)
    copied(b, new)
    profile = finished(b)
    assert profile.peak.total == BUCKET + GRADIENT
    assert profile.peak.by_category.gradient >= BUCKET


def test_a_bucket_stays_when_another_model_makes_one():
    b = TraceBuilder()
    copied(b, b.unheard_of(BUCKET))
    other = b.alloc(BUCKET)  # outside of every forward pass
    copied(b, other)
    assert finished(b).peak.total == 2 * BUCKET + GRADIENT


def test_a_bucket_that_is_used_again_was_there_all_the_time():
    b = TraceBuilder()
    one = b.unheard_of(BUCKET)
    copied(b, one)
    with b.module(1, "DistributedDataParallel"):
        other = b.alloc(BUCKET)
    copied(b, other)
    copied(b, one)
    assert finished(b).peak.total == 2 * BUCKET + GRADIENT
