"""The simulated allocator against the real one: committed recordings, and fresh ones on CUDA."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pytest_torchmem.allocator import RequestLog, simulate
from tests.cuda.allocator_recordings import COUNTERS, FOLDER, Recording, differences

RECORDER = Path(__file__).with_name("record_allocator.py")
FILES = sorted(FOLDER.glob("*/*.json.gz"))
# Of equal free blocks the one with the lowest address is taken (up to torch 2.11), or that of the
# oldest segment (from 2.13), so a recording is explained by one of the two.
ORDERS = {"lowest address": True, "oldest segment": False}


def explanations(recording):
    """Which order of equal blocks reproduces the recording, and what is wrong with the others."""
    wrong = {
        order: differences(recording, recording.replay(by_address=by_address))
        for order, by_address in ORDERS.items()
    }
    return [order for order, found in wrong.items() if not found], wrong


def require_exact(recording):
    exact, wrong = explanations(recording)
    assert exact, f"{recording.scenario} on torch {recording.torch}: {wrong}"


@pytest.mark.skipif(not FILES, reason=f"no recording is committed under {FOLDER.name}")
@pytest.mark.parametrize(
    "path", FILES, ids=lambda path: f"{path.parent.name}-{path.name.partition('.')[0]}"
)
def test_a_committed_recording_is_replayed_to_the_byte(path):
    require_exact(Recording.load(path))


@pytest.mark.skipif(not FILES, reason=f"no recording is committed under {FOLDER.name}")
def test_one_order_of_equal_blocks_explains_all_recordings_of_a_release():
    possible: dict[str, set[str]] = {}
    for recording in map(Recording.load, FILES):
        exact = set(explanations(recording)[0])
        possible[recording.torch] = possible.get(recording.torch, set(ORDERS)) & exact
    assert all(possible.values()), possible


SCENARIOS = [
    "stress",
    "two_streams",
    "roundup",
    "roundup_list",
    "max_split",
    "large_segment",
    "expandable",
    "expandable_two_streams",
    "garbage",
    "full",
    "full_max_split",
    "full_expandable",
    "full_two_streams",
    "private_pool",
    "training",
    "training_expandable",
]


@pytest.mark.nightly
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_fresh_recording_is_replayed_to_the_byte(scenario, tmp_path, cuda):
    command = [sys.executable, str(RECORDER), "--out", str(tmp_path), scenario]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    paths = list(tmp_path.glob(f"*/{scenario}.json.gz"))
    if "Unrecognized" in done.stderr:
        pytest.skip("this torch has no such setting")
    assert len(paths) == 1, done.stdout + done.stderr
    require_exact(Recording.load(paths[0]))


def test_the_recorder_has_the_scenarios_that_are_tested():
    pytest.importorskip("torch")
    from tests.cuda.record_allocator import SCENARIOS as RECORDED

    assert sorted(RECORDED) == sorted(SCENARIOS)


@pytest.mark.parametrize(
    "scenario", [name for name in SCENARIOS if not name.startswith("training")]
)
def test_the_recorder_writes_down_what_an_allocator_did(scenario, monkeypatch):
    pytest.importorskip("torch")
    from tests.cuda import record_allocator
    from tests.cuda.fake_cuda import fake_torch

    fake = fake_torch(record_allocator.SCENARIOS[scenario].conf)
    monkeypatch.setattr(record_allocator, "torch", fake)
    recording = record_allocator.record(scenario)
    assert len(recording.address) > 200
    assert differences(recording, recording.replay(by_address=False)) == []
    assert differences(recording, recording.replay(by_address=True)) == []


# --- the comparison itself, without a GPU ------------------------------------------------------


def simulated_recording(conf=""):
    """A recording as the real allocator would make it if it were the simulated one."""
    chance, log, live = random.Random(1), RequestLog(), []
    for key in range(200):
        if live and chance.random() < 0.4:
            log.free(live.pop(chance.randrange(len(live))))
        else:
            log.alloc(key, chance.randrange(1, 30 << 20))
            live.append(key)
    requests = log.requests()
    blank = Recording(
        scenario="simulated",
        torch="2.13",
        device="none",
        conf=conf,
        fraction=1.0,
        capacity_bytes=1 << 34,
        completions_given=False,
        requests={
            name: getattr(requests, name).tolist()
            for name in ("kind", "key", "size_bytes", "stream", "pool")
        },
        address=[],
        segment_addresses=[],
        samples={},
        counts={},
    )
    run = simulate(requests, blank.settings(), blank.capacity_bytes)
    # The real addresses are others, and lie in another order.
    moved = {base: (7 << 50) - 3 * base for base in run.segment_addresses}
    bases = sorted(moved)
    address = [max(b for b in bases if b <= a) if a else 0 for a in run.address.tolist()]
    return replace(
        blank,
        address=[
            a - base + moved[base] if a else 0
            for a, base in zip(run.address.tolist(), address, strict=True)
        ],
        segment_addresses=[moved[base] for base in run.segment_addresses],
        samples={
            "row": list(range(len(run.address))),
            **{name: getattr(run, column).tolist() for name, (_, column) in COUNTERS.items()},
        },
        counts={"device_allocs": run.device_alloc_count, "retries": 0, "ooms": 0},
    )


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_the_comparison_finds_nothing_where_nothing_differs(conf):
    recording = simulated_recording(conf)
    assert "oldest segment" in explanations(recording)[0]


@pytest.mark.parametrize("name", COUNTERS)
def test_the_comparison_finds_one_wrong_counter(name):
    recording = simulated_recording()
    recording.samples[name][100] += 512
    (found,) = differences(recording, recording.replay(by_address=False))
    assert found.startswith(f"{name} differs after 1 of ")
    with pytest.raises(AssertionError):
        require_exact(recording)


@pytest.mark.parametrize("name", ["device_allocs", "retries", "ooms"])
def test_the_comparison_finds_a_wrong_count(name):
    recording = simulated_recording()
    recording.counts[name] += 1
    (found,) = differences(recording, recording.replay(by_address=False))
    assert found.startswith(f"{name}: measured")


def test_the_comparison_finds_a_block_that_lies_elsewhere():
    recording = simulated_recording()
    row = max(row for row, address in enumerate(recording.address) if address)
    recording.address[row] += 512
    (found,) = differences(recording, recording.replay(by_address=False))
    assert "lie elsewhere" in found


def test_the_comparison_finds_a_replay_under_other_settings():
    recording = replace(simulated_recording(), conf="large_segment_size_mb:64")
    assert not explanations(recording)[0]


def test_a_recording_survives_its_file(tmp_path):
    recording = simulated_recording()
    recording.save(tmp_path / "r.json.gz")
    assert Recording.load(tmp_path / "r.json.gz") == recording


def test_a_recording_of_another_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.cuda.allocator_recordings.FORMAT", 99)
    simulated_recording().save(tmp_path / "r.json.gz")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="does not read"):
        Recording.load(tmp_path / "r.json.gz")
