"""Thirty programs have the peaks that they had, where torch's CUDA build was fetched.

``python -m tests.simulate.test_peaks_of_programs`` writes the file of their peaks anew.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import ROOT, has_simulated_gpu, require_the_pinned_torch_on_a_cpu

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

PEAKS = Path(__file__).parents[1] / "data" / "simulated_peaks.json"
SIMULATE = (sys.executable, "-m", "pytest_torchmem", "simulate", "--gpu", "H100", "--")


def measured() -> dict[str, tuple[int, int]]:
    """Each program's peak, and what torch's allocator counted at its own."""
    done = subprocess.run(
        [*SIMULATE, sys.executable, "-m", "tests.simulate.thirty_programs"],
        cwd=ROOT,
        env={**os.environ, "KINETO_LOG_LEVEL": "5"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, tuple[int, int]] = json.loads(done.stdout)
    return found


def test_thirty_programs_have_the_peaks_that_they_had():
    require_the_pinned_torch_on_a_cpu()
    if not has_simulated_gpu():
        pytest.skip("needs torch's CUDA build: torchmem simulate --fetch")
    found = measured()
    assert {name: peak for name, (peak, _) in found.items()} == json.loads(PEAKS.read_text())
    assert len(found) == 30
    # What torch's own allocator says: LBFGS keeps a number that its next step does not touch.
    apart = {name: counted - peak for name, (peak, counted) in found.items()}
    assert {name: size for name, size in apart.items() if size} == {"LBFGS": 4}


if __name__ == "__main__":
    peaks = {name: peak for name, (peak, _) in measured().items()}
    PEAKS.write_text(json.dumps(peaks, indent=1) + "\n")
