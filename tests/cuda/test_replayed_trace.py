"""A recording as a GPU would give it, made from one of the CPU: stands in where there is none.

The same body allocates the same storages on both. On a GPU blocks are larger than requests, each
event carries the allocator's totals, and cuBLAS has a workspace that no tensor holds.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pytest_torchmem.analysis.pipeline import MemoryProfile, analyze
from pytest_torchmem.record.recorder import Recorder
from pytest_torchmem.trace import Trace

WORKSPACE = 8 * 1024 * 1024 + 128 * 1024


@pytest.fixture(scope="module")
def on_cpu() -> Trace:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(100, 50), torch.nn.Sigmoid())
    batch = torch.randn(30, 100)
    recorder = Recorder(torch.device("cpu"))
    recorder.start()
    model(batch).sum().backward()
    return recorder.stop()


def as_on_a_gpu(trace: Trace, workspace: bool = False) -> Trace:
    allocations = trace.allocations.copy()
    sign = np.sign(allocations["size_bytes"])
    requested = np.abs(allocations["size_bytes"])
    allocations["requested_bytes"] = np.where(sign > 0, requested, 0)
    allocations["size_bytes"] = sign * (-(-requested // 512) * 512)
    if workspace:
        # The first matrix product's output moves one place on: the workspace comes before it.
        row = int(np.flatnonzero(_parents(trace) == "aten::addmm")[0])
        allocations["size_bytes"][row] = allocations["requested_bytes"][row] = WORKSPACE
        allocations["keyed"][row] = False
        freed = (allocations["ptr"] == allocations["ptr"][row]) & (sign < 0)
        allocations = allocations[~freed]
    allocations["total_allocated"] = np.cumsum(allocations["size_bytes"]) + 12345 * 512
    meta = {**trace.meta, "device": "cuda:0", "workspace_bytes": [WORKSPACE]}
    return replace(trace, allocations=allocations, devices=("cuda:0",), meta=meta)


def _parents(trace: Trace) -> np.ndarray:
    parent = trace.events["parent"][trace.allocations["event"]]
    names = np.array([*trace.strings, ""])
    return np.where(parent >= 0, names[trace.events["name"][parent]], "")


def test_requests_count_and_blocks_do_not(on_cpu: Trace) -> None:
    cpu, gpu = analyze(on_cpu), analyze(as_on_a_gpu(on_cpu))
    assert gpu.device == "cuda:0"
    assert gpu.peak.total == cpu.peak.total
    assert gpu.peak.at_peak == cpu.peak.at_peak
    assert gpu.result().notes == ()


def test_the_running_total_agrees_with_the_allocators(on_cpu: Trace) -> None:
    assert analyze(as_on_a_gpu(on_cpu)).unexplained_bytes == 0


def test_bytes_that_the_events_miss_are_named(on_cpu: Trace) -> None:
    trace = as_on_a_gpu(on_cpu)
    allocations = trace.allocations.copy()
    allocations["total_allocated"][len(allocations) // 2 :] += 4096
    assert analyze(replace(trace, allocations=allocations)).unexplained_bytes == 4096


def test_without_a_history_blocks_count_and_that_is_said(on_cpu: Trace) -> None:
    trace = as_on_a_gpu(on_cpu)
    allocations = trace.allocations.copy()
    allocations["requested_bytes"] = 0
    profile = analyze(replace(trace, allocations=allocations))
    assert profile.peak.total > analyze(on_cpu).peak.total
    assert "size of their block" in profile.result().notes[0]


def test_a_workspace_is_no_temporary_and_nothing_that_a_body_retains(on_cpu: Trace) -> None:
    profile: MemoryProfile = analyze(as_on_a_gpu(on_cpu, workspace=True))
    assert profile.peak.workspace == WORKSPACE
    assert profile.peak.temporary < WORKSPACE
    assert profile.retained == analyze(on_cpu).retained
