"""A month of a project that keeps its baselines in git, played through.

Bodies say what they use (`plugin/fake_measure.py`), so what is told here is only about baselines;
one chapter measures a real body, for the reports that show operators.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from pytest_torchmem.cli.main import main
from tests import opened_reports as opened
from tests.chromium import launched

pytestmark = pytest.mark.slow

FAKE = (Path(__file__).parent / "fake_measure.py").read_text(encoding="utf-8")
CONFTEST = """
import os
import fake_measure

if "REAL" not in os.environ:
    fake_measure.install()
environment = fake_measure.environment
fake_measure.environment = lambda device: {
    **environment(device), "torch": os.environ.get("FAKE_TORCH", "2.12")
}
"""
HEADER = "import pytest\nfrom fake_measure import MiB, use\n"
TEST = """
@pytest.mark.memory_baseline
def test_{name}():
    use({parameter} * MiB, "parameter", operator="", module="net.layers.*.fc")
    use({activation} * MiB, "activation", operator="aten::mm", module="net.layers.*.fc", line=12)
"""
REAL_TEST = """import pytest
import torch

@pytest.mark.memory_budget("1MiB")
def test_step(torchmem):
    net = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.GELU(), torch.nn.Linear(512, 64))
    with torchmem.measure("both"):
        net(torch.ones(512, 64)).square().sum().backward()
"""
UPDATE = "--torchmem-update-baseline"
PEAK_PROPERTY, STATUS = "torchmem_peak_bytes", "torchmem_status"
CPU_12, CPU_13, GPU_13 = "cpu-torch2.12", "cpu-torch2.13", "fake-100-torch2.13"


class Project:
    """A git repository with one test module, and the people who work in it."""

    def __init__(self, pytester: pytest.Pytester, patch: pytest.MonkeyPatch) -> None:
        self.pytester, self.patch = pytester, patch
        self.path = pytester.path
        self.torch = "2.12"
        self.tests: dict[str, str] = {}
        self.write("fake_measure.py", FAKE)
        self.write("conftest.py", CONFTEST)
        self.write("pytest.ini", "[pytest]\naddopts = -p no:cacheprovider\n")
        self.write(".gitignore", "__pycache__\n")
        self.git("init", "-q", "-b", "main")
        self.git("config", "user.name", "A")
        self.git("config", "user.email", "a@example.org")

    def write(self, name: str, text: str) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def test(self, name: str, parameter: int = 10, activation: int = 40, extra: str = "") -> None:
        """Write or change one test; each is in a file region of its own, as git sees it."""
        text = TEST.format(name=name, parameter=parameter, activation=activation) + extra
        self.tests[name] = text
        self.save()

    def save(self) -> None:
        body = "\n\n".join(self.tests[name] for name in sorted(self.tests))
        self.write("test_net.py", HEADER + body)

    def git(self, *arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=self.path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def commit(self, message: str) -> None:
        self.git("add", "-A")
        self.git("commit", "-q", "-m", message)

    def pytest(self, *arguments: str, ends: int = 0, **variables: str) -> str:
        if "REAL" in variables:
            return self.python("-m", "pytest", *arguments, ends=ends, **variables)
        # The package is already imported here, which pytest's assertion rewriting warns about.
        quiet = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
        with self.patch.context() as patch:
            for name, value in self.environment(**variables).items():
                patch.setenv(name, value)
            done = self.pytester.runpytest_inprocess(*quiet, *arguments)
        assert done.ret == ends, done.stdout.str() + done.stderr.str()
        return done.stdout.str()

    def torchmem(self, *arguments: str, ends: int = 0) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as told:
            assert main(arguments) == ends, told.getvalue()
        return told.getvalue()

    def environment(self, **variables: str) -> dict[str, str]:
        return {
            "FAKE_TORCH": self.torch,
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_ADDOPTS": "--assert=plain",
            "GITHUB_ACTIONS": "",
            "GITHUB_WORKSPACE": "",
            "CI": "",
            "COLUMNS": "200",
            **variables,
        }

    def python(self, *arguments: str, ends: int = 0, **variables: str) -> str:
        environment = {**os.environ, **self.environment(**variables)}
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == ends, done.stdout + done.stderr
        return done.stdout

    def stored(self, environment: str = CPU_12) -> list[str]:
        """Return the stored entries as ``test: MiB``."""
        path = self.path / "__torchmem__" / environment / "test_net.json"
        rows = [line.split(", ") for line in path.read_text().splitlines() if '", "work", ' in line]
        return [f"{row[0][2:-1]}: {int(row[2]) >> 20}" for row in rows]

    def diff(self) -> list[str]:
        """Return what differs from the last commit, without context."""
        self.git("add", "-A", "-N", "__torchmem__")
        lines = self.git("diff", "-U0", "--", "__torchmem__").splitlines()
        changed = [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]
        assert all(len(line) <= 1 + 120 for line in changed)
        return changed

    def accept(self, *arguments: str, entries: int, files: int = 0) -> str:
        """Update, and hold the diff to what a reviewer is promised: six lines for each entry.

        A new file has 15 lines beside those of its entries.
        """
        told = self.pytest(*(arguments or (UPDATE,)))
        assert 0 < len(self.diff()) <= 6 * entries + 15 * files
        return told


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Project:
    return Project(pytester, monkeypatch)


def test_a_month(project: Project) -> None:
    first_baselines(project)
    a_reviewer_reads_a_diff(project)
    two_branches_add_tests(project)
    two_branches_change_one_test(project)
    torch_is_upgraded(project)
    a_gpu_joins_at_night(project)
    a_test_is_renamed(project)
    a_regression_is_caught(project)
    a_real_failure_is_shown_by_its_operators(project)
    an_improvement_is_tightened(project)
    an_entry_is_retired(project)
    a_module_is_renamed(project)
    the_history_is_read(project)
    the_pages_of_the_month_are_opened(project)


def first_baselines(project: Project) -> None:
    project.test("forward")
    project.test("train", parameter=20, activation=80)
    assert "2 measurements have no baseline" in project.pytest()
    assert "2 measurements have no baseline, so CI passes" in project.pytest(CI="true")
    project.pytest("-otorchmem_require_baseline=true", ends=1)
    project.accept(entries=2, files=1)
    assert project.stored() == ["test_forward: 50", "test_train: 100"]
    project.commit("baselines")
    project.pytest("-otorchmem_require_baseline=true")
    assert project.diff() == []


def a_reviewer_reads_a_diff(project: Project) -> None:
    """Lines that moved change nothing; two tests that grew change what a reviewer can read."""
    moved = dict(project.tests)
    project.tests = {name: text.replace("line=12", "line=31") for name, text in moved.items()}
    project.save()
    project.pytest(UPDATE)
    assert project.diff() == []
    project.test("forward", activation=45)
    project.test("train", parameter=22, activation=85)
    project.accept(entries=2)
    assert project.diff() == [
        '-["test_forward", "50.0 MiB: activation 40.0 MiB, parameter 10.0 MiB"],',
        '-["test_forward", "work", 52428800, 41943040, 0, 0, 0, 0],',
        '+["test_forward", "55.0 MiB: activation 45.0 MiB, parameter 10.0 MiB"],',
        '+["test_forward", "work", 57671680, 47185920, 0, 0, 0, 0],',
        '-["test_train", "100.0 MiB: activation 80.0 MiB, parameter 20.0 MiB"],',
        '-["test_train", "work", 104857600, 83886080, 0, 0, 0, 0],',
        '-["test_train", "state", 0, 20971520, 0, 0, 0, 0],',
        '+["test_train", "107.0 MiB: activation 85.0 MiB, parameter 22.0 MiB"],',
        '+["test_train", "work", 112197632, 89128960, 0, 0, 0, 0],',
        '+["test_train", "state", 0, 23068672, 0, 0, 0, 0],',
    ]
    binary = [line for line in project.git("diff").splitlines() if line.startswith("Binary files")]
    assert [line.split()[2] for line in binary] == [f"a/__torchmem__/{CPU_12}/test_net.origins"]
    project.git("checkout", "-q", ".")
    project.tests = moved


def two_branches_add_tests(project: Project) -> None:
    """Both insert between the same two entries; git needs nobody to choose."""
    for branch, name in (("one", "generate"), ("two", "loss")):
        project.git("checkout", "-q", "-b", branch, "main")
        project.write(f"test_{branch}.py", "")  # something else that this branch does
        before = dict(project.tests)
        project.test(name)
        project.accept(entries=1)
        rows = [line for line in project.diff() if line.startswith(f'+["test_{name}", ')]
        assert project.diff() == rows
        assert len(rows) == 3
        project.git("checkout", "-q", "--", "test_net.py")  # merging code is another story
        project.commit(f"{name} has a baseline")
        project.tests = before
    project.git("checkout", "-q", "main")
    project.git("merge", "-q", "one", "-m", "one")
    project.git("merge", "-q", "two", "-m", "two")
    project.test("generate")
    project.test("loss")
    assert "memory: 4 ok" in project.pytest("-otorchmem_require_baseline=true")
    assert sorted(project.stored()) == [
        "test_forward: 50",
        "test_generate: 50",
        "test_loss: 50",
        "test_train: 100",
    ]
    project.commit("both")


def two_branches_change_one_test(project: Project) -> None:
    """Both are kept by git, neither is right, and the test says so until somebody measures."""
    for branch, activation in (("three", 50), ("four", 60)):
        project.git("checkout", "-q", "-b", branch, "main")
        project.test("loss", activation=activation)
        project.accept(entries=1)
        project.git("checkout", "-q", "--", "test_net.py")
        project.commit(f"loss needs {activation}")
    project.git("checkout", "-q", "main")
    project.git("merge", "-q", "three", "-m", "three")
    project.git("merge", "-q", "four", "-m", "four")
    project.test("loss", activation=70)  # what the merged code needs
    told = project.pytest(ends=1)
    assert "'test_loss' is there twice, as 60.0 MiB and as 70.0 MiB" in told or (
        "'test_loss' is there twice, as 70.0 MiB and as 60.0 MiB" in told
    )
    assert "1 failed, 3 passed" in told
    project.accept(entries=2)  # one line of each branch goes, and what is true comes
    assert "test_loss: 80" in project.stored()
    assert len(project.stored()) == 4
    project.commit("loss is measured again")


def torch_is_upgraded(project: Project) -> None:
    """Old numbers are compared with when somebody says so, and stay until they are deleted."""
    project.torch = "2.13"
    told = project.pytest("-otorchmem_require_baseline=true", ends=1)
    assert f"nearest is {CPU_12}, --torchmem-baseline-from={CPU_12} compares with it" in told
    project.test("generate", activation=45)  # the new version needs more here
    fallback = f"--torchmem-baseline-from={CPU_12}"
    told = project.pytest(fallback, ends=1)
    assert f"over the baseline for {CPU_12} of 40.0 MiB" in told
    assert f"{CPU_13} was compared with the baseline of {CPU_12} (4 entries)" in told
    told = project.pytest(UPDATE, "--torchmem-dry-run")
    assert "dry run: 4 new; nothing written" in told
    project.accept(entries=4, files=1)
    assert [*project.stored(CPU_13)] == [
        "test_forward: 50",
        "test_generate: 55",
        "test_loss: 80",
        "test_train: 100",
    ]
    project.pytest("-otorchmem_require_baseline=true")
    project.git("rm", "-r", "-q", f"__torchmem__/{CPU_12}")
    project.commit("torch 2.13")


def a_gpu_joins_at_night(project: Project) -> None:
    told = project.pytest("-otorchmem_device=cuda")
    assert "have no baseline" in told
    assert "nearest" not in told  # the CPU is near no GPU
    project.pytest("-otorchmem_device=cuda", UPDATE)
    assert project.stored(GPU_13) == project.stored(CPU_13)
    project.commit("GPU")
    for device in ("cpu", "cuda"):
        project.pytest(f"-otorchmem_device={device}", "-otorchmem_require_baseline=true")


def a_test_is_renamed(project: Project) -> None:
    project.tests["forward_pass"] = project.tests.pop("forward").replace("forward", "forward_pass")
    project.save()
    told = project.pytest("--torchmem-ci", ends=1)
    assert "test_forward_pass seems to be the unused test_forward" in told
    assert project.diff() == []
    for device, entries in (("cpu", 1), ("cuda", 2)):
        project.accept(f"-otorchmem_device={device}", entries=entries)
    removed = sorted(line[1:] for line in project.diff() if line[0] == "-")
    added = sorted(line[1:] for line in project.diff() if line[0] == "+")
    assert [line.replace("test_forward", "test_forward_pass") for line in removed] == added
    project.commit("renamed")


def a_regression_is_caught(project: Project) -> None:
    cause = (
        '    use(33 * MiB, "activation", operator="aten::_to_copy", module="net.norm", line=31)\n'
    )
    project.test("train", parameter=20, activation=80, extra=cause)
    on_github = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(project.path / "job.md")}
    told = project.pytest("--torchmem-report=out", "--junitxml=junit.xml", ends=1, **on_github)
    assert "1 failed, 3 passed" in told
    assert (
        "memory peaked at 133.0 MiB, +33.0 MiB (+33 %) over the baseline of 100.0 MiB: "
        "+33.0 MiB of activation from aten::_to_copy at fake_measure.py:31 in net.norm"
    ) in told
    assert "\n::error file=test_net.py,line=" in told
    assert "\n::warning file=fake_measure.py,line=31,title=memory grown here::" in told
    the_reports_of_the_regression_are_opened(project, told)
    project.test("train", parameter=20, activation=80)
    project.pytest("--torchmem-report=mended.json")
    told = project.torchmem("diff", "mended.json", "out/results.json", ends=1)
    assert "+33.0 MiB" in told
    assert "aten::_to_copy at fake_measure.py:31 in net.norm" in told
    project.torchmem("diff", "out/results.json", "mended.json")
    assert project.diff() == []


def the_reports_of_the_regression_are_opened(project: Project, told: str) -> None:
    """All of them tell the same, and the page says in a browser what the results file says."""
    out = project.path / "out"
    run = opened.results(out / "results.json")
    opened.check_terminal(told, run)
    opened.check_markdown(project.path / "job.md", run)
    assert set(run["tests"]) == {"test_forward_pass", "test_generate", "test_loss", "test_train"}
    train = opened.body(run["tests"]["test_train"])
    assert (train["change"], train["baseline_bytes"]) == ("grown", 100 << 20)
    assert train["result"]["peak"]["total"] == 133 << 20
    assert run["commit"] == project.git("rev-parse", "HEAD").strip()
    assert run["dirty"]
    opened.check_markdown(out / "summary.md", run)
    junit = ElementTree.parse(project.path / "junit.xml")
    peaks = [p.get("value") for p in junit.iter("property") if p.get("name") == PEAK_PROPERTY]
    assert peaks == [str(opened.body(t)["result"]["peak"]["total"]) for t in run["tests"].values()]
    told_by_junit = [p.get("value") for p in junit.iter("property") if p.get("name") == STATUS]
    assert told_by_junit == [opened.body(test)["status"] for test in run["tests"].values()]
    project.torchmem("report", "out/results.json", "--test", "test_train", "-o", "train.svg")
    opened.check_svg(project.path / "train.svg", train)


def a_real_failure_is_shown_by_its_operators(project: Project) -> None:
    """A body that is measured leaves its recording, which other people's viewers open."""
    project.write("real/test_step.py", REAL_TEST)
    arguments = ("real", "--torchmem-report=night", "-otorchmem_device=cpu")
    project.pytest(*arguments, ends=1, REAL="1")
    run = opened.results(project.path / "night" / "results.json")
    body = opened.body(run["tests"]["test_step"])
    (recording,) = (project.path / "night" / "tests").glob("*.trace")
    for name in ("x.perfetto.json", "x.pickle"):
        project.torchmem("report", str(recording), "-o", name)
    opened.check_chrome_trace(project.path / "x.perfetto.json", body)
    opened.check_snapshot(project.path / "x.pickle", body)
    (project.path / "real" / "test_step.py").unlink()


def an_improvement_is_tightened(project: Project) -> None:
    project.test("train", parameter=20, activation=50)
    told = project.pytest()
    assert "memory peaked at 70.0 MiB, 30 % below the baseline of 100.0 MiB: tighten" in told
    project.pytest("-otorchmem_fail_shrunk=true", ends=1)
    project.accept(UPDATE, "--torchmem-accept=shrunk", entries=1)
    assert "test_train: 70" in project.stored(CPU_13)
    assert all(line[1:].startswith('["test_train", ') for line in project.diff())
    shrunk = (UPDATE, "--torchmem-accept=shrunk")
    project.accept("-otorchmem_device=cuda", *shrunk, entries=2)
    project.commit("tightened")
    project.test("train", parameter=20, activation=80)  # and what it was before fails now
    project.pytest(ends=1)
    project.test("train", parameter=20, activation=50)


def an_entry_is_retired(project: Project) -> None:
    del project.tests["generate"]
    project.save()
    remove = "--torchmem-update-baseline", "--torchmem-accept=unused"
    project.pytest(*remove, "-k", "loss")
    assert len(project.stored(CPU_13)) == 4  # a run of a part cannot know
    assert "unused: test_generate: no test uses it; kept" in project.pytest(UPDATE)
    for device, environment in (("cpu", CPU_13), ("cuda", GPU_13)):
        told = project.accept(*remove, f"-otorchmem_device={device}", entries=2)
        assert "unused: test_generate: no test uses it; removed" in told
        assert project.stored(environment) == [
            "test_forward_pass: 50",
            "test_loss: 80",
            "test_train: 70",
        ]
    assert all(line.startswith('-["test_generate", ') for line in project.diff())
    project.commit("retired")


def a_module_is_renamed(project: Project) -> None:
    """Its baselines follow, of each environment, and no line of them changes."""
    project.git("mv", "test_net.py", "test_model.py")
    told = project.pytest("--torchmem-ci", ends=1)
    assert "test_net.py is gone and has baselines (3 entries): test_model.py has its tests" in told
    assert project.diff() == []
    assert "moved to test_model.py" in project.pytest()
    project.git("add", "-A")
    moved = project.git("diff", "--cached", "-M", "--name-status", "--", "__torchmem__")
    assert [line.split("\t")[0] for line in moved.splitlines()] == ["R100"] * 4
    for device in ("cpu", "cuda"):
        project.pytest(f"-otorchmem_device={device}", "-otorchmem_require_baseline=true")
    project.commit("a better name")


def the_history_is_read(project: Project) -> None:
    """Each accepted number is told once, whatever the branches did and whatever was renamed."""
    told = project.torchmem("history", "test_loss").splitlines()
    assert told[0] == f"test_model.py::test_loss on {CPU_13}"
    sizes = [line.split()[1:3] for line in told if " MiB" in line and GPU_13 not in line]
    assert sizes[:4] == [["50.0", "MiB"], ["60.0", "MiB"], ["70.0", "MiB"], ["80.0", "MiB"]]
    removed = [line for line in project.torchmem("history").splitlines() if " removed " in line]
    assert len(removed) == 4  # in each environment a renamed test and a retired one


def the_pages_of_the_month_are_opened(project: Project) -> None:
    """In a browser they say what the results files beside them say. Without one, all else holds."""
    out, night = project.path / "out", project.path / "night"
    run = opened.results(out / "results.json")
    (alone,) = (out / "tests").glob("*.html")
    one = {"tests": {"test_train": run["tests"]["test_train"]}}
    with launched() as browser:
        opened.check_page(browser, out / "index.html", run, "test_train")
        opened.check_page(browser, alone, one, "test_train")
        rows = opened.differences(browser, out / "index.html", "test_net.py::test_train")
        assert rows[0][:5] == ["+33.0 MiB", "new", "activation", "aten::_to_copy", "net.norm"]
        by_night = opened.results(night / "results.json")
        opened.check_page(browser, night / "index.html", by_night, "test_step")
