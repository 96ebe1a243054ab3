"""One number for each body on a GPU: alone and in a suite, in any order, among what others left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cuda.bodies import BODIES

pytestmark = pytest.mark.usefixtures("cuda")

TESTS = '''
import random
import pytest
import torch
from tests.cuda.bodies import BODIES

DEVICE = torch.device("cuda", 0)
LEFT = []


@pytest.fixture(autouse=True)
def left_by_others(request):
    """Tensors, holes in the cache and cycles, as tests leave them."""
    if request.config.getoption("--litter"):
        chance = random.Random(request.node.name)
        LEFT.append(torch.ones(chance.randrange(1, 3_000_000), device=DEVICE))
        cycle = [torch.ones(chance.randrange(1, 300_000), device=DEVICE)]
        cycle.append(cycle)
        (torch.ones(64, 64, device=DEVICE, requires_grad=True) ** 2).sum().backward()
        if len(LEFT) % 3 == 0:
            del LEFT[chance.randrange(len(LEFT))]


@pytest.mark.memory_budget(unknown=0, retained=0, warmup=1)
@pytest.mark.parametrize("name", sorted(BODIES))
def test_body(name):
    BODIES[name](DEVICE)
'''
CONFTEST = """
import random


def pytest_addoption(parser):
    parser.addoption("--litter", action="store_true")
    parser.addoption("--shuffle", type=int, default=0)


def pytest_collection_modifyitems(config, items):
    if config.option.shuffle:
        random.Random(config.option.shuffle).shuffle(items)
"""
WAYS = {
    "shuffled among what others left": ("--shuffle=1", "--litter"),
    "shuffled on two workers": ("--shuffle=2", "--litter", "-p", "xdist", "-n2"),
}
ALONE = ("training", "per_sample_gradients", "captured_graph")


def numbers(folder: Path, *options: str) -> dict[str, Any]:
    """What was measured, by body: everything but times and what the allocator counted itself."""
    report = folder / "run.json"
    report.unlink(missing_ok=True)
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), root])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [f"--torchmem-report={report}"]
    done = subprocess.run(
        [*command, *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {}
    for test in json.loads(report.read_text(encoding="utf-8"))["tests"]:
        (window,) = test["windows"]
        result = window["result"]
        assert [spot for spot in result["blind_spots"] if "pinned" not in spot] == []
        del result["peak"]["time_ns"], result["counters"]
        found[test["test"].partition("[")[2].rstrip("]")] = result
    return found


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "test_bodies.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path


@pytest.mark.nightly("shuffled on two workers", "alone")
@pytest.mark.parametrize("way", [*WAYS, "alone"])
def test_every_body_has_one_number_however_it_is_run(project: Path, way: str) -> None:
    in_order = numbers(project)
    assert set(in_order) == set(BODIES)
    if way == "alone":
        for name in ALONE:
            alone = numbers(project, f"test_bodies.py::test_body[{name}]")
            assert alone == {name: in_order[name]}
    else:
        measured = numbers(project, *WAYS[way])
        for name, result in in_order.items():
            assert measured[name] == result, name
