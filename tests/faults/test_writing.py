"""Disks that are full, links, and what a killed update left: the old file stays whole."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_torchmem.store.baseline_file import read_file
from pytest_torchmem.store.baselines import FileChanges, write_file
from pytest_torchmem.store.files import LOCK
from pytest_torchmem.values.baseline import BaselineEntry
from pytest_torchmem.values.errors import BaselineError
from pytest_torchmem.values.units import MiB
from tests.cli.files import CPU
from tests.project import Project
from tests.results import contributor, result

pytestmark = pytest.mark.slow


def entry(size: int) -> BaselineEntry:
    return BaselineEntry.of(result(contributor(size)))


class FullDisk:
    """Lets some operations on files through; from then on there is no space left."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.left = -1
        self.count = 0
        self.folder = folder
        self._wrap(patch, Path, "write_bytes")
        self._wrap(patch, Path, "replace")
        self._wrap(patch, Path, "mkdir")
        self._wrap(patch, Path, "unlink")

    def _wrap(self, patch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        real = getattr(owner, name)

        def wrapped(path: Path, *arguments: object, **named: object) -> object:
            if self.folder not in path.parents:
                return real(path, *arguments, **named)
            self.count += 1
            if self.left == 0 and name != "unlink":
                if name == "write_bytes":
                    real(path, b"ha")  # a full disk holds the beginning
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.left -= self.left > 0
            return real(path, *arguments, **named)

        patch.setattr(owner, name, wrapped)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FullDisk]:
    with monkeypatch.context() as patch:
        yield FullDisk(patch, tmp_path)


def litter(folder: Path) -> list[str]:
    known = {LOCK, ".gitignore", ".gitattributes"}
    names = {path.name for path in folder.rglob("*") if path.is_file()} - known
    return sorted(name for name in names if not name.endswith((".json", ".origins")))


def test_wherever_the_disk_is_full_the_old_baseline_stays(full: FullDisk, tmp_path: Path) -> None:
    path = tmp_path / "cpu-torch2.13" / "test_a.json"
    write_file(path, CPU, FileChanges({"test_x": entry(MiB)}))
    full.count = 0
    write_file(path, CPU, FileChanges({"test_y": entry(MiB)}))
    before, points = path.read_text(), full.count
    assert points >= 4
    said = []
    for point in range(points):
        full.left = point
        try:
            write_file(path, CPU, FileChanges({"test_z": entry(3 * MiB)}))
        except BaselineError as error:
            said.append((str(error), path.read_text()))
        assert litter(tmp_path) == []
        full.left = -1
        write_file(path, CPU, FileChanges(removed=frozenset({"test_z"})))
        assert sorted(read_file(path, CPU).lines) == ["test_x", "test_y"]
    assert len(said) >= 3
    for sentence, stored in said:
        assert "No space left on device" in sentence
        assert "what it held before is unchanged" in sentence
        assert stored == before


FILLS_THE_DISK = """
import errno, os, pathlib

import fake_measure

fake_measure.install()

real = pathlib.Path.write_bytes

def write_bytes(path, data):
    if os.environ.get("FULL", "?") in path.name:
        real(path, data[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return real(path, data)

pathlib.Path.write_bytes = write_bytes
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_on_a_full_disk_says_so_once_and_fails(
    project: Project, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    body = "@pytest.mark.memory_baseline\ndef test_a(): use({} * MiB)\n"
    for name in ("test_a", "test_b"):
        project.write(body.format(1), name)
    (project.path / "conftest.py").write_text(FILLS_THE_DISK)
    arguments = ("-p", "xdist", f"-n{workers}") if workers else ()
    project.run_apart(*arguments, "--torchmem-update-baseline").assert_outcomes(passed=2)
    before = project.baseline("test_a").read_text()
    for name in ("test_a", "test_b"):
        project.write(body.format(9), name)
    monkeypatch.setenv("FULL", "test_a.")
    run = project.run_apart(*arguments, "--torchmem-update-baseline", "--torchmem-report=x.json")
    assert run.ret == 1
    said = [line for line in run.outlines if "No space left on device" in line]
    assert len(said) == 1
    assert "test_a.json cannot be written" in said[0]
    assert project.baseline("test_a").read_text() == before
    assert project.entries("test_b")["test_a"]["total"] == 9 * MiB
    assert (
        "No space left on device"
        in json.loads((project.path / "x.json").read_text())["problems"][0]
    )
    assert litter(project.path / "__torchmem__") == []
    monkeypatch.delenv("FULL")
    project.run_apart("--torchmem-update-baseline").assert_outcomes(passed=2)
    assert project.entries("test_a")["test_a"]["total"] == 9 * MiB


def test_a_report_on_a_full_disk_leaves_the_old_one(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.write("def test_a(torchmem): use(MiB)\n")
    (project.path / "conftest.py").write_text(FILLS_THE_DISK)
    project.run_apart("--torchmem-report=x.html", "--torchmem-report=x.json").assert_outcomes(
        passed=1
    )
    before = (project.path / "x.html").read_bytes()
    monkeypatch.setenv("FULL", "x.html")
    run = project.run_apart("--torchmem-report=x.html")
    assert run.ret == 1
    run.stdout.fnmatch_lines(["*x.html*No space left on device*"])
    assert (project.path / "x.html").read_bytes() == before


def test_a_folder_of_baselines_may_be_a_link(
    project: Project, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (project.path / "__torchmem__").symlink_to(elsewhere)
    project.write("@pytest.mark.memory_baseline\ndef test_a(): use(MiB)\n")
    project.update().assert_outcomes(passed=1)
    assert (project.path / "__torchmem__").is_symlink()
    assert (elsewhere / "cpu-torch2.99" / "test_it.json").is_file()
    project.run().stdout.fnmatch_lines(["memory: 1 ok"])


def test_a_baseline_that_links_to_nothing_is_no_new_one_until_an_update(project: Project) -> None:
    project.write("@pytest.mark.memory_baseline\ndef test_a(): use(MiB)\n")
    project.update()
    path, fetched = project.baseline(), project.path / "fetched.json"
    path.unlink()
    path.symlink_to(fetched)
    project.run().stdout.fnmatch_lines(["*is a link to *fetched.json, which is not there; fetch*"])
    project.update().assert_outcomes(passed=1)
    assert path.is_symlink()
    assert fetched.exists()
    project.run().stdout.fnmatch_lines(["memory: 1 ok"])


@pytest.mark.parametrize("kind", ["file", "link to nothing", "link to itself"])
def test_a_folder_that_is_none_is_said_by_an_update(project: Project, kind: str) -> None:
    folder = project.path / "__torchmem__"
    if kind == "file":
        folder.write_text("")
    else:
        folder.symlink_to(folder if "itself" in kind else project.path / "gone" / "x")
    project.write("@pytest.mark.memory_baseline\ndef test_a(): use(MiB)\n")
    run = project.update()
    if run.ret == 0:
        assert "test_a" in project.entries()
    else:
        assert "cannot be" in "\n".join(run.outlines)
        assert "Traceback" not in "\n".join([*run.outlines, *run.errlines])


def test_line_ends_of_windows_are_read_and_an_update_writes_ours(project: Project) -> None:
    project.write("@pytest.mark.memory_baseline\ndef test_a(): use(MiB)\n")
    project.update()
    ours = project.baseline().read_bytes()
    for path in (project.baseline(), project.baseline().with_suffix(".origins")):
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    project.run().stdout.fnmatch_lines(["memory: 1 ok"])
    project.write(
        "@pytest.mark.memory_baseline\ndef test_a(): use(MiB)\n"
        "@pytest.mark.memory_baseline\ndef test_b(): use(MiB)\n"
    )
    project.update()
    assert b"\r" not in project.baseline().read_bytes()
    assert set(ours.splitlines()) <= set(project.baseline().read_bytes().splitlines())
