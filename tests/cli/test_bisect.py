"""torchmem bisect: the commit that moved a test's number."""

from __future__ import annotations

import subprocess

import pytest

pytestmark = pytest.mark.slow

TEST = """
import pytest, torch
from net import make

@pytest.mark.memory_budget("1GiB")
def test_net():
    make()

def test_plain():
    pass
"""
SIZE = "import torch\n\n\ndef make():\n    return torch.ones({} * 2**18)\n"


def git(folder, *arguments):
    who = ("-c", "user.name=Ada", "-c", "user.email=a@example.org")
    done = subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)
    return done.stdout.decode().strip()


NODE = "test_net.py::test_net"


@pytest.fixture
def project(tmp_path):
    """A folder of a repository, with a test of what `commit` puts into its module."""
    folder = tmp_path / "inner"
    folder.mkdir()
    git(tmp_path, "init", "-q", "-b", "main")
    (folder / "test_net.py").write_text(TEST)
    return folder


def commit(folder, **texts):
    names = []
    for subject, text in texts.items():
        (folder / "net.py").write_text(text)
        git(folder, "add", "-A")
        git(folder, "commit", "-q", "-m", subject)
        names.append(git(folder, "rev-parse", "HEAD"))
    return names


def test_the_commit_that_moved_the_peak_is_named_with_its_cause(command, project):
    first, _, wider, _, _ = commit(
        project,
        small=SIZE.format(2),
        comment=SIZE.format(2) + "# x\n",
        wider=SIZE.format(7),
        other=SIZE.format(7) + "# y\n",
        last=SIZE.format(7) + "# z\n",
    )
    (project / "net.py").write_text("what is not committed is not looked at")
    code, out, error = command("bisect", NODE, "-C", project, "--good", first)
    assert (code, error) == (0, "")
    moved, since, cause = out.splitlines()
    assert moved == f"{NODE}: 2.0 MiB -> 7.0 MiB, +5.0 MiB (+250 %)"
    assert since.startswith(f"since {wider[:9]} ")
    assert since.endswith("Ada  wider")
    assert "from aten::ones at net.py:5" in cause
    assert git(project, "status", "--porcelain") == "M inner/net.py"
    assert len(git(project, "worktree", "list").splitlines()) == 1


@pytest.mark.nightly
def test_a_commit_that_gives_no_number_is_said(command, project):
    first, broken, wider = commit(
        project, small=SIZE.format(2), broken="no Python", wider=SIZE.format(7)
    )
    code, _, error = command("bisect", NODE, "-C", project, "--good", first)
    assert code == 2
    assert "went from 2.0 MiB to 7.0 MiB in one of" in error
    assert broken[:9] in error
    assert wider[:9] in error
    code, _, error = command("bisect", NODE, "-C", project, "--good", wider)
    assert code == 2
    assert "has a peak of 7.0 MiB at both" in error
    code, _, error = command("bisect", "test_net.py::test_plain", "-C", project, "--good", first)
    assert code == 2
    assert "test_plain gives no number at" in error
    code, _, error = command("bisect", "test_net.py::test_gone", "-C", project, "--good", first)
    assert code == 2
    assert "ERROR: not found: " in error


def test_without_a_baseline_a_good_commit_is_named(command, project):
    commit(project, small=SIZE.format(2))
    code, _, error = command("bisect", NODE, "-C", project)
    assert code == 2
    assert "git knows no baseline in" in error
    code, _, error = command("bisect", NODE, "-C", project, "--good", "nowhere")
    assert (code, "there is no commit 'nowhere'" in error) == (2, True)
