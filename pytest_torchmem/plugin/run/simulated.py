"""Start pytest again where it finds a simulated GPU: a torch that is loaded cannot get one."""

from __future__ import annotations

import os
import sys

import pytest

from pytest_torchmem.plugin.options.option_table import simulation_asked, world_asked
from pytest_torchmem.simulate.gaps import simulated_here
from pytest_torchmem.simulate.gpus import parse_gpu
from pytest_torchmem.simulate.process import notice, variables
from pytest_torchmem.simulate.torch_builds import torch_build
from pytest_torchmem.simulate.world import parse_world
from pytest_torchmem.values.errors import SimulationError


def start_again(config: pytest.Config) -> None:
    """Become the same pytest with a simulated GPU; return at once where this is that one.

    The process stays what it is, with its id, terminal and arguments, so signals, exit codes and
    the debugger are pytest's own. xdist's workers inherit the environment. Raises
    `pytest.UsageError` for a GPU that cannot be simulated.
    """
    asked = simulation_asked(config)
    if simulated_here() == asked:
        return
    if list(config.invocation_params.args) != sys.argv[1:]:
        raise pytest.UsageError(
            "--torchmem-simulate starts pytest again, and this run was started by a program with "
            f"arguments of its own; start that with `torchmem simulate --gpu {asked} -- COMMAND` "
            "[not-simulated]"
        )
    try:
        parse_gpu(asked)
        world = parse_world(world_asked(config))
        built = torch_build()
        added = variables(asked, built, world)
    except SimulationError as error:
        raise pytest.UsageError(f"--torchmem-simulate={asked}: {error}") from None
    if said := notice(built):
        print(f"torchmem: {said}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **added})
