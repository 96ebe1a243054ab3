"""What other people's viewers are given: Chrome traces and memory_viz snapshots."""

import copy
import gzip
import io
import json
import pickle
from collections import defaultdict
from itertools import pairwise

import pytest

from pytest_torchmem import analyze
from pytest_torchmem.report.viewers.memory_viz import pickled, snapshot
from pytest_torchmem.report.viewers.perfetto import chrome_trace
from pytest_torchmem.values.contributors import Category


@pytest.fixture(scope="module")
def events(profile):
    return json.loads(json.dumps(chrome_trace(profile)))["traceEvents"]


def counters(events):
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "C":
            found[event["name"]].append((event["ts"], event["args"]["bytes"]))
    return found


# --- Chrome traces. The rules are those of the "Trace Event Format".


def test_each_event_has_what_the_format_asks_for(events):
    needed = {
        "X": {"name", "cat", "ts", "dur", "pid", "tid"},
        "C": {"name", "ts", "pid", "args"},
        "M": {"name", "pid", "tid", "args"},
        "i": {"name", "ts", "pid", "tid", "s"},
    }
    for event in events:
        assert needed[event["ph"]] <= event.keys()
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
    assert {event["ph"] for event in events} == set(needed)


def test_slices_of_a_thread_nest(events):
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["tid"]].append((event["ts"], -event["dur"]))
    assert len(threads) >= 2
    for slices in threads.values():
        open_ends: list[float] = []
        for start, negative in sorted(slices):
            while open_ends and open_ends[-1] <= start + 1e-6:
                open_ends.pop()
            end = start - negative
            assert not open_ends or end <= open_ends[-1] + 1e-3
            open_ends.append(end)


def test_each_category_s_counter_reaches_its_own_peak(profile, events):
    found = counters(events)
    own = profile.peak.by_category
    for category in Category:
        values = [value for _, value in found.get(f"memory {category.value}", [(0, 0)])]
        assert max(values) == own[category]
    assert max(value for _, value in found["memory footprint"]) == profile.peak.total


def test_counters_are_in_the_order_of_time_and_speak_only_of_changes(events):
    for series in counters(events).values():
        assert [at for at, _ in series] == sorted(at for at, _ in series)
        values = [value for _, value in series]
        assert all(a != b for a, b in pairwise(values))


def test_operators_regions_and_phases_are_beside_them(events):
    names = {event["name"] for event in events if event["ph"] == "X"}
    assert {"aten::addmm", "both", "backward", "optimizer"} <= names


# --- memory_viz. torch's own reader of the form is the judge.


def test_torch_s_reader_sums_up_our_segments(profile):
    reader = pytest.importorskip("torch.cuda._memory_viz")
    text = reader.segsum(snapshot(profile))
    assert "segments:" in text
    assert reader.trace(snapshot(profile)).startswith("Device 0 ---")
    assert "<html" in reader.trace_plot(snapshot(profile)).lower()


def test_replaying_a_snapshot_reaches_our_peak(profile):
    held, level, top = {}, 0, 0
    for entry in snapshot(profile)["device_traces"][0]:
        if entry["action"] == "alloc":
            assert entry["addr"] not in held
            held[entry["addr"]] = entry["size"]
            level += entry["size"]
        else:
            level -= held.pop(entry["addr"])
        top = max(top, level)
    assert top == profile.peak.total
    assert sum(s["total_size"] for s in snapshot(profile)["segments"]) == level


def test_a_snapshot_names_category_operator_and_line(profile):
    entries = snapshot(profile)["device_traces"][0]
    made = next(e for e in entries if e["category"] == "activation")
    names = [frame["name"] for frame in made["frames"]]
    assert names[0] == "activation (forward)"
    assert "aten::linear" in names
    assert any(frame["filename"].endswith("conftest.py") for frame in made["frames"])


def test_the_pickle_holds_plain_values_only(profile):
    class Plain(pickle.Unpickler):
        def find_class(self, module, name):
            raise AssertionError(f"{module}.{name}")

    assert Plain(io.BytesIO(pickled(profile))).load() == snapshot(profile)


def test_a_gpu_s_snapshot_stands_at_its_number(profile):
    assert profile.evidence.counted.any()
    of_a_gpu = copy.copy(profile)  # with what is known of it already
    object.__setattr__(of_a_gpu, "device", "cuda:2")
    found = snapshot(of_a_gpu)
    assert [bool(trace) for trace in found["device_traces"]] == [False, False, True]
    assert {segment["device"] for segment in found["segments"]} <= {2}


# --- from finished torch profiles


def test_a_finished_torch_profile_goes_to_both_viewers(tmp_path):
    import torch

    shapes = {"record_shapes": True, "profile_memory": True, "with_stack": True}
    with torch.profiler.profile(**shapes) as finished:  # type: ignore[arg-type]
        torch.nn.Linear(32, 32)(torch.ones(8, 32)).sum().backward()
    analyze(finished).export(tmp_path / "x.json.gz", "trace")
    trace = json.loads(gzip.decompress((tmp_path / "x.json.gz").read_bytes()))
    assert any(event["name"] == "memory gradient" for event in trace["traceEvents"])
    analyze(finished).export(tmp_path / "x.pickle", "snapshot")
    entries = pickle.loads((tmp_path / "x.pickle").read_bytes())["device_traces"][0]
    assert "gradient" in {entry["category"] for entry in entries}
