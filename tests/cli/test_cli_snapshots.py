"""The command on snapshots that torch's allocator wrote."""

from __future__ import annotations

import pickle

import pytest

from pytest_torchmem.allocator import RequestLog, simulate
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


@pytest.fixture
def two_devices(write):
    """Return a snapshot whose second device is fuller, and was refused 70 MiB."""
    path, fuller = write("step.pickle", MiB, 4 * MiB), write("fuller.pickle", MiB, 30 * MiB)
    data, second = (pickle.loads(each.read_bytes()) for each in (path, fuller))
    for segment in second["segments"]:
        segment["device"] = 1
    refused = {"action": "oom", "device_free": 9, "size": 70 * MiB, "stream": 0, "time_us": 0}
    data["segments"] += second["segments"]
    data["device_traces"].append([*second["device_traces"][0], refused])
    path.write_bytes(pickle.dumps(data))
    return path


def test_the_device_that_does_not_fit_comes_first(command, two_devices):
    code, out, _ = command("fits", two_devices, "--capacity", "80MiB")
    first, second = out.splitlines()
    assert code == 1
    assert first.startswith(
        "cuda:1: does not fit in 80.0 MiB (estimated): an allocation of 70.0 MiB"
    )
    assert second.startswith("cuda:0: fits in 80.0 MiB")
    code, out, _ = command("fits", two_devices, "--capacity", "80MiB", "--device", "cuda:0")
    assert (code, out.partition(" in ")[0]) == (0, "fits")


def test_each_device_is_shown_and_reported_unless_one_is_named(command, two_devices, tmp_path):
    _, out, _ = command("show", two_devices)
    rows = out.splitlines()
    assert rows[0].startswith("31.0 MiB  snapshot on cuda:1")
    assert rows[1].lstrip().startswith("5.0 MiB  snapshot on cuda:0")
    assert "the device ran out of memory: it refused 70.0 MiB" in out
    _, out, _ = command("show", two_devices, "--device", "cuda:0")
    assert "31.0 MiB" not in out
    _, out, _ = command("reserved", two_devices)
    assert out.split()[0] == "cuda:1:"
    command("report", two_devices, "-o", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "cuda:0" in page
    assert "cuda:1" in page


def test_an_older_history_is_refused_by_its_device_and_what_is_held_is_shown(command, two_devices):
    data = pickle.loads(two_devices.read_bytes())
    del data["device_traces"][1][2:]  # its end; what was there before it is in no block, either
    data["segments"] = [s for s in data["segments"] if s["total_size"] != 32 * MiB]
    data["device_traces"][1].append({"action": "free_completed", "addr": 5, "size": 512})
    two_devices.write_bytes(pickle.dumps(data))
    for words in (("fits", two_devices, "--capacity", "80MiB"), ("reserved", two_devices)):
        code, out, err = command(*words)
        assert (code, out) == (2, "")
        assert f"{two_devices}: cuda:1: the history does not fit the segments" in err
        assert command(*words, "--device", "cuda:0")[0] == 0
    _, out, _ = command("show", two_devices)
    rows = out.splitlines()
    assert rows[0].split()[:5] == ["31.0", "MiB", "snapshot", "on", "cuda:1"]
    notes = [row for row in rows if row.startswith("note: cuda:1: the history does not fit")]
    assert notes[0].endswith("this is what was alive when the snapshot was written")


def test_a_note_of_one_device_names_it(command, two_devices):
    _, out, _ = command("show", two_devices)
    assert "note: cuda:1: the device ran out of memory: it refused 70.0 MiB" in out
    assert "note: the history begins in the middle: 1.0 MiB" in out  # on both
