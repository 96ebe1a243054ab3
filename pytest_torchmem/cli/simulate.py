"""Run a command where torch finds a simulated GPU."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from pytest_torchmem.simulate.gpus import parse_gpu
from pytest_torchmem.simulate.process import notice, variables
from pytest_torchmem.simulate.torch_builds import fetch, torch_build
from pytest_torchmem.simulate.world import World
from pytest_torchmem.values.errors import SimulationError


def fetched(version: str, patience_s: float) -> str:
    """Fetch torch's CUDA build, unless it is there, and return a line that says where it is."""
    built = fetch(version, patience_s)
    return f"torch {built.version} for CUDA {built.cuda} is ready: {built.site}"


def become(command: Sequence[str], gpu: str, version: str, world: World | None) -> None:
    """Become a command that sees a simulated GPU. Raises `SimulationError`, or does not return."""
    if not command:
        raise SimulationError("a command is needed: torchmem simulate --gpu H100 -- COMMAND")
    parse_gpu(gpu)
    built = torch_build(version)
    if said := notice(built):
        print(f"torchmem: {said}", file=sys.stderr)
    # The CUDA build was found for this Python, whether or not its environment is activated.
    here = str(Path(sys.executable).parent)
    path = os.pathsep.join([here, os.environ.get("PATH", os.defpath)])
    environment = {**os.environ, **variables(gpu, built, world), "PATH": path}
    program = shutil.which(command[0], path=path)
    if program is None:
        raise SimulationError(f"there is no command {command[0]!r}")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(program, list(command), environment)
