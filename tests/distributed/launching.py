"""Starting jobs of two ranks, whoever runs the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
import torch

TORCHRUN: Final = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

#: Where it can be seen when gloo's threads are at rest.
SEES_THREADS: Final = sys.platform == "linux"

needs_gloo = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="this torch has no gloo",
)


def run(
    *command: str | Path, folder: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python in ``folder``, as a job of its own."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    quiet = {"OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": "-p no:cacheprovider"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**inherited, **quiet, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
