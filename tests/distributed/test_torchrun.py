"""``torchrun -m pytest``: ranks that run the same tests in one folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from launching import TORCHRUN, needs_gloo, run
from training import PARAMETER_BYTES, RANKS

from pytest_torchmem import Ranks
from pytest_torchmem.store.run_reports import read_run

pytestmark = [pytest.mark.slow, needs_gloo]
NAMES = {"test_ddp", "test_fsdp"}

TESTS = """
import os

import pytest
import torch
import torch.distributed as dist
from training import BATCH, PARAMETER_BYTES, WIDTH, replicated, sharded

from pytest_torchmem import Ranks, measure


@pytest.fixture(scope="module", autouse=True)
def group():
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()


def step(model, more=0):
    model(torch.ones(BATCH + more, WIDTH)).square().mean().backward()


@pytest.fixture
def ddp():
    model = replicated()
    step(model)
    return model


@pytest.fixture
def fsdp():
    model = sharded()
    step(model)
    return model


@pytest.mark.memory_baseline
@pytest.mark.memory_budget("64MiB", device="cpu")
def test_ddp(torchmem, ddp):
    more = int(os.environ.get("MORE", "0")) if dist.get_rank() == 1 else 0
    with torchmem.measure("step") as region:
        step(ddp, more)
    ranks = Ranks.gather(region)
    assert ranks.of(dist.get_rank()) == region.result
    ranks.check(parameter=PARAMETER_BYTES, spread="64MiB")


@pytest.mark.memory_baseline
@pytest.mark.memory_budget(parameter=PARAMETER_BYTES // 2, device="cpu")
def test_fsdp(fsdp):
    with measure("step") as region:
        step(fsdp)
    for one in Ranks.gather(region):
        assert one.result.peak.parameter == PARAMETER_BYTES // 2
"""


def pytest_job(folder: Path, *options: str, **environment: str):
    here = str(Path(__file__).parent)
    path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    return run(*TORCHRUN, "-m", "pytest", *options, folder=folder, PYTHONPATH=path, **environment)


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A project whose two ranks have stored their baselines and written reports."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_job.py").write_text(TESTS)
    stored = pytest_job(folder, "--torchmem-update-baseline", "--torchmem-report=run.json")
    assert stored.returncode == 0, stored.stdout + stored.stderr
    count = len(NAMES)
    assert stored.stdout.count(f"memory: {count} new") == RANKS
    return folder


def test_each_rank_has_baselines_and_a_report_of_its_own(project):
    files = {path.relative_to(project).as_posix() for path in project.rglob("*.json")}
    stored = {path for path in files if path.startswith("__torchmem__/")}
    assert files - stored == {"run-rank0.json", "run-rank1.json"}
    assert {path.rpartition("-")[2] for path in stored} == {
        "rank0of2/test_job.json",
        "rank1of2/test_job.json",
    }
    for path in stored:
        entries = json.loads((project / path).read_text())["entries"]
        assert {row[0] for row in entries[:-1]} == NAMES


def test_the_reports_of_all_ranks_are_results_of_a_job(project):
    ranks = Ranks.load(project / "run-rank*.json", "test_job.py::test_ddp")
    assert [one.result.peak.parameter for one in ranks] == [PARAMETER_BYTES] * RANKS
    for rank in range(RANKS):
        tests = read_run(project / f"run-rank{rank}.json").tests
        assert {test.environment["rank"] for test in tests} == {f"{rank} of {RANKS}"}


def test_a_test_that_grows_on_one_rank_fails_there_alone(project):
    grown = pytest_job(project, "-otorchmem_require_baseline=true", MORE="4096")
    assert grown.returncode != 0
    assert grown.stdout.count("FAILED test_job.py::") == 1
    assert grown.stdout.count("FAILED test_job.py::test_ddp - Failed: ") == 1
    assert " over the baseline of " in grown.stdout
    assert "torchmem, rank 1 of 2" in grown.stdout
    accepts = f"torchrun --nproc-per-node {RANKS} -m pytest test_job.py::test_ddp"
    assert f" {accepts} --torchmem-update-baseline\n" in grown.stdout
    assert f"1 failed, {len(NAMES) - 1} passed" in grown.stdout
