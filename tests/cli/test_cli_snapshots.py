"""The command on snapshots that torch's allocator wrote."""

from __future__ import annotations

import pickle

import pytest

from pytest_torchmem.analysis.caching_allocator import RequestLog, simulate
from pytest_torchmem.values.units import MiB
from tests.analysis.snapshots import snapshot_of


@pytest.fixture
def write(tmp_path):
    def write(name, *sizes):
        log = RequestLog()
        for key, size in enumerate(sizes):
            log.alloc(key, size)
        data = snapshot_of(log.requests(), simulate(log.requests()), 1)
        path = tmp_path / name
        path.write_bytes(pickle.dumps(data))
        return path

    return write


def test_fits_and_reserved_answer_for_a_snapshot(command, write):
    path = write("step.pickle", 30 * MiB, 4 * MiB)
    code, out, _ = command("fits", path, "--capacity", "40MiB")
    assert (code, out.partition("(")[0]) == (1, "does not fit in 40.0 MiB ")
    code, out, _ = command("reserved", path)
    assert (code, out.split()[:3]) == (0, ["50.0", "MiB", "reserved"])
    assert command("fits", path, "--capacity", "1GiB", "--device", "cuda:0")[0] == 0


@pytest.mark.parametrize(
    ("device", "told"),
    [("cpu", "no memory on 'cpu'"), ("cuda:3", "no memory on 'cuda:3'; it has: cuda:0")],
)
def test_another_device_is_refused(command, write, device, told):
    path = write("step.pickle", 30 * MiB, 4 * MiB)
    code, _, err = command("reserved", path, "--device", device)
    assert code == 2
    assert told in err


def test_two_snapshots_are_compared_by_line(command, write):
    before, after = write("a.pickle", MiB, 4 * MiB), write("b.pickle", MiB, 16 * MiB)
    code, out, _ = command("diff", before, after)
    assert code == 1
    assert "snapshot  5.0 MiB -> 17.0 MiB, +12.0 MiB" in out
    assert "unknown at model.py:2" in out


def test_a_snapshot_is_shown_and_reported(command, write, tmp_path):
    path = write("step.pickle", 30 * MiB, 4 * MiB)
    code, out, _ = command("show", path, "snapshot")
    assert code == 0
    assert "the history begins in the middle" in out
    code, out, _ = command("report", path, "-o", tmp_path / "page.html")
    assert code == 0
    assert "step.pickle" in (tmp_path / "page.html").read_text(encoding="utf-8")
