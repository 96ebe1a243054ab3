"""The environment of a process that is to see a simulated GPU, or to be a rank of a job alone."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

from pytest_torchmem.simulate import GPU_VARIABLE, RELEASES_VARIABLE, torch_builds
from pytest_torchmem.simulate.build import FOR_LINKERS
from pytest_torchmem.simulate.gpus import Gpu, parse_gpu
from pytest_torchmem.simulate.torch_builds import CHECKED, MACHINES, TorchBuild
from pytest_torchmem.values.errors import SimulationError

_MOST_RANKS: Final = 1_000_000
# torch calls the entry points of this group when it is imported, and so nothing of the program is
# changed: https://docs.pytorch.org/tutorials/unstable/python_extension_autoload.html
_ENTRY_POINT: Final = "[torch.backends]\ntorchmem = pytest_torchmem.record.{}\n"
_METADATA: Final = "Metadata-Version: 2.1\nName: torchmem-with-torch\nVersion: 1\n"
_JOIN: Final = "mirrored_ranks:join"


@dataclass(frozen=True, slots=True)
class World:
    """The ranks of a job, and which of them this process is.

    Raises `SimulationError` for a rank that the job does not have.
    """

    size: int
    rank: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.size <= _MOST_RANKS:
            raise SimulationError(f"a world of {self.size} ranks is not one of 1 to {_MOST_RANKS}")
        if not 0 <= self.rank < self.size:
            raise SimulationError(
                f"a world of {self.size} ranks has no rank {self.rank}; they count from 0"
            )

    def variables(self, gpu: Gpu) -> dict[str, str]:
        """Return what ``torchrun`` would put into the environment of this rank.

        ``gpu.count`` is the number of ranks on a machine.
        """
        on_machine = min(gpu.count, self.size)
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.rank % on_machine),
            "LOCAL_WORLD_SIZE": str(on_machine),
            "GROUP_RANK": str(self.rank // on_machine),
            "GROUP_WORLD_SIZE": str(-(-self.size // on_machine)),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "29500",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
            "SIMULATED_CUDA_ALONE": "1",
            # Nobody waits for other ranks. A thread of torch that asks the store whether one of
            # them timed out would call Python after its end.
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        }


@torch_builds.cache_written()
def entry_point_folder(function: str) -> Path:
    """Return a folder for the import path; with it torch calls a function when it is loaded.

    The function is one of ``record``: ``mirrored_ranks:join``.
    """
    entry_point = _ENTRY_POINT.format(function)
    key = sha256((_METADATA + entry_point).encode()).hexdigest()[:12]
    folder = torch_builds.cache_folder() / f"with-torch-{key}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            package = Path(made) / folder.name / "torchmem_with_torch-1.dist-info"
            package.mkdir(parents=True)
            (package / "METADATA").write_text(_METADATA)
            (package / "entry_points.txt").write_text(entry_point)
            with contextlib.suppress(OSError):  # another process was first
                package.parent.rename(folder)
    return folder


def parse_world(size: str, rank: str = "") -> World | None:
    """Return the world that two texts mean, as a user wrote them; None for two empty ones.

    Raises `SimulationError`.
    """
    for name, text in (("world", size), ("rank", rank)):
        if text and not re.fullmatch(r"\d{1,9}", text):
            raise SimulationError(f"{name} {text!r} is not a number")
    if rank and not size:
        raise SimulationError(f"rank {rank} of how many? Give the size of the world, too")
    return World(int(size), int(rank or 0)) if size else None


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
    folders = [str(built.site), *([str(entry_point_folder(_JOIN))] if world else [])]
    compiled = torch_builds.cache_folder() / "compiled" / built.version
    for_linkers = os.pathsep.join([str(built.runtime / FOR_LINKERS), str(built.runtime)])
    return {
        GPU_VARIABLE: text,
        RELEASES_VARIABLE: built.releases,
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
        # A CUDA extension is linked with libraries that a toolkit may lack, or that nobody has.
        "LIBRARY_PATH": _first(for_linkers, environment.get("LIBRARY_PATH", "")),
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
    releases = ", ".join(CHECKED)
    return f"the simulated GPU was not checked with torch {built.version}, but with {releases}"
