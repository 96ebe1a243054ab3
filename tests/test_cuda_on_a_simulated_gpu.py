"""What needs a GPU runs on a simulated one, in a process of its own, as a user would start it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_torchmem.simulate.torch_builds import torch_build
from pytest_torchmem.values.errors import SimulationError

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
TESTS = ("tests/cuda", "tests/simulate", "tests/torch_names/test_memory_profiler.py")


def test_what_needs_a_gpu_passes_on_a_simulated_one(pytestconfig: pytest.Config) -> None:
    try:
        torch_build()
    except SimulationError as error:
        pytest.skip(f"what needs a GPU is not run: {error.sentence}")
    chosen = "gpu" if pytestconfig.getoption("nightly", False) else "gpu and by_day"
    simulate = (sys.executable, "-m", "pytest_torchmem", "simulate", "--gpu", "H100x2", "--")
    run = (sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-m", chosen)
    # Not the variables that this run has for the small projects that its tests start.
    ours = ("PYTEST_", "PYTHONDONTWRITEBYTECODE")
    done = subprocess.run(
        [*simulate, *run, *TESTS],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith(ours)},
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
    assert "needs a" not in done.stdout, "a test that needs a GPU did not find it"
