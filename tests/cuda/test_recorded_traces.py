"""Traces from torch's CUDA build, analysed: the numbers are those that its allocator counted."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from pytest_torchmem.analysis.pipeline import MemoryProfile, analyze_trace
from pytest_torchmem.store.traces import load_trace
from pytest_torchmem.values.json_values import checked_object, whole_number
from pytest_torchmem.values.trace import Trace
from tests.cuda.record_traces import FOLDER, NAMES

COUNTED: dict[str, Any] = json.loads((FOLDER / "counted.json").read_text())["bodies"]


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def profile(name: str) -> MemoryProfile:
    return analyze_trace(load_trace(FOLDER / f"{name}.trace"))


def test_the_peak_is_what_the_allocator_counted(name: str, profile: MemoryProfile) -> None:
    assert profile.peak.total == COUNTED[name]["unrecorded"]
    assert asdict(profile.peak.at_peak) == COUNTED[name]["at_peak"]


def test_everything_reconciles(profile: MemoryProfile) -> None:
    result = profile.result()
    assert result.device == "cuda:0"
    assert result.unexplained_bytes == 0
    assert result.peak.unknown == 0
    assert result.retained.total == 0
    assert result.notes == ()
    assert result.counters is not None
    assert result.counters.allocated >= result.counters.requested >= result.peak.total


def test_the_simulated_allocator_needs_what_the_real_one_did(profile: MemoryProfile) -> None:
    simulated, counted = profile.simulate().peak, profile.result().counters
    assert counted is not None
    assert simulated.requested == profile.peak.total
    assert (simulated.requested, simulated.allocated) == (counted.requested, counted.allocated)
    # The real one also had what earlier bodies of the process left in its cache.
    assert simulated.allocated <= simulated.reserved <= counted.reserved


@pytest.fixture
def training() -> Trace:
    return load_trace(FOLDER / "training.trace")


def test_workspaces_have_a_category_of_their_own(training: Trace) -> None:
    peak = analyze_trace(training).peak
    assert peak.workspace == 2 * training.meta["workspace_bytes"][0]
    assert peak.temporary < peak.workspace
    unknown_sizes = replace(training, meta={**training.meta, "workspace_bytes": []})
    assert analyze_trace(unknown_sizes).peak.workspace == 0
    assert analyze_trace(unknown_sizes).peak.total == peak.total


def test_requests_count_and_blocks_do_not(training: Trace) -> None:
    counters = analyze_trace(training).result().counters
    assert counters is not None
    assert counters.requested < counters.allocated
    allocations = training.allocations.copy()
    allocations["requested_bytes"] = 0
    blocks = analyze_trace(replace(training, allocations=allocations))
    assert blocks.peak.total == COUNTED["training"]["unrecorded"] + (
        counters.allocated - counters.requested
    )
    assert "size of their block" in blocks.result().notes[0]


def test_bytes_that_the_events_miss_are_named(training: Trace) -> None:
    counted = checked_object(training.meta["counters"])
    more = {**counted, "allocated": whole_number(counted["allocated"]) + 4096}
    seen = analyze_trace(replace(training, meta={**training.meta, "counters": more}))
    assert seen.unexplained_bytes == 4096
    assert "the allocator's own peak holds 4.0 KiB" in seen.result().blind_spots[0]
