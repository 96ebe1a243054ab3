"""The plugin on a GPU, end to end: limits, baselines, reports, refusals."""

from __future__ import annotations

import json
import pickle
import re
import sys
import textwrap
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.usefixtures("cuda")

HEADER = """
import pytest
import torch
from torch import nn

MiB = 1024**2
DEVICE = "cuda:0"


def ones(mib, device=DEVICE):
    return torch.ones(mib * MiB, dtype=torch.uint8, device=device)


def step(kept=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512)).to(DEVICE)
    model(torch.randn(64, 512, device=DEVICE)).sum().backward()


"""


class Project:
    """A project in a folder of its own, run by pytest here or in a process of its own."""

    def __init__(self, pytester: pytest.Pytester, *, process: bool = False) -> None:
        self.pytester = pytester
        self._run = pytester.runpytest_subprocess if process else pytester.runpytest_inprocess
        self.path = pytester.path
        pytester.makeini("[pytest]\naddopts = -p no:cacheprovider")

    def write(self, text: str) -> None:
        (self.path / "test_it.py").write_text(HEADER + textwrap.dedent(text))

    def run(self, *options: str) -> tuple[str, dict[str, int]]:
        """What was printed, and pytest's counts of outcomes."""
        done = self._run(*options)
        return done.stdout.str() + done.stderr.str(), done.parseoutcomes()


@pytest.fixture
def project(pytester: pytest.Pytester) -> Project:
    return Project(pytester)


@pytest.fixture
def fresh_project(pytester: pytest.Pytester) -> Project:
    """For what depends on the environment, or on all that the allocator has in its cache."""
    return Project(pytester, process=True)


def test_a_kept_limit_passes_a_broken_one_fails_and_both_run_once(project: Project) -> None:
    project.write(
        """
        RUNS = []

        @pytest.mark.memory_budget("40MiB")
        def test_kept():
            RUNS.append("kept")
            ones(30)

        @pytest.mark.memory_budget("40MiB")
        def test_broken():
            RUNS.append("broken")
            a = ones(30)
            b = ones(15)

        def test_runs():
            assert RUNS == ["kept", "broken"]
        """
    )
    said, outcomes = project.run()
    assert outcomes == {"passed": 2, "failed": 1}, said
    assert "memory peaked at 45.0 MiB, +5.0 MiB (+12 %) over the limit of 40.0 MiB" in said
    assert "45.0 MiB of temporary from aten::ones" in said
    assert "30.0 MiB" in said
    assert "at most" not in said


def test_what_is_retained_is_judged_in_one_run(project: Project) -> None:
    project.write(
        """
        KEPT, RUNS = [], []

        @pytest.mark.memory_budget(retained="0B")
        def test_nothing():
            RUNS.append("nothing")
            step()

        @pytest.mark.memory_budget(retained="4MiB")
        def test_too_much():
            RUNS.append("too much")
            KEPT[:] = [ones(5)]

        def test_runs():
            assert RUNS == ["nothing", "too much"]
        """
    )
    said, outcomes = project.run()
    assert outcomes == {"passed": 2, "failed": 1}, said
    assert "5.0 MiB of temporary from aten::ones" in said
    assert "still held by test_it.KEPT[0]" in said


def test_what_others_hold_is_no_part_of_a_limit(project: Project) -> None:
    project.write(
        """
        OTHERS = []

        def test_of_somebody_else():
            OTHERS.append(ones(500))

        @pytest.mark.memory_budget("40MiB")
        def test_kept():
            ones(30)
        """
    )
    said, outcomes = project.run()
    assert outcomes == {"passed": 2}, said
    assert "30.0 MiB" in said


def test_a_first_product_retains_nothing_and_has_its_own_category(project: Project) -> None:
    project.write(
        """
        @pytest.mark.memory_budget(retained=0, temporary="8MiB")
        def test_product():
            a = torch.ones(512, 512, device=DEVICE)
            a @ a

        @pytest.mark.memory_budget(workspace=0)
        def test_workspace():
            a = torch.ones(512, 512, device=DEVICE)
            a @ a
        """
    )
    said, outcomes = project.run()
    assert outcomes == {"passed": 1, "failed": 1}, said
    assert re.search(r"workspace peaked at (32|33|8\.1|9\.1)", said)


def test_what_is_left_behind_is_told_with_its_holder(project: Project) -> None:
    project.write(
        """
        CACHE = {}

        @pytest.mark.memory_budget(retained=0)
        def test_leak():
            CACHE["last"] = ones(3)

        @pytest.mark.memory_budget(retained=0)
        def test_cycle():
            cycle = [ones(2)]
            cycle.append(cycle)
        """
    )
    said, outcomes = project.run()
    assert outcomes == {"failed": 2}, said
    assert "retained 3.0 MiB" in said
    assert "still held by test_it.CACHE['last']" in said
    assert "retained 2.0 MiB" in said
    assert "freed only by the garbage collector" in said


def test_growth_of_a_step_is_found(project: Project) -> None:
    project.write(
        """
        @pytest.mark.memory_budget(growth=0)
        def test_steady(torchmem):
            for _ in torchmem.steps(4, warmup=1):
                step()

        @pytest.mark.memory_budget(growth=0)
        def test_growing(torchmem):
            kept = []
            for _ in torchmem.steps(4, warmup=1):
                step()
                kept.append(ones(2))
        """
    )
    said, outcomes = project.run()
    assert outcomes == {"passed": 1, "failed": 1}, said
    assert "grew by 2.0 MiB per step" in said


def test_limits_on_the_allocators_own_figures(fresh_project: Project) -> None:
    fresh_project.write(
        """
        @pytest.mark.memory_budget(reserved="24MiB", allocated="24MiB", active="24MiB")
        def test_kept():
            ones(20)

        @pytest.mark.memory_budget(reserved="24MiB")
        def test_broken():
            ones(30)
        """
    )
    said, outcomes = fresh_project.run()
    assert outcomes == {"passed": 1, "failed": 1}, said
    assert "reserved memory peaked at" in said


def test_a_limit_on_reserved_memory_begins_with_an_empty_cache(fresh_project: Project) -> None:
    fresh_project.write(
        """
        KEPT = []

        def test_fills_the_cache():
            ones(300)

        @pytest.mark.memory_budget(reserved="64MiB")
        def test_is_counted():
            ones(20)

        @pytest.mark.memory_budget(reserved="64MiB", retained="0B", growth="0B")
        def test_is_recorded(torchmem):
            for _ in torchmem.steps(2):
                ones(20)

        def test_keeps():
            KEPT.append(ones(100))

        @pytest.mark.memory_budget(reserved="64MiB", allocated="64MiB")
        def test_fails_for_what_is_kept():
            ones(20)
        """
    )
    said, outcomes = fresh_project.run()
    assert outcomes == {"passed": 4, "failed": 1}, said
    assert "reserved memory peaked at 120.0 MiB" in said
    for key in ("reserved", "allocated"):
        assert f": 100.0 MiB of that was {key} before the body began, for fixtures or" in said


def test_a_baseline_of_a_gpu_has_its_own_key(project: Project) -> None:
    project.write(
        """
        import os

        @pytest.mark.memory_baseline
        def test_step():
            step()
            extra = ones(int(os.environ.get("EXTRA", "0")))
        """
    )
    said, outcomes = project.run("--torchmem-update-baseline")
    assert outcomes == {"passed": 1}, said
    (path,) = (project.path / "__torchmem__").glob("*/test_it.json")
    assert path.parent.name.startswith(
        torch.cuda.get_device_name().lower().replace(" ", "-").partition("-")[0]
    ), path
    stored = json.loads(path.read_text())
    assert "cuda" in json.dumps(stored["environment"])
    assert project.run()[1] == {"passed": 1}
    project.pytester._monkeypatch.setenv("EXTRA", "100")
    said, outcomes = project.run()
    assert outcomes == {"failed": 1}, said
    assert "aten::ones" in said


def test_running_out_of_memory_is_reported_with_what_was_live(project: Project) -> None:
    project.write(
        """
        @pytest.mark.memory_budget(activation="1GiB")
        def test_too_much():
            weights = ones(30)
            torch.empty(1 << 50, dtype=torch.uint8, device=DEVICE)
        """
    )
    said, outcomes = project.run("--torchmem-report=run.json")
    assert outcomes == {"failed": 1}, said
    assert "OutOfMemoryError" in said
    assert "30.0 MiB" in said
    (test,) = json.loads((project.path / "run.json").read_text())["tests"]
    assert test["unjudged"][0]["result"]["peak"]["total"] == 30 * 1024**2


def test_memory_of_another_device_is_a_blind_spot(project: Project) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    project.write(
        """
        @pytest.mark.memory_budget(temporary="40MiB")
        def test_two():
            ones(30)
            ones(50, "cuda:1")

        @pytest.mark.memory_budget("60MiB", device="cuda:1")
        def test_second():
            ones(30)
            ones(50, "cuda:1")
        """
    )
    said, outcomes = project.run()
    assert outcomes == {"passed": 2}, said
    assert "50.0 MiB were allocated on cuda:1, which is not measured" in said
    said, outcomes = project.run("--torchmem-strict", "-k", "test_two")
    assert outcomes.get("failed") == 1, said


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync", "its allocator is cudaMallocAsync"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "PYTORCH_NO_CUDA_MEMORY_CACHING"),
    ],
)
def test_an_allocator_that_says_nothing_is_refused(
    fresh_project: Project, monkeypatch: pytest.MonkeyPatch, name: str, value: str, reason: str
) -> None:
    monkeypatch.setenv(name, value)
    fresh_project.write(
        """
        @pytest.mark.memory_budget("40MiB")
        def test_it():
            ones(30)
        """
    )
    said, outcomes = fresh_project.run()
    assert "passed" not in outcomes, said
    assert reason in said


def test_with_expandable_segments_the_footprint_is_the_same(
    fresh_project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh_project.write(
        """
        @pytest.mark.memory_budget(temporary="1GiB")
        def test_step():
            step()
        """
    )

    def peak() -> dict[str, object]:
        fresh_project.run("--torchmem-report=run.json")
        (test,) = json.loads((fresh_project.path / "run.json").read_text())["tests"]
        result = test["windows"][0]["result"]
        assert result["notes"] == []
        assert result["unexplained_bytes"] == 0
        del result["peak"]["time_ns"]
        return dict(result["peak"])

    plain = peak()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert peak() == plain


def test_a_history_that_somebody_else_records_is_used_and_left_on(project: Project) -> None:
    project.write(
        """
        @pytest.fixture(autouse=True, scope="module")
        def history():
            torch.cuda.memory._record_memory_history(max_entries=100_000)
            yield
            entries = torch.cuda.memory._snapshot()["device_traces"][0]
            made = [e for e in entries if e["action"] == "alloc" and e["size"] == 7 * MiB]
            torch.cuda.memory._record_memory_history(enabled=None)
            assert len(made) == 1
            assert made[0]["frames"]

        @pytest.mark.memory_budget(temporary="40MiB")
        def test_it():
            ones(7)
        """
    )
    said, outcomes = project.run("--torchmem-report=run.json")
    assert outcomes == {"passed": 1}, said
    (test,) = json.loads((project.path / "run.json").read_text())["tests"]
    assert test["windows"][0]["result"]["notes"] == []


def test_reports_for_other_viewers(fresh_project: Project) -> None:
    fresh_project.write(
        """
        import pytest_torchmem

        def test_export(torchmem):
            step()

        def test_measure():
            with pytest_torchmem.measure() as measured:
                step()
            measured.save_trace("body.trace")
        """
    )
    assert fresh_project.run()[1] == {"passed": 2}
    for name in ("x.perfetto.json", "x.pickle", "x.svg"):
        done = fresh_project.pytester.run(
            sys.executable,
            "-m",
            "pytest_torchmem",
            "report",
            str(fresh_project.path / "body.trace"),
            "-o",
            name,
        )
        assert done.ret == 0, done.stderr.str()
    snapshot = pickle.loads(Path(fresh_project.path / "x.pickle").read_bytes())
    assert any(trace for trace in snapshot["device_traces"])


COUNTED = """
@pytest.mark.memory_budget(reserved="70MiB")
def test_pools():
    x = ones(4)
    graphs = [torch.cuda.CUDAGraph() for _ in range(4)]
    for graph in graphs:
        with torch.cuda.graph(graph):
            torch.cat([x, x, x, x])


@pytest.mark.memory_budget(reserved="70MiB")
def test_streams():
    x = ones(4)
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    for _ in range(8):
        with torch.cuda.stream(side):
            joined = torch.cat([x, x, x, x])
        joined.record_stream(here)
        del joined
"""


def test_a_reserved_limit_names_what_holds_no_tensor(fresh_project):
    fresh_project.write(COUNTED)
    told, counts = fresh_project.run("-p", "no:randomly")
    assert counts == {"failed": 2}
    pools, streams = re.findall(r"^reserved memory peaked at .*$", told, re.MULTILINE)
    assert " of that was free in the private pools of CUDA graphs" in pools
    assert " of that had been freed and waited for another stream that still used it" in streams
    for told in (pools, streams):
        assert "; segments reserved from aten::cat at test_it.py:" in told


PINNED = """
@pytest.mark.memory_budget(retained="0B")
def test_pinned(kept=[]):
    ones(1)
    kept.append(torch.empty(4 * MiB, dtype=torch.uint8, pin_memory=True))
    torch.empty(2 * MiB, dtype=torch.uint8, pin_memory=True)
"""


def test_pinned_memory_is_not_measured_and_said(project):
    project.write(PINNED)
    told, counts = project.run()
    assert counts == {"passed": 1}
    in_use = 4 if torch.__version__ >= "2.13" else 6  # before, what was freed counts as in use
    pinned = f"6.0 MiB of pinned host memory were made, of which at most {in_use}.0 MiB are still"
    assert pinned in told
    told, counts = project.run("--torchmem-strict")
    assert counts == {"failed": 1}
    assert "not everything was seen: 6.0 MiB of pinned host memory were made" in told
