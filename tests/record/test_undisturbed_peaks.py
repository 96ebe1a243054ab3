"""The measured peak is the unmeasured one: against what the C library was asked for.

torch takes CPU memory from ``posix_memalign``; malloc_tracker.c stands in for it and counts, and
knows nothing of torch. Left out are convolutions and LSTMs: oneDNN takes its scratch from there too
(18 KiB of 85 for a small convolution), past torch's allocator, and no torch tool sees that.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.skipif(
        sys.platform != "linux" or platform.machine() != "x86_64" or not shutil.which("cc"),
        reason="needs a C compiler, and torch's allocator to be glibc's",
    ),
]


def test_a_profiled_peak_is_the_unprofiled_one_and_the_measured_one(tmp_path: Path) -> None:
    library = tmp_path / "tracker.so"
    source = HERE / "malloc_tracker.c"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O2", "-o", library, source, "-lpthread"], check=True
    )
    done = subprocess.run(
        [sys.executable, HERE / "peaks_unprofiled.py"],
        # The team of threads that OpenMP sets up takes its memory from there, too.
        env={**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    peaks = json.loads(done.stdout)
    assert len(peaks) >= 25
    for program, peak in peaks.items():
        assert peak["measured"] == peak["alone"] > 4096, program
        # The profiler's own tables are aligned like tensors now and then.
        assert 0 <= peak["profiled"] - peak["alone"] <= 1024, program
        assert not peak["unknown"], program
        assert not peak["unexplained"], program
        assert not peak["blind_spots"], program
