"""Traces from torch's CUDA build, analysed: the numbers are those that its allocator counted."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from pytest_torchmem.analysis.pipeline import MemoryProfile, analyze
from pytest_torchmem.trace import load_trace
from tests.cuda.record_traces import FOLDER, NAMES

COUNTED: dict[str, Any] = json.loads((FOLDER / "counted.json").read_text())["bodies"]


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def profile(name: str) -> MemoryProfile:
    return analyze(load_trace(FOLDER / f"{name}.trace"))


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
    run = profile.simulate()
    assert run.peak.requested == profile.peak.total
    assert run.peak.allocated >= run.peak.requested
    assert run.peak.reserved >= run.peak.allocated
