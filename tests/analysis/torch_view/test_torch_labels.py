"""``labels="torch"`` gives torch's own data, to the last entry, on every workload."""

from __future__ import annotations

import gzip
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.profiler._memory_profiler import MemoryProfile, MemoryProfileTimeline, TensorKey

from benchmarks.workloads import Declarations, Workload
from benchmarks.workloads_models import all_workloads
from pytest_torchmem import TorchmemError, analyze
from pytest_torchmem.analysis.events.op_tree import build_op_tree
from pytest_torchmem.analysis.torch_view.torch_timeline import TorchMemoryProfile
from pytest_torchmem.record.profiled.from_profiler import trace_of
from pytest_torchmem.values.errors import DeviceError, MarkerError, ReportError

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


def profiled(body: Any) -> Any:
    with profile(
        activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True, with_stack=True
    ) as finished:
        body()
    return finished


@pytest.fixture(scope="module")
def finished() -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters())

    def body() -> None:
        model(torch.randn(16, 32)).sum().backward()
        optimizer.step()

    return profiled(body)


@pytest.mark.parametrize("workload", all_workloads(), ids=lambda w: w.__name__)
def test_every_entry_equals_torchs(workload: Workload, tmp_path: Path) -> None:
    torch.manual_seed(0)
    finished = profiled(workload(Declarations()))
    ours = TorchMemoryProfile(build_op_tree(trace_of(finished)))
    theirs = MemoryProfileTimeline(MemoryProfile(finished.profiler.kineto_results))
    theirs.export_memory_timeline_raw(str(tmp_path / "raw.json"), "cpu")
    raw = [tuple(entry) for entry in json.loads((tmp_path / "raw.json").read_text())]
    assert len(raw) > 4
    assert sorted(ours.raw("cpu")) == sorted(raw)
    assert ours.coalesced("cpu") == tuple(theirs._coalesce_timeline("cpu"))
    ours.graph.validate()


def test_entries_have_torchs_keys_and_versions(finished: Any) -> None:
    ours = TorchMemoryProfile(build_op_tree(trace_of(finished)))
    keys = ours.graph.keys
    mine = [
        (
            (int(e["time_ns"]), int(e["action"]), int(e["size_bytes"]), int(e["version"])),
            (int(keys.id[e["key"]]), int(keys.allocation_id[e["key"]])) if e["key"] >= 0 else (),
        )
        for e in ours.entries
    ]
    theirs = [
        (
            (time, action.value, size, version),
            (key.id, key.storage.allocation_id) if isinstance(key, TensorKey) else (),
        )
        for time, action, (key, version), size in MemoryProfile(
            finished.profiler.kineto_results
        ).timeline
    ]
    assert len({key for _, key in mine}) > 10
    assert sorted(mine) == sorted(theirs)


@pytest.mark.parametrize("suffix", ["json", "json.gz", "raw.json.gz"])
def test_the_export_writes_what_torchs_deprecated_method_writes(
    finished: Any, tmp_path: Path, suffix: str
) -> None:
    mine, torchs = tmp_path / f"mine.{suffix}", tmp_path / f"torch.{suffix}"
    analyze(finished, "cpu").export(mine, labels="torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        finished.export_memory_timeline(str(torchs), "cpu")
    read = gzip.open if suffix.endswith("gz") else open
    ours, theirs = (json.load(read(path)) for path in (mine, torchs))
    if "raw" in suffix:  # entries of one instant come in any order
        ours, theirs = sorted(ours), sorted(theirs)
    assert ours == theirs


@pytest.mark.parametrize("labels", ["torchmem", "torch"])
def test_the_html_export_shows_the_peak(finished: Any, tmp_path: Path, labels: Any) -> None:
    path = tmp_path / "timeline.html"
    analyze(finished, "cpu").export(path, labels=labels)
    text = path.read_text()
    assert "PARAMETER" in text.upper()
    assert "http://" not in text.replace("http://www.w3.org", "")


def test_our_labels_see_what_backward_keeps_in_a_foreign_profile(finished: Any) -> None:
    profile = analyze(finished, "cpu")
    # Inputs of the first layer are data; what the layers keep are the ReLU's output and nothing
    # else: its own input is not needed to differentiate it.
    assert profile.peak.activation == 16 * 64 * 4
    assert profile.peak.parameter == sum([32 * 64, 64, 64 * 8, 8]) * 4


def test_a_running_profile_is_refused_with_a_sentence() -> None:
    with pytest.raises(TorchmemError, match="after it has stopped"):
        analyze(profile())


def test_other_labels_are_refused(finished: Any, tmp_path: Path) -> None:
    with pytest.raises(MarkerError, match="labels: 'mine' is none of 'torchmem', 'torch'"):
        analyze(finished).export(tmp_path / "x.json", labels="mine")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["x.png", "x", "x.json.zip", "x.JSON"])
def test_an_ending_that_stands_for_no_form_is_refused(
    finished: Any, tmp_path: Path, name: str
) -> None:
    with pytest.raises(ReportError, match=r"written as \.html, \.json, \.json\.gz or \.raw\.json"):
        analyze(finished).export(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_profile_has_an_empty_timeline(tmp_path: Path) -> None:
    path = tmp_path / "empty.json"
    empty = profiled(lambda: None)
    analyze(empty).export(path, labels="torch")
    assert json.loads(path.read_text()) == [[], []]
    with pytest.raises(DeviceError, match="no memory on 'cpu'; it has: none"):
        analyze(empty, "cpu")
