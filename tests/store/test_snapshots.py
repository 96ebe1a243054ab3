"""Files of ``torch.cuda.memory._dump_snapshot``: read without running what they say."""

from __future__ import annotations

import os
import pickle

import pytest

from pytest_torchmem.allocator import RequestLog, simulate
from pytest_torchmem.store.snapshots import load_snapshot
from pytest_torchmem.values.errors import SnapshotError
from pytest_torchmem.values.units import MiB
from tests.analysis.snapshots import snapshot_of


@pytest.fixture
def data():
    log = RequestLog()
    log.alloc(0, 30 * MiB)
    log.alloc(1, 4 * MiB)
    log.free(1)
    return snapshot_of(log.requests(), simulate(log.requests()), 1)


def test_a_file_is_read_as_it_was_written(data, tmp_path):
    path = tmp_path / "step.pickle"
    path.write_bytes(pickle.dumps(data))
    snapshot = load_snapshot(path)
    assert snapshot.result().peak.total == 34 * MiB
    assert load_snapshot(str(path), 0).start == snapshot.start


class Evil:
    def __reduce__(self):
        return os.mkdir, ("was-run",)


def test_a_file_that_names_a_function_runs_nothing(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "evil.pickle"
    path.write_bytes(pickle.dumps({**data, "segments": Evil()}))
    with pytest.raises(SnapshotError, match=r"evil\.pickle is no snapshot.*it names .*mkdir"):
        load_snapshot(path)
    assert not (tmp_path / "was-run").exists()
    pickle.loads(path.read_bytes())
    assert (tmp_path / "was-run").exists(), "the file above could not have done harm"


@pytest.mark.parametrize("content", [b"", b"\x80", b"\x80\x04K\x01.", b"PK", b"\x80\x04}."])
def test_another_file_is_refused_by_its_name(content, tmp_path):
    path = tmp_path / "odd.pickle"
    path.write_bytes(content)
    with pytest.raises(SnapshotError, match=r"odd\.pickle.*no snapshot.*\[bad-snapshot\]"):
        load_snapshot(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(SnapshotError, match="cannot be read: No such file"):
        load_snapshot(tmp_path / "none.pickle")
