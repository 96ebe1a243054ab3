"""Pictures: small, and exact wherever they say anything."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_torchmem.analysis.pipeline import analyze_trace
from pytest_torchmem.analysis.sampling import sketch, sketch_timeline
from pytest_torchmem.analysis.storages.timeline import Timeline, live_at
from pytest_torchmem.measuring.body_measurement import BodyMeasurement
from pytest_torchmem.values.contributors import Category
from pytest_torchmem.values.picture import Picture
from pytest_torchmem.values.trace import DEVICE_EVENT, DeviceEventKind
from tests.builders import TraceBuilder

COLUMNS = len(Category)


def timeline_of(levels):
    sizes = np.array(levels, np.int64).reshape(-1, COLUMNS)
    return Timeline(np.arange(len(sizes), dtype=np.int64) * 10, sizes)


levels = st.lists(
    st.lists(st.integers(0, 9), min_size=COLUMNS, max_size=COLUMNS), min_size=1, max_size=80
)


@given(levels, st.integers(1, 30))
def test_the_peak_and_each_category_s_own_peak_survive_any_sampling(levels, moments):
    timeline = timeline_of(levels)
    picture = sketch_timeline(timeline, moments)
    assert picture.totals[picture.peak] == timeline.total.max()
    assert picture.at(picture.peak) == timeline.at(timeline.peak_row)
    assert picture.rows[picture.peak] == timeline.peak_row
    own = timeline.largest
    for category, column in picture.levels.items():
        assert max(column) == own[category] > 0
    assert {c for c in Category if own[c]} == set(picture.levels)


@given(levels, st.integers(1, 30))
def test_each_moment_that_is_kept_is_exact(levels, moments):
    timeline = timeline_of(levels)
    picture = sketch_timeline(timeline, moments)
    for moment, row in enumerate(picture.rows):
        assert picture.at(moment) == timeline.at(row)
        assert picture.times_ns[moment] == timeline.times_ns[row]
    assert picture.rows[0] == 0
    assert picture.rows[-1] == len(levels) - 1 == picture.change_count - 1


@given(levels, st.integers(1, 30))
def test_a_picture_crosses_as_plain_values(levels, moments):
    picture = sketch_timeline(timeline_of(levels), moments)
    assert Picture.from_json(json.loads(json.dumps(picture.to_json()))) == picture


@pytest.mark.parametrize("row", [1, 503, 998])
def test_the_lowest_moment_survives_any_sampling(row):
    levels = [[5] * COLUMNS for _ in range(1000)]
    levels[row] = [0] * COLUMNS
    picture = sketch_timeline(timeline_of(levels), moments=10)
    assert picture.totals[picture.rows.index(row)] == 0


def test_a_long_timeline_becomes_a_small_picture():
    changes = np.random.default_rng(0).integers(0, 1 << 40, (100_000, COLUMNS))
    picture = sketch_timeline(timeline_of(changes))
    assert len(picture.times_ns) <= 400 + COLUMNS + 3
    assert len(json.dumps(picture.to_json())) < 120_000


def test_an_empty_timeline_is_an_empty_picture():
    picture = sketch_timeline(timeline_of([]))
    assert picture.times_ns == picture.totals == ()
    assert Picture.from_json(picture.to_json()) == picture


@pytest.fixture(scope="module")
def recorded():
    import torch

    measurement = BodyMeasurement("cpu")
    measurement.start()
    net = torch.nn.Linear(64, 64)
    with measurement.region("forward"):
        loss = net(torch.ones(16, 64)).square().sum()
    loss.backward()
    assert list(measurement.steps(1, 0)) == [0]
    measurement.stop()
    return measurement


def test_the_largest_contributors_of_each_moment_have_tracks(recorded):
    profile = recorded.profile_so_far()
    picture = sketch(profile)
    assert len(picture.times_ns) == picture.change_count  # nothing is left out
    for moment, row in enumerate(picture.rows):
        drawn = {t.contributor.identity: t.levels[moment] for t in picture.tracks}
        live = profile.attribution.contributors(live_at(profile.evidence, profile.ranks[row]))
        for contributor in live[:4]:
            assert drawn[contributor.identity] == contributor.size_bytes


def test_a_sampled_picture_s_tracks_never_hold_more_than_the_footprint(recorded):
    picture = sketch(recorded.profile_so_far(), moments=6)
    assert len(picture.times_ns) < picture.change_count
    for moment, total in enumerate(picture.totals):
        assert sum(track.levels[moment] for track in picture.tracks) <= total
    for track in picture.tracks:
        assert track.contributor.size_bytes == max(track.levels)


def test_operators_add_up_to_what_was_allocated(recorded):
    profile = recorded.profile_so_far()
    picture = sketch(profile)
    made = profile.evidence.made & profile.evidence.counted
    allocated_bytes = sum(use.allocated_bytes for use in picture.operators)
    assert allocated_bytes == profile.storages.size_bytes[made].sum()
    assert all(use.calls > 0 for use in picture.operators if use.operator.startswith("aten::"))
    assert sum(o.at_peak_bytes for o in picture.operators) <= profile.peak.total


def test_an_operator_has_the_time_of_its_parts_though_they_took_longer():
    b = TraceBuilder()
    with b.op("aten::outer"):
        b.alloc(4)
        with b.op("aten::inner"):
            b.alloc(8)
    trace = b.build()
    inner = [trace.strings[n] for n in trace.events["name"].tolist()].index("aten::inner")
    trace.events["end_ns"][inner] += 1_000_000
    picture = sketch(analyze_trace(trace))
    (use,) = picture.operators
    assert use.self_time_ns > 1_000_000  # that of its part; its own is below 0, so nothing
    assert Picture.from_json(picture.to_json()) == picture


def test_operators_have_their_own_time_and_what_ran_at_the_peak_is_known():
    b = TraceBuilder()
    with b.op("aten::outer"):
        with b.op("aten::inner"):
            b.alloc(4)
        with b.op("aten::inner"):
            b.alloc(8)
    picture = sketch(analyze_trace(b.build()))
    (use,) = picture.operators
    assert (use.operator, use.calls, use.allocated_bytes) == ("aten::outer", 1, 12)
    events = analyze_trace(b.build()).tree.trace.events
    durations = (events["end_ns"] - events["start_ns"])[events["end"] - np.arange(len(events)) > 1]
    assert use.self_time_ns == durations[0] > 0
    assert [span.name for span in picture.running] == ["aten::outer", "aten::inner"]
    assert Picture.from_json(picture.to_json()) == picture


def test_where_a_gpu_s_queue_ran_dry_is_a_span():
    b = TraceBuilder()
    with b.op("aten::mm"):
        b.alloc(4)
    trace = b.build()
    start = int(trace.events["start_ns"].min())
    kernel, launch = int(DeviceEventKind.KERNEL), int(DeviceEventKind.LAUNCH)
    rows = [
        (launch, 1, start + 1, start + 2, 0, -1, -1),
        (kernel, 1, start + 2, start + 3, 0, 0, 0),
    ]
    trace = replace(trace, device_events=np.array(rows, DEVICE_EVENT))
    spans = [span for span in sketch(analyze_trace(trace)).spans if span.kind == "idle"]
    assert [(span.begin_ns, span.end_ns) for span in spans] == [(0, 1)]
    assert not [s for s in sketch(analyze_trace(b.build())).spans if s.kind == "idle"]


def test_an_operator_before_a_region_allocated_nothing_in_it():
    import torch

    measurement = BodyMeasurement("cpu")
    measurement.start()
    before = torch.ones(1000)
    with measurement.region("part") as part:
        after = before.neg()
    measurement.stop()
    assert {use.operator for use in part.picture().operators} == {"aten::neg"}
    assert {t.contributor.operator for t in part.picture().tracks} == {"aten::ones", "aten::neg"}
    del after


def test_regions_steps_and_phases_are_spans(recorded):
    spans = sketch(recorded.profile_so_far()).spans
    assert [(s.kind, s.name) for s in spans if s.kind in ("region", "step")] == [
        ("region", "forward"),
        ("step", ""),
    ]
    (backward,) = (span for span in spans if span.kind == "backward")
    (region,) = (span for span in spans if span.kind == "region")
    assert region.begin_ns <= region.end_ns <= backward.begin_ns <= backward.end_ns


def test_calls_before_and_after_a_region_are_none_of_it():
    import torch

    measurement = BodyMeasurement("cpu")
    measurement.start()
    first = torch.ones(1000)
    second = first.neg()
    with measurement.region("part") as part:
        third = second.neg()
    fourth = third.neg()
    measurement.stop()
    assert [(use.operator, use.calls) for use in part.picture().operators] == [("aten::neg", 1)]
    del fourth


def test_as_many_moments_as_there_are_room_for_are_all_kept():
    alike = [[n // 2] * COLUMNS for n in range(12)]
    assert sketch_timeline(timeline_of(alike), 12).rows == tuple(range(12))
