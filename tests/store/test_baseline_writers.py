"""Several writers of one file: everything arrives, and a dead one holds nobody up for good."""

import subprocess
import sys
import time

import pytest
from test_baseline_files import CPU, entry

from pytest_torchmem.store.baseline_file import FileChanges, read_file, write_file
from pytest_torchmem.store.files import locked
from pytest_torchmem.values.errors import BaselineError

WRITER = """
import sys
from pathlib import Path
sys.path[:0] = {paths!r}
from test_baseline_files import CPU, entry
from pytest_torchmem.store.baseline_file import FileChanges, write_file

for number in range(25):
    key = f"test_{{sys.argv[1]}}_{{number}}"
    write_file(Path({path!r}), CPU, FileChanges({{key: entry(number + 1)}}))
"""


def test_four_processes_at_once_lose_nothing(tmp_path):
    path = tmp_path / "__torchmem__" / "a.json"
    script = tmp_path / "writer.py"
    script.write_text(WRITER.format(path=str(path), paths=[p for p in sys.path if "tests" in p]))
    writers = [subprocess.Popen([sys.executable, script, str(n)]) for n in range(4)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0, 0]
    stored = read_file(path, CPU)
    assert sorted(stored.lines) == sorted(f"test_{w}_{n}" for w in range(4) for n in range(25))
    assert all(stored.entry(f"test_3_{n}", path) == entry(n + 1) for n in range(25))
    assert [file.name for file in path.parent.iterdir()] == ["a.json"]


def test_without_the_lock_an_entry_can_be_lost(tmp_path):
    """The guard of the test above: this is what the lock is there for."""
    from pytest_torchmem.store.baseline_file import changed_text

    path = tmp_path / "a.json"
    _, mine = changed_text(path, CPU, FileChanges({"test_mine": entry(1)}))
    write_file(path, CPU, FileChanges({"test_theirs": entry(2)}))
    path.write_text(mine)
    assert sorted(read_file(path, CPU).lines) == ["test_mine"]


def test_a_second_writer_waits_for_the_first(tmp_path):
    path = tmp_path / "a.json"
    code = (
        "import sys, time; from pathlib import Path\n"
        "from pytest_torchmem.store.files import locked\n"
        f"with locked(Path({str(path)!r})):\n"
        "    print('held', flush=True); time.sleep(0.5)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        start = time.monotonic()
        with locked(path):
            assert time.monotonic() - start > 0.3


def test_a_lock_that_a_dead_process_left_is_taken_away(tmp_path):
    path = tmp_path / "a.json"
    lock = path.with_name(".a.json.lock")
    lock.write_text("123 of a process that was killed")
    with locked(path, patience_s=0.1):
        assert "killed" not in lock.read_text()
    assert list(tmp_path.iterdir()) == []


def test_whoever_was_taken_for_dead_does_not_remove_the_lock_of_another(tmp_path):
    path = tmp_path / "a.json"
    lock = path.with_name(".a.json.lock")
    with locked(path):
        lock.write_text("somebody else")
    assert lock.read_text() == "somebody else"


def test_a_failure_while_writing_gives_the_lock_back(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("{")
    with pytest.raises(BaselineError):
        write_file(path, CPU, FileChanges({"test_a": entry(1)}))
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]
