"""Several writers of one file: everything arrives, and a dead one holds nobody up for good."""

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_baseline_file import CPU, entry

from pytest_torchmem.store.baseline_file import StoredEntries, read_file
from pytest_torchmem.store.baselines import FileChanges, tell_git, write_file
from pytest_torchmem.store.files import LOCK, locked
from pytest_torchmem.values.errors import BaselineError


def files(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != LOCK)


WRITER = """
import sys
from pathlib import Path
sys.path[:0] = {paths!r}
from test_baseline_file import CPU, entry
from pytest_torchmem.store.baselines import FileChanges, write_file

for number in range(25):
    key = f"test_{{sys.argv[1]}}_{{number}}"
    write_file(Path({path!r}), CPU, FileChanges({{key: entry(number + 1)}}))
"""


@pytest.mark.slow
def test_four_processes_at_once_lose_nothing(tmp_path):
    path = tmp_path / "__torchmem__" / "a.json"
    script = tmp_path / "writer.py"
    script.write_text(WRITER.format(path=str(path), paths=[p for p in sys.path if "tests" in p]))
    writers = [subprocess.Popen([sys.executable, script, str(n)]) for n in range(4)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0, 0]
    stored = read_file(path, CPU)
    assert sorted(stored.lines) == sorted(f"test_{w}_{n}" for w in range(4) for n in range(25))
    assert all(stored.entry(f"test_3_{n}", path) == entry(n + 1) for n in range(25))
    assert files(path.parent) == ["a.json", "a.origins"]


def test_without_the_lock_an_entry_can_be_lost(tmp_path):
    """The guard of the test above: this is what the lock is there for."""
    from pytest_torchmem.store.baselines import changed_text

    path = tmp_path / "a.json"
    _, mine = changed_text(path, CPU, FileChanges({"test_mine": entry(1)}))
    write_file(path, CPU, FileChanges({"test_theirs": entry(2)}))
    path.write_text(mine)
    assert sorted(read_file(path, CPU).lines) == ["test_mine"]


@contextmanager
def holding(folder, seconds):
    """Yield another process once it holds the lock of a folder, which it does so long.

    It leaves the file ``released`` there before it lets go.
    """
    code = (
        "import time; from pathlib import Path\n"
        "from pytest_torchmem.store.files import locked\n"
        f"folder = Path({str(folder)!r})\n"
        "with locked(folder):\n"
        f"    print('held', flush=True); time.sleep({seconds}); (folder / 'released').touch()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        yield other


def test_a_second_writer_waits_for_the_first(tmp_path):
    with holding(tmp_path, 0.5), locked(tmp_path):
        assert (tmp_path / "released").exists()


def test_a_writer_that_was_killed_holds_nobody_up(tmp_path):
    with holding(tmp_path, 600) as other:
        other.kill()
    with locked(tmp_path):
        assert not (tmp_path / "released").exists()


def test_a_writer_that_hangs_is_not_waited_for_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr("pytest_torchmem.store.files.PATIENCE_S", 0.05)
    with locked(tmp_path), pytest.raises(BaselineError, match=r"cannot be written \(.*lock"):
        write_file(tmp_path / "a.json", CPU, FileChanges({"test_a": entry(1)}))


def test_what_killed_updates_left_is_removed_by_the_next_one(tmp_path):
    for name in (".a.json.123-0123abcd", ".b.origins.4-00000000"):
        (tmp_path / name).write_text("half")
    kept = ("a.json.orig", ".b.json", ".gitignore", ".a.json.swp")
    for name in kept:
        (tmp_path / name).write_text("of somebody else")
    write_file(tmp_path / "a.json", CPU, FileChanges({"test_a": entry(1)}))
    assert files(tmp_path) == sorted(["a.json", "a.origins", *kept])


def test_git_is_told_to_leave_out_what_is_not_to_be_committed(tmp_path):
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    path = tmp_path / "__torchmem__" / "cpu-torch2.13" / "a.json"
    write_file(path, CPU, FileChanges({"test_a": entry(1)}))
    path.with_name(".a.json.123-0123abcd").write_text("half")
    tell_git(tmp_path / "__torchmem__")
    subprocess.run(["git", "add", "-A"], cwd=tmp_path, check=True)
    told = subprocess.run(
        ["git", "ls-files"], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert [Path(name).name for name in told.stdout.split()] == [
        ".gitattributes",
        ".gitignore",
        "a.json",
        "a.origins",
    ]


def test_a_baseline_that_is_a_link_stays_one(tmp_path):
    target = tmp_path / "elsewhere.json"
    path = tmp_path / "stored" / "a.json"
    path.parent.mkdir()
    path.symlink_to(target)
    write_file(path, CPU, FileChanges({"test_a": entry(1)}))
    write_file(path, CPU, FileChanges({"test_b": entry(2)}))
    assert path.is_symlink()
    assert sorted(read_file(target, CPU).lines) == ["test_a", "test_b"]


def test_a_failure_while_writing_gives_the_lock_back(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("{")
    with pytest.raises(BaselineError):
        write_file(path, CPU, FileChanges({"test_a": entry(1)}))
    assert files(tmp_path) == ["a.json"]
    with locked(tmp_path):
        pass


def test_an_update_of_one_entry_reads_no_other(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_file(path, CPU, FileChanges({f"test_{n}": entry(n + 1) for n in range(50)}))
    before = {p.name: p.read_text().splitlines() for p in (path, path.with_suffix(".origins"))}
    read = []
    numbers = StoredEntries.numbers

    def counted(self, key, path):
        read.append(key)
        return numbers(self, key, path)

    monkeypatch.setattr(StoredEntries, "numbers", counted)
    write_file(path, CPU, FileChanges({"test_7": entry(999)}))
    assert read == []
    for name, lines in before.items():
        after = (tmp_path / name).read_text().splitlines()
        changed = [new for old, new in zip(lines, after, strict=True) if old != new]
        assert changed
        assert all(line.startswith('["test_7"') for line in changed)
