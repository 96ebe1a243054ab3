"""What a GPU would make of a trace or an estimate, without one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pytest_torchmem.allocator import AllocatorSettingsError, Request
from pytest_torchmem.analysis.estimated.estimated_result import Estimate, requests_of_run
from pytest_torchmem.analysis.gpu_questions import with_counters
from pytest_torchmem.analysis.judge.verdict import judge_limits
from pytest_torchmem.analysis.pipeline import analyze_trace
from pytest_torchmem.values.errors import SizeError
from pytest_torchmem.values.findings import COUNTERS, FindingKind
from pytest_torchmem.values.results import Counters, Result
from pytest_torchmem.values.static_graph import (
    Lifetimes,
    NodeKind,
    StaticGraph,
    StaticNode,
    StaticRun,
    StaticStorage,
)
from pytest_torchmem.values.trace import MarkKind, Ownership
from pytest_torchmem.values.units import GiB, KiB, MiB
from tests.builders import TraceBuilder


def a_body() -> TraceBuilder:
    """3 MiB from before, and 30 MiB and 20 MiB that live together for a while."""
    b = TraceBuilder()
    weight = b.existing(3 * MiB, Ownership.PARAMETER)
    with b.op("aten::mm", reads=[weight]):
        first = b.alloc(30 * MiB)
    with b.op("aten::relu", reads=[first]):
        second = b.alloc(20 * MiB)
    b.free(first)
    with b.op("aten::neg", reads=[second]):
        b.alloc(5 * MiB)
    return b


def an_estimate() -> Estimate:
    """3 MiB from before; operator 0 makes 30 MiB, operator 1 makes 20 MiB and releases them."""
    nodes = (
        StaticNode("weight", NodeKind.INPUT, makes=(0,)),
        StaticNode("mm", NodeKind.OPERATOR, "aten::mm", makes=(1, 3)),
        StaticNode("relu", NodeKind.OPERATOR, "aten::relu", makes=(2,), uses=(1,)),
    )
    sizes = (3 * MiB, 30 * MiB, 20 * MiB, 0)
    storages = tuple(StaticStorage(size, "cuda:0") for size in sizes)
    lifetimes = Lifetimes(np.array([0, 1, 3, 1]), np.array([5, 4, 5, 5]))
    return Estimate.of(StaticRun(StaticGraph(nodes, storages), lifetimes, "cuda:0"), "step")


def test_the_requested_peak_is_the_footprints_peak():
    profile = analyze_trace(a_body().build())
    assert profile.simulate().peak.requested == profile.peak.total == 53 * MiB


def test_the_simulated_counters_of_a_trace_are_marked_estimated():
    assert analyze_trace(a_body().build()).simulate().peak.estimated


def test_reserved_counts_the_segments_that_requests_need():
    # 3 MiB come from a segment of 20 MiB, in which 5 MiB more have room; the others have their own.
    peak = analyze_trace(a_body().build()).simulate().peak
    assert peak.reserved == (20 + 30 + 20) * MiB


def test_each_segment_that_would_be_reserved_has_what_it_is_for_and_what_is_free_in_it():
    # When the last one is reserved the weight and 2 MiB are in the first, and one is empty.
    b = TraceBuilder()
    weight = b.existing(3 * MiB, Ownership.PARAMETER)
    with b.op("aten::mm", reads=[weight]):
        scratch = b.alloc(30 * MiB)
    b.free(scratch)
    for operator, size_bytes in (("aten::exp", 2 * MiB), ("aten::cat", 31 * MiB)):
        with b.op(operator, reads=[weight]):
            b.alloc(size_bytes)
    found = analyze_trace(b.build()).reserved_if_simulated("")
    assert {(s.size_bytes // MiB, c.operator, c.size_bytes // MiB) for s, c in found} == {
        (20, "aten::exp", 15),
        (30, "aten::mm", 30),
        (32, "aten::cat", 1),
    }


def test_what_was_there_before_is_asked_for_first():
    requests = analyze_trace(a_body().build()).allocator_requests
    assert requests.kind[0] == Request.ALLOC
    assert requests.size_bytes[0] == 3 * MiB


def test_a_region_is_asked_about_what_it_counts_alone():
    b = TraceBuilder()
    used, unused = b.existing(3 * MiB), b.existing(64 * MiB)
    b.alloc(40 * MiB)
    begin = b.mark(MarkKind.REGION_BEGIN, "r")
    with b.op("aten::mm", reads=[used]):
        made = b.alloc(30 * MiB)
    b.free(made)
    end = b.mark(MarkKind.REGION_END, "r")
    b.free(unused)
    profile = analyze_trace(b.build())
    region = profile.region(begin, end)
    assert region.simulate().peak.requested == region.peak.total == 33 * MiB


def test_what_dies_after_the_window_is_never_freed_in_it():
    b = TraceBuilder()
    begin = b.mark(MarkKind.REGION_BEGIN, "r")
    made = b.alloc(30 * MiB)
    end = b.mark(MarkKind.REGION_END, "r")
    b.free(made)
    assert Request.FREE not in analyze_trace(b.build()).region(begin, end).allocator_requests.kind


def test_the_order_of_what_is_older_than_the_recording_does_not_depend_on_pointers():
    def order(*sizes: int) -> list[int]:
        b = TraceBuilder()
        blocks = [b.existing(size, Ownership.PARAMETER) for size in sizes]
        with b.op("aten::cat", reads=blocks):
            b.alloc(MiB)
        return analyze_trace(b.build()).allocator_requests.size_bytes.tolist()

    assert order(MiB, 3 * MiB, 2 * MiB) == order(3 * MiB, 2 * MiB, MiB)


def test_whether_it_fits_is_a_truth_value_and_a_sentence():
    profile = analyze_trace(a_body().build())
    fit = profile.fits("1GiB")
    assert fit
    assert str(fit).startswith(
        "fits in 1.0 GiB with 954.0 MiB to spare; fragmentation 24% (estimated): of 70.0 MiB, "
    )
    tight = profile.fits(60 * MiB)
    assert not tight
    assert str(tight).startswith("does not fit in 60.0 MiB (estimated): an allocation of 20.0 MiB")


def test_other_settings_reserve_other_amounts():
    b = TraceBuilder()
    for k in range(8):
        b.free(b.alloc((30 + 8 * k) * MiB))
    profile = analyze_trace(b.build())
    assert profile.simulate().peak.reserved == sum((30 + 8 * k) * MiB for k in range(8))
    expandable = profile.simulate("expandable_segments:True").peak.reserved
    assert expandable == 100 * MiB  # pages of 20 MiB, for 86 MiB at once


def test_a_setting_or_a_size_that_means_nothing_is_an_error_with_a_slug():
    profile = analyze_trace(a_body().build())
    with pytest.raises(AllocatorSettingsError, match=r"\[bad-allocator-settings\]"):
        profile.simulate("no_such_option:1")
    with pytest.raises(SizeError, match=r"\[bad-size\]"):
        profile.fits("24")


def test_an_estimate_answers_the_same_questions():
    estimate = an_estimate()
    assert estimate.simulate().peak.requested == estimate.peak.total == 53 * MiB
    assert estimate.simulate().peak.reserved == 70 * MiB
    assert not estimate.fits("64MiB")


def test_storages_without_bytes_are_no_requests():
    assert 0 not in requests_of_run(an_estimate().run).size_bytes


def test_an_estimate_is_a_result_that_goes_through_json():
    estimate = an_estimate()
    back = Result.from_json(estimate.to_json())
    assert back.estimated
    assert back.name == "step"
    assert back.peak == estimate.peak


@pytest.mark.parametrize("key", COUNTERS)
def test_a_limit_that_only_a_gpu_counts_is_answered_by_the_simulation(key):
    profile = analyze_trace(a_body().build())
    limits = {key: 40 * MiB}
    result = with_counters(profile.result(), limits, profile, "")
    (finding,) = judge_limits(result, limits)
    amount = {"allocated": "53.0 MiB", "active": "53.0 MiB", "reserved": "70.0 MiB"}[key]
    assert finding.sentence.startswith(f"{key} memory peaked at an estimated {amount}, ")
    assert result.notes[-1].startswith(f"{key} memory is estimated: torch's CUDA caching allocator")
    assert "simulated over the allocations on cpu, reserves 70.0 MiB" in result.notes[-1]
    assert judge_limits(result, {key: 70 * MiB}) == ()


def test_the_footprint_of_such_a_result_is_still_called_measured():
    profile = analyze_trace(a_body().build())
    limits = {"reserved": MiB, "total": MiB}
    findings = judge_limits(with_counters(profile.result(), limits, profile, ""), limits)
    assert {f.key: "an estimated" in f.sentence for f in findings} == {
        "reserved": True,
        "total": False,
    }


def test_nothing_is_simulated_unless_a_limit_asks():
    profile = analyze_trace(a_body().build())
    result = profile.result()
    assert with_counters(result, {"total": GiB}, profile, "") is result


def test_a_gpu_without_a_reading_is_not_answered_by_an_estimate():
    b = TraceBuilder(devices=["cuda:0"])
    b.alloc(MiB)
    profile = analyze_trace(b.build(), "cuda:0")
    limits = {"reserved": GiB}
    result = with_counters(profile.result(), limits, profile, "")
    (finding,) = judge_limits(result, limits)
    assert finding.kind is FindingKind.NO_COUNTER


def test_measured_counters_stay():
    b = TraceBuilder(devices=["cuda:0"])
    b.alloc(64 * KiB)
    read = {"requested": 1, "allocated": 2, "active": 3, "reserved": 4}
    trace = b.build()
    profile = analyze_trace(replace(trace, meta={**trace.meta, "counters": read}), "cuda:0")
    result = with_counters(profile.result(), {"reserved": GiB}, profile, "")
    assert result.counters == Counters(1, 2, 3, 4)
    assert not result.counters.estimated


def test_estimated_counters_stay_so_through_json():
    profile = analyze_trace(a_body().build())
    result = with_counters(profile.result(), {"reserved": GiB}, profile, "")
    assert Result.from_json(result.to_json()) == result
    assert result.counters is not None
    assert result.counters.estimated
