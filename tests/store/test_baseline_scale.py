"""Thousands of entries under xdist: nothing lost, nothing invented, one writer."""

import subprocess

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

pytest.importorskip("xdist")

MODULES, TESTS = 20, 100

MODULE = """
@pytest.mark.memory_baseline
@pytest.mark.parametrize("size", range(1, {tests} + 1))
def test_size(size): use(size * MiB, "parameter" if size % 2 else "activation")
"""
TROUBLE = """
import os, time
from pathlib import Path

RUNS = []

@pytest.mark.memory_baseline
def test_kills_its_worker():
    use(MiB)
    if "KILL" in os.environ:
        time.sleep(0.3)  # let the reports of others leave
        os._exit(1)

@pytest.mark.memory_baseline
def test_passes_when_run_again():
    RUNS.append(1)
    use(len(RUNS) * 10 * MiB)
    assert len(RUNS) == 2 or "KILL" not in os.environ

@pytest.mark.memory_baseline
def test_always_fails():
    use(MiB)
    assert "KILL" not in os.environ
"""


def files(project):
    return {path.name: path.read_bytes() for path in project.baseline().parent.iterdir()}


def test_two_thousand_entries_a_killed_worker_and_reruns(project, monkeypatch):
    pytest.importorskip("pytest_rerunfailures")
    for number in range(MODULES):
        project.write(MODULE.format(tests=TESTS), f"test_{number:02}")
    project.write(TROUBLE, "test_trouble")
    monkeypatch.setenv("KILL", "1")
    arguments = ("-q", "-p", "rerunfailures", "--reruns=1", "--maxfail=0", "--torchmem-summary=off")
    result = project.run_in_workers(
        4, *arguments, "--torchmem-update-baseline", "--torchmem-accept=new,unused"
    )
    outcomes = result.parseoutcomes()
    assert outcomes["passed"] == MODULES * TESTS + 1
    assert outcomes["failed"] == 2
    for number in range(MODULES):
        totals = {k: e["total"] >> 20 for k, e in project.entries(f"test_{number:02}").items()}
        assert totals == {f"test_size[{size}]": size for size in range(1, TESTS + 1)}
    stored = project.entries("test_trouble")
    assert {key: entry["total"] >> 20 for key, entry in stored.items()} == {
        "test_passes_when_run_again": 20  # what the attempt that passed has measured
    }
    before = files(project)
    assert len(before) == 2 * (MODULES + 1)
    monkeypatch.delenv("KILL")
    selection = (
        "-k",
        "test_00 or trouble",
        "--torchmem-update-baseline",
        "--torchmem-accept=shrunk,unused",
    )
    project.run_in_workers(2, "-q", *selection)
    changed = {name for name, text in files(project).items() if before[name] != text}
    assert changed == {
        "test_trouble.json",
        "test_trouble.origins",
    }  # 20 MiB became 10, and nothing was removed


@pytest.mark.parametrize(
    ("workers", "selection"),
    [
        (("-p", "xdist", "-n2"), ("--lf",)),
        ((), ("--lf",)),
        (("-p", "xdist", "-n1"), ("-k", "a")),
        (("-p", "xdist", "-n1"), ("test_it.py::test_a",)),
    ],
)
def test_a_selection_removes_nothing(project, selection, workers):
    project.pytester.makeini("[pytest]\ncache_dir = cache\n")
    body = "@pytest.mark.memory_baseline\ndef test_{}():\n    use(MiB)\n    assert {}\n"
    project.write(body.format("a", 1) + body.format("b", 1) + body.format("gone", 1))
    project.run_apart(*workers, "--torchmem-update-baseline").assert_outcomes(passed=3)
    project.write(body.format("a", 0) + body.format("b", 1))
    project.run_apart(*workers)
    project.run_apart(
        *workers, "--torchmem-update-baseline", "--torchmem-accept=unused", *selection
    )
    assert sorted(project.entries()) == ["test_a", "test_b", "test_gone"]


def test_two_runs_at_once_on_one_folder(project):
    for name in "ab":
        text = MODULE.format(tests=40).replace("test_size", f"test_{name}")
        project.write(text + f"\nimport {'time; time.sleep(0.1)' if name == 'a' else 'os'}\n", name)
        (project.path / f"run_{name}").mkdir()
        (project.path / f"{name}.py").rename(project.path / f"run_{name}" / "test_it.py")
        (project.path / f"run_{name}" / "conftest.py").write_text(
            f"import sys; sys.path.insert(0, {str(project.path)!r})\n"
            "import fake_measure; fake_measure.install()\n"
        )
    folder = project.path / "stored"
    runs = [
        project.pytester.popen(
            [
                *project.pytester._getpytestargs(),
                "-p",
                "no:cacheprovider",
                "--torchmem-update-baseline",
                f"-otorchmem_baseline_dir={folder}",
                f"--rootdir={project.path / f'run_{name}'}",
            ],
            cwd=project.path / f"run_{name}",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        for name in "ab"
    ]
    assert [run.wait(120) for run in runs] == [0, 0]
    text = (folder / "cpu-torch2.99" / "test_it.json").read_text()
    assert all(f'["test_{n}[{size}]", "work"' in text for n in "ab" for size in range(1, 41))
