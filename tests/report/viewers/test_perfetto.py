"""A Chrome trace in Perfetto: what its trace processor understood, asked by SQL."""

import json
from collections import Counter

import pytest

from pytest_torchmem.report.viewers.perfetto import chrome_trace
from pytest_torchmem.values.contributors import Category
from pytest_torchmem.values.trace import EventKind
from tests.trace_processor import ask, fetched

pytestmark = pytest.mark.slow

ERRORS = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
COUNTERS = """select track.name as name, ts, value, process.name as process from counter
  join process_counter_track track on counter.track_id = track.id
  join process using (upid) order by ts"""
SLICES = """select slice.id, slice.name, category, ts, dur, depth, parent_id, tid,
  thread.name as thread from slice join thread_track on slice.track_id = thread_track.id
  join thread using (utid) order by ts, depth"""
MOMENTS = """select slice.name from slice join process_track on slice.track_id = process_track.id
  where dur = 0"""


@pytest.fixture(scope="module")
def page(pytestconfig, tmp_path_factory):
    name = "perfetto-ui-1.1.0"
    cache = getattr(pytestconfig, "cache", None)  # none under `-p no:cacheprovider`
    return fetched(cache.mkdir(name) if cache else tmp_path_factory.mktemp(name))


@pytest.fixture(scope="module")
def answers(page, profile, tmp_path_factory):
    trace = tmp_path_factory.mktemp("perfetto") / "x.perfetto.json"
    trace.write_text(json.dumps(chrome_trace(profile)))
    names = ("errors", "counters", "slices", "moments")
    return dict(zip(names, ask(page, trace, ERRORS, COUNTERS, SLICES, MOMENTS), strict=True))


@pytest.fixture
def counters(answers):
    found = {}
    for row in answers["counters"]:
        assert row["process"] == "memory of cpu"
        found.setdefault(row["name"], []).append((row["ts"], row["value"]))
    return found


def test_the_trace_is_read_without_an_error(answers):
    assert answers["errors"] == []


def test_each_category_has_a_counter_with_every_level_at_its_time(profile, counters):
    timeline = profile.timeline
    levels = {f"memory {c.value} bytes": timeline.of(c) for c in Category if any(timeline.of(c))}
    levels["memory footprint bytes"] = timeline.total
    assert set(counters) == set(levels)
    for name, expected in levels.items():
        series = dict(counters[name])  # of several changes in one nanosecond the last one stays
        level = None
        for at, value in dict(
            zip(timeline.times_ns.tolist(), expected.tolist(), strict=True)
        ).items():
            level = series.get(at, level)
            assert level == value, (name, at)


def test_the_sum_peaks_where_the_result_does(profile, counters):
    total = counters["memory footprint bytes"]
    assert max(value for _, value in total) == profile.peak.total
    assert (profile.peak.time_ns, profile.peak.total) in total
    for category in Category:
        series = counters.get(f"memory {category.value} bytes", [(0, 0)])
        assert max(value for _, value in series) == profile.peak.by_category[category]


def test_every_operator_is_a_slice_with_its_name_and_its_times(profile, answers):
    events = profile.tree.trace.events
    operators = events[events["kind"] == EventKind.TORCH_OP]
    start_ns = int(events["start_ns"].min())
    names = profile.tree.trace.strings
    expected = Counter((names[row["name"]], int(row["end_ns"]) - start_ns) for row in operators)
    assert len(expected) > 100
    shown = [row for row in answers["slices"] if row["category"] == "operator"]
    assert Counter((row["name"], row["ts"] + row["dur"]) for row in shown) == expected


def test_slices_lie_under_those_that_called_them(answers):
    by_id = {row["id"]: row for row in answers["slices"]}
    parents = Counter()
    for row in by_id.values():
        parent = by_id.get(row["parent_id"])
        assert row["depth"] == (parent["depth"] + 1 if parent else 0)
        if parent:
            assert parent["ts"] <= row["ts"]
            assert row["ts"] + row["dur"] <= parent["ts"] + parent["dur"]
            parents[parent["name"], row["name"]] += 1
    assert parents["aten::linear", "aten::addmm"] == 4
    assert parents["both", "optimizer"] == 2


def test_threads_regions_and_moments_have_their_names(answers):
    threads = {row["thread"] for row in answers["slices"]}
    assert threads == {"main thread", "regions and phases"}
    assert {row["name"] for row in answers["moments"]} == {"step"}
    spans = [r["name"] for r in answers["slices"] if r["thread"] == "regions and phases"]
    assert spans == ["both", *["backward", "optimizer"] * 2]
