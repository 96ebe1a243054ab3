"""`load` tells our files apart by their content, and says what those of other programs are."""

from __future__ import annotations

import gzip
import json
import pickle

import pytest
import torch

from pytest_torchmem import MiB, Profile, analyze, load, measure, save
from pytest_torchmem.allocator import RequestLog, Snapshot, simulate
from pytest_torchmem.cli.main import Exit, main
from pytest_torchmem.values.errors import DeviceError, MarkerError, ReportError, TraceError
from tests.analysis.snapshots import snapshot_of

pytestmark = pytest.mark.slow


@pytest.fixture
def block():
    with measure("step", device="cpu") as measured:
        torch.ones(MiB // 4)
    return measured


def test_each_kind_of_ours_is_known_by_its_content(block, tmp_path):
    block.save_trace(tmp_path / "a")
    block.save(tmp_path / "b")
    profile, results = load(tmp_path / "a"), load(tmp_path / "b")
    assert isinstance(profile, Profile)
    assert profile.peak == load(tmp_path / "a", "cpu").peak
    assert profile.peak.total == results["step"].peak.total == MiB
    assert any(event.name == "aten::ones" for event in profile.events.depth_first())
    with pytest.raises(DeviceError, match="no memory on 'cuda:1'; it has: cpu"):
        load(tmp_path / "a", "cuda:1")
    with pytest.raises(ReportError, match="has results, each of its own device"):
        load(tmp_path / "b", "cpu")


def test_a_snapshot_of_torch_is_read(tmp_path):
    log = RequestLog()
    log.alloc(0, 3 * MiB)
    snapshot = snapshot_of(log.requests(), simulate(log.requests()))
    (tmp_path / "x").write_bytes(pickle.dumps(snapshot))
    assert isinstance(load(tmp_path / "x"), Snapshot)


def test_a_profile_is_saved_with_all_that_it_knows(tmp_path):
    shapes = {"record_shapes": True, "profile_memory": True, "with_stack": True}
    with torch.profiler.profile(**shapes) as finished:  # type: ignore[arg-type]
        torch.ones(8, 32) @ torch.ones(32, 8)
    profile = analyze(finished)
    again = load(save(tmp_path / "x.trace", profile))
    assert again.events.averages(by_inputs=True) == profile.events.averages(by_inputs=True)
    with pytest.raises(MarkerError, match="save writes results and profiles, got 7"):
        save(tmp_path / "y", [7])  # type: ignore[list-item]


def test_what_is_no_profile_is_named():
    with pytest.raises(TraceError, match=r"a str is no profile; .* read files with pytest_torch"):
        analyze("run.json")
    with pytest.raises(TraceError, match="a list is no profile"):
        analyze([])


def chrome(path):
    with torch.profiler.profile() as finished:
        torch.ones(3)
    finished.export_chrome_trace(str(path))


def packed_chrome(path):
    events = {"schemaVersion": 1, "deviceProperties": [], "traceEvents": []}
    path.write_bytes(gzip.compress(json.dumps(events).encode()))


FOREIGN = {
    "a Chrome trace": chrome,
    "a Chrome trace, which has no sizes": packed_chrome,
    "a recording of memray": lambda path: path.write_bytes(b"memray\0\x0b\0\0\0" + bytes(99)),
    "packed with lz4": lambda path: path.write_bytes(b"\x04\x22\x4d\x18" + bytes(99)),
    "a file of torch.save": lambda path: torch.save({"weight": torch.ones(3)}, path),
    "a database": lambda path: path.write_bytes(b"SQLite format 3\0" + bytes(99)),
    "a page": lambda path: path.write_text("<!doctype html><p>x</p>"),
    "a baseline: `torchmem show`": lambda path: path.write_text('{"entries": {}}'),
    "a file of pytest-benchmark": lambda path: path.write_text(
        '{"machine_info": {}, "benchmarks": []}'
    ),
    "a snapshot of torch's allocator as JSON": lambda path: path.write_text(
        '[{"device": 0, "total_size": 2097152, "blocks": []}]'
    ),
    "a pickle that is packed": lambda path: path.write_bytes(gzip.compress(pickle.dumps({}))),
    "a memory timeline": lambda path: path.write_text("[[1, 2], [[0, 3], [0, 4]]]"),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_file_of_another_program_is_named(what, tmp_path, capsys):
    FOREIGN[what](tmp_path / "x")
    with pytest.raises(ReportError, match=f"is no file of torchmem's, but {what}"):
        load(tmp_path / "x")
    if "torch.save" not in what and "baseline" not in what:
        assert main(["show", str(tmp_path / "x")]) == Exit.BAD_INPUT
        (line,) = capsys.readouterr().err.splitlines()
        assert what in line


def test_a_folder_and_a_file_that_is_not_there_are_named(tmp_path):
    with pytest.raises(ReportError, match=r"is a folder; Ranks\.load reads"):
        load(tmp_path)
    with pytest.raises(ReportError, match="cannot be read: No such file"):
        load(tmp_path / "x")
