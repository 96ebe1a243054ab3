"""The environment of a process that is to see a simulated GPU."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping

from pytest_torchmem.simulate import GPU_VARIABLE
from pytest_torchmem.simulate.gpus import parse_gpu
from pytest_torchmem.simulate.torch_builds import CHECKED, MACHINES, TorchBuild, cache_folder
from pytest_torchmem.simulate.world import World, entry_point_folder


def variables(
    text: str,
    built: TorchBuild,
    world: World | None = None,
    environment: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Return the variables with which a process, and each that it starts, sees a GPU.

    ``text`` names the GPU as a user wrote it. In a ``world`` the process is one rank of a job whose
    other ranks are not run. Raises `SimulationError`.
    """
    gpu = parse_gpu(text)
    folders = [str(built.site), *([str(entry_point_folder())] if world else [])]
    compiled = cache_folder() / "compiled" / built.version
    return {
        GPU_VARIABLE: text,
        # `runtime/devices.cpp` reads these.
        "SIMULATED_CUDA_NAME": gpu.shown,
        "SIMULATED_CUDA_BYTES": str(gpu.memory_bytes),
        "SIMULATED_CUDA_CAPABILITY": "{}{}".format(*gpu.capability),
        "SIMULATED_CUDA_PROCESSORS": str(gpu.processors),
        "SIMULATED_CUDA_CACHE": str(gpu.cache_bytes),
        "SIMULATED_CUDA_DEVICES": str(gpu.count),
        **({"SIMULATED_CUDA_CUDNN": str(built.cudnn)} if built.cudnn else {}),
        **(world.variables(gpu) if world else {}),
        "PYTHONPATH": _first(os.pathsep.join(folders), environment.get("PYTHONPATH", "")),
        "LD_LIBRARY_PATH": _first(str(built.runtime), environment.get("LD_LIBRARY_PATH", "")),
        # Code that was compiled for a simulated GPU must not get into the caches of a real one.
        "USE_PYTORCH_KERNEL_CACHE": "0",
        "TRITON_CACHE_DIR": str(compiled / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(compiled / "inductor"),
        "TRITON_LIBCUDA_PATH": str(built.runtime),
        "CUDA_CACHE_DISABLE": "1",
        # A value that is there hides the GPUs of a real machine.
        "CUDA_VISIBLE_DEVICES": ",".join(str(number) for number in range(gpu.count)),
    }


def _first(entry: str, path: str) -> str:
    return os.pathsep.join([entry, path] if path else [entry])


def notice(built: TorchBuild) -> str:
    """Return a sentence if this machine or release of torch was not checked, or ``""``."""
    if (machine := platform.machine()) != MACHINES[0]:
        return f"the simulated GPU is built for {machine}, and was run on {MACHINES[0]} only"
    if built.version.rpartition(".")[0] in CHECKED:
        return ""
    known = ", ".join(CHECKED)
    return f"the simulated GPU was not checked with torch {built.version}, but with {known}"
