"""Snapshots of torch's allocator: the start of their history, their peak, and who made it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_torchmem.allocator import RequestLog, Requests, simulate
from pytest_torchmem.analysis.snapshot import read_snapshot, read_snapshots
from pytest_torchmem.values.contributors import Phase
from pytest_torchmem.values.errors import DeviceError, RequestError, SnapshotError
from pytest_torchmem.values.units import KiB, MiB
from tests.analysis.snapshots import entry, frame, segments_of, snapshot_of

SIZES = st.one_of(
    st.integers(1, 4 * KiB), st.integers(1, 12 * MiB), st.integers(10 * MiB, 70 * MiB)
)


def run_of(*steps: tuple[str, int, int]) -> tuple[Requests, object]:
    log = RequestLog()
    for what, key, size in steps:
        log.alloc(key, size) if what == "alloc" else log.free(key)
    return log.requests(), simulate(log.requests())


@st.composite
def programs(draw):
    log, live = RequestLog(), []
    for key in range(draw(st.integers(1, 60))):
        if live and draw(st.integers(0, 2)) == 0:
            log.free(live.pop(draw(st.integers(0, len(live) - 1))))
        log.alloc(key, draw(SIZES))
        live.append(key)
    return log.requests()


@settings(deadline=None)
@given(programs(), st.integers(0, 80))
def test_a_history_that_begins_in_the_middle_is_replayed_from_its_own_start(requests, first):
    first = min(first, len(requests) - 1)
    whole = simulate(requests)
    snapshot = read_snapshot(snapshot_of(requests, whole, first))
    assert snapshot.begins_in_the_middle == (first > 0)
    assert snapshot.misplaced_count == 0
    for name in ("requested_bytes", "allocated_bytes", "reserved_bytes"):
        assert getattr(snapshot.replay, name).tolist() == getattr(whole, name)[first:].tolist()
    before = int(whole.requested_bytes[first - 1]) if first else 0
    assert snapshot.start_requested_bytes == before
    assert snapshot.result().peak.total == max(before, *whole.requested_bytes[first:].tolist())


def test_what_was_there_before_is_told_and_never_left_out():
    requests, run = run_of(
        ("alloc", 0, 30 * MiB), ("alloc", 1, 4 * MiB), ("free", 1, 0), ("free", 0, 0)
    )
    snapshot = read_snapshot(snapshot_of(requests, run, 1))  # type: ignore[arg-type]
    result = snapshot.result()
    assert result.peak.total == 34 * MiB
    before, made = result.peak.live
    assert (before.size_bytes, before.phase, before.source) == (30 * MiB, Phase.PREEXISTING, None)
    assert (made.size_bytes, str(made.source)) == (4 * MiB, "model.py:2")
    assert result.notes[0].startswith("the history begins in the middle: 30.0 MiB were in place")
    assert result.retained.total == 0
    assert snapshot.simulate("expandable_segments:True").peak.requested == 34 * MiB
    assert not snapshot.fits("33MiB")


def test_a_simulation_with_nothing_given_is_the_replay_and_with_a_capacity_is_none():
    requests, run = run_of(("alloc", 0, 3 * MiB))
    snapshot = read_snapshot(snapshot_of(requests, run))  # type: ignore[arg-type]
    assert snapshot.simulate() is snapshot.replay
    assert snapshot.simulate(capacity="1GiB").limit_bytes == 1 << 30


def test_a_whole_history_says_nothing_of_a_start():
    requests, run = run_of(("alloc", 0, 3 * MiB))
    result = read_snapshot(snapshot_of(requests, run)).result()  # type: ignore[arg-type]
    assert (result.notes, result.retained.total) == ((), 3 * MiB)
    assert result.counters is not None
    assert not result.counters.estimated
    assert result.counters.reserved == 20 * MiB


def test_a_site_is_the_user_s_line_the_outermost_operator_and_the_phase():
    stack = [
        frame("c10::cuda::CUDACachingAllocator::malloc"),
        frame("at::_ops::empty_memory_format::call(c10::SymInt)"),
        frame("at::_ops::add_Tensor::redispatch(c10::DispatchKeySet)"),
        frame("at::_ops::add_Tensor::call(at::Tensor const&)"),
        frame("forward", "/opt/lib/python3.12/site-packages/torch/nn/modules/linear.py", 125),
        frame("step", "/home/me/train.py", 7),
        frame("torch::autograd::Engine::evaluate_function(std::shared_ptr<torch>)"),
        frame("main", "/home/me/train.py", 9),
    ]
    requests, run = run_of(("alloc", 0, 3 * MiB))
    data = snapshot_of(requests, run)  # type: ignore[arg-type]
    data["device_traces"][0][-1]["frames"] = stack
    (found,) = read_snapshot(data).result().peak.live
    assert (found.operator, str(found.source)) == ("aten::add", "train.py:7")
    assert found.phase is Phase.BACKWARD


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (["<string>"], "<string>:1"),
        (["/opt/lib/python3.12/site-packages/torch/nn/modules/linear.py", "<stdin>"], "<stdin>:2"),
        (["<string>", "/home/me/train.py"], "train.py:2"),
        (["<frozen runpy>"], "None"),
    ],
)
def test_code_that_is_in_no_file_has_lines_too(files, told):
    requests, run = run_of(("alloc", 0, 3 * MiB))
    data = snapshot_of(requests, run)  # type: ignore[arg-type]
    stack = [frame("main", file, line) for line, file in enumerate(files, 1)]
    data["device_traces"][0][-1]["frames"] = stack
    (found,) = read_snapshot(data).result().peak.live
    assert str(found.source) == told


def test_storages_of_one_site_are_counted():
    requests, run = run_of(("alloc", 0, 3 * MiB), ("alloc", 1, 5 * MiB))
    data = snapshot_of(requests, run)  # type: ignore[arg-type]
    for one in data["device_traces"][0]:
        one["frames"] = [frame("step", "/home/me/train.py", 7)]
    (found,) = read_snapshot(data).result().peak.live
    assert (found.count, found.size_bytes) == (2, 8 * MiB)


def test_blocks_have_their_whole_stacks_and_one_site_may_have_several():
    inside = frame("forward", "/opt/lib/python3.12/site-packages/torch/nn/modules/linear.py", 125)
    line, loop = frame("step", "/home/me/train.py", 7), frame("main", "/home/me/train.py", 9)
    operator = frame("at::_ops::mm::call(at::Tensor const&)")
    requests, run = run_of(("alloc", 0, 3 * MiB), ("alloc", 1, 5 * MiB), ("alloc", 2, 7 * MiB))
    data = snapshot_of(requests, run)  # type: ignore[arg-type]
    allocs = [entry for entry in data["device_traces"][0] if entry["action"] == "alloc"]
    stacks = ([operator, inside, line, loop], [operator, line, loop], [operator])
    for alloc, stack in zip(allocs, stacks, strict=True):
        alloc["frames"] = stack
    snapshot = read_snapshot(data)
    blocks = snapshot.picture().blocks
    told = [[source.function for source in blocks.stack(block)] for block in blocks.blocks]
    assert sorted(told) == [[operator["name"]], ["forward", "step", "main"], ["step", "main"]]
    # What torch calls differently on the way is still the user's one line.
    assert [c.size_bytes for c in snapshot.contributors_at(3)] == [8 * MiB, 7 * MiB]
    assert [len(site.stack) for site in snapshot.sites.values()] == [3, 2, 1]
    # Of equal stacks that the file has twice one is kept.
    for alloc in allocs[1:]:
        alloc["frames"] = [dict(frame) for frame in stacks[0]]
    assert len({id(site.stack) for site in read_snapshot(data).sites.values()}) == 1


def test_what_is_there_at_both_ends_keeps_the_stack_of_its_block():
    requests, run = run_of(("alloc", 0, 3 * MiB), ("alloc", 1, 3 * MiB), ("free", 1, 0))
    data = snapshot_of(requests, run, 1)  # type: ignore[arg-type]
    block = data["segments"][0]["blocks"][0]
    block["frames"] = [frame("at::_ops::mm::call()"), frame("build", "/home/me/net.py", 3)]
    before = next(c for c in read_snapshot(data).result().peak.live if c.phase is Phase.PREEXISTING)
    assert (before.operator, str(before.source)) == ("aten::mm", "net.py:3")


def test_segments_that_came_and_went_are_put_back_and_taken_away():
    requests, run = run_of(("alloc", 0, 30 * MiB))
    data = snapshot_of(requests, run)  # type: ignore[arg-type]
    gone = 1 << 50
    data["device_traces"] = [
        [
            entry("free_requested", gone, 40 * MiB),
            entry("free_completed", gone, 40 * MiB),
            entry("segment_free", gone, 40 * MiB),
            *data["device_traces"][0],
        ]
    ]
    snapshot = read_snapshot(data)
    assert snapshot.start_requested_bytes == 40 * MiB
    assert snapshot.replay.reserved_bytes.tolist()[-1] == 30 * MiB
    assert snapshot.result().peak.total == 40 * MiB


def test_pages_of_expandable_segments_are_taken_back():
    log = RequestLog()
    log.alloc(0, 30 * MiB)
    log.alloc(1, 30 * MiB)
    whole = simulate(log.requests(), settings_of("expandable_segments:True"))
    base = whole.segment_addresses[0]
    data = {
        "segments": segments_of(whole),
        "device_traces": [
            [
                entry("segment_map", base + 40 * MiB, 20 * MiB),
                entry("alloc", base + 30 * MiB, 30 * MiB, frames=[]),
            ]
        ],
        "allocator_settings": {"expandable_segments": True},
    }
    snapshot = read_snapshot(data)
    (segment,) = snapshot.start
    assert (segment.size_bytes, segment.is_expandable) == (40 * MiB, True)
    assert [block.requested_bytes for block in segment.blocks] == [30 * MiB, 0]
    assert snapshot.misplaced_count == 0
    assert snapshot.replay.reserved_bytes.tolist() == [60 * MiB]


def test_a_range_of_addresses_may_lie_anywhere_and_a_block_within_it_may_not():
    log = RequestLog()
    for key, size in enumerate((30 * MiB, KiB, 4 * MiB, 3 * KiB)):
        log.alloc(key, size)
    whole = simulate(log.requests(), settings_of("expandable_segments:True"))
    large, small = whole.segment_addresses
    elsewhere = {large: 3 << 32, small: 7 << 32}

    def moved(address: int) -> int:
        base = max(base for base in elsewhere if base <= address)
        return address - base + elsewhere[base]

    segments = segments_of(whole)
    for segment in segments:
        for placed in (segment, *segment["blocks"]):
            placed["address"] = moved(placed["address"])
    entries = [
        entry("alloc", moved(address), size, frames=[])
        for address, size in zip(
            whole.address.tolist(), log.requests().size_bytes.tolist(), strict=True
        )
    ]
    pages = [entry("segment_map", elsewhere[large], 40 * MiB)]
    pages.append(entry("segment_map", elsewhere[small], 2 * MiB))
    data = {
        "segments": segments,
        "device_traces": [[*pages, *entries]],
        "allocator_settings": {"expandable_segments": True},
    }
    snapshot = read_snapshot(data)
    assert not snapshot.begins_in_the_middle
    assert snapshot.misplaced_count == 0
    assert not any("elsewhere" in note for note in snapshot.result().notes)
    displaced = whole.address.copy()
    displaced[3] += 512
    assert whole.misplaced_rows(displaced).tolist() == [3]
    displaced[3] = 0
    assert whole.misplaced_rows(displaced).tolist() == [3]


def settings_of(text):
    from pytest_torchmem.allocator import AllocatorSettings

    return AllocatorSettings.parse(text)


def test_a_history_with_a_gap_within_is_shown_alone_and_nothing_is_simulated():
    requests, run = run_of(("alloc", 0, 3 * MiB), ("alloc", 1, 3 * MiB), ("free", 0, 0))
    data = snapshot_of(requests, run)  # type: ignore[arg-type]
    del data["device_traces"][0][-2:]
    snapshot = read_snapshot(data)
    assert snapshot.result().peak.total == 6 * MiB
    told = "the history does not fit the segments: alloc of"
    assert snapshot.result().notes[0].startswith(told)
    with pytest.raises(RequestError, match=told):
        snapshot.fits("1GiB")


def test_what_the_device_refused_was_asked_for():
    requests, run = run_of(("alloc", 0, 30 * MiB), ("alloc", 1, 4 * MiB))
    data = snapshot_of(requests, run)  # type: ignore[arg-type]
    data["device_traces"][0].insert(2, {"action": "oom", "device_free": 9, "size": 70 * MiB})
    snapshot = read_snapshot(data)
    assert snapshot.misplaced_count == 0
    told = "the device ran out of memory: it refused 70.0 MiB at entry 2 of the history"
    assert snapshot.result().notes == (told,)
    assert snapshot.fits("124MiB")
    assert "an allocation of 70.0 MiB needs 70.0 MiB where" in str(snapshot.fits("99MiB"))


def test_without_a_history_it_is_what_was_alive():
    requests, run = run_of(("alloc", 0, 30 * MiB), ("alloc", 1, 4 * MiB), ("free", 1, 0))
    data = snapshot_of(requests, run)  # type: ignore[arg-type]
    data["segments"][0]["blocks"][0]["frames"] = [frame("f", "/home/me/model.py", 7)]
    for found in (
        {**data, "device_traces": [[]]},
        {"segments": data["segments"]},
        data["segments"],
    ):
        snapshot = read_snapshot(found)
        result = snapshot.result()
        (live,) = result.peak.live
        assert (live.size_bytes, str(live.source)) == (30 * MiB, "model.py:7")
        assert result.notes[0].startswith("the snapshot has no history")
        assert snapshot.fits("60MiB")
        assert not snapshot.fits("29MiB")


def test_all_devices_are_read_the_fullest_first_and_before_them_what_ran_out_of_memory():
    requests, run = run_of(("alloc", 0, 3 * MiB))
    larger, its_run = run_of(("alloc", 0, 5 * MiB))
    data, other = snapshot_of(requests, run), snapshot_of(larger, its_run)  # type: ignore[arg-type]
    other["segments"][0]["device"] = 2
    data["segments"] += other["segments"]
    data["device_traces"] += [[], *other["device_traces"]]
    assert [one.name for one in read_snapshots(data)] == ["cuda:2", "cuda:0"]
    data["device_traces"][0].append({"action": "oom", "device_free": 9, "size": 70 * MiB})
    assert [one.name for one in read_snapshots(data)] == ["cuda:0", "cuda:2"]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ([], "it has no segments"),
        ({"device_traces": [[]]}, "it has no segments"),
        ({"device_traces": [[]], "segments": []}, "has no history and no memory"),
        ([{"device": 1 << 40, "total_size": 1}], "it has memory of device 1099511627776"),
        ({"device_traces": [[{"action": "alloc"}]], "segments": []}, "is missing"),
        ({"device_traces": [[{"addr": 1}]], "segments": [{}]}, "is missing"),
    ],
)
def test_other_data_are_no_snapshot(data, told):
    with pytest.raises(SnapshotError, match=told):
        read_snapshot(data)


def test_a_device_that_is_not_there_is_named():
    requests, run = run_of(("alloc", 0, 3 * MiB))
    data = snapshot_of(requests, run)  # type: ignore[arg-type]
    for device in (1, "cuda:1"):
        with pytest.raises(DeviceError, match="no memory on 'cuda:1'; it has: cuda:0"):
            read_snapshot(data, device)
    assert read_snapshot(data, "CUDA").device == read_snapshot(data, 0).device == 0


def test_the_busiest_device_is_taken():
    requests, run = run_of(("alloc", 0, 3 * MiB))
    data = snapshot_of(requests, run)  # type: ignore[arg-type]
    data["device_traces"].insert(0, [])
    data["segments"][0]["device"] = 1
    snapshot = read_snapshot(data)
    assert (snapshot.name, snapshot.timeline.total.tolist()) == ("cuda:1", [0, 3 * MiB])


def test_a_picture_names_who_held_what():
    requests, run = run_of(("alloc", 0, 3 * MiB), ("alloc", 1, 5 * MiB), ("free", 0, 0))
    picture = read_snapshot(snapshot_of(requests, run)).picture()  # type: ignore[arg-type]
    assert [track.contributor.size_bytes for track in picture.tracks] == [5 * MiB, 3 * MiB]
    assert np.array(picture.tracks[1].levels).max() == 3 * MiB


def test_a_free_of_what_is_in_use_at_the_end_is_said_to_contradict_the_segments():
    requests, run = run_of(("alloc", 0, 3 * MiB))
    data = snapshot_of(requests, run)  # type: ignore[arg-type]
    alloc = data["device_traces"][0][-1]
    data["device_traces"][0].append(entry("free_completed", alloc["addr"], alloc["size"]))
    contradiction = read_snapshot(data).contradiction
    assert "does not fit the segments: free_completed of" in contradiction
