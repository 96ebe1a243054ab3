"""A job of many ranks of which one is run: the environment in which it finds the others."""

from __future__ import annotations

import contextlib
import re
import tempfile
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

from pytest_torchmem.simulate.gpus import Gpu
from pytest_torchmem.simulate.torch_builds import cache_folder, cache_written
from pytest_torchmem.values.errors import SimulationError

_MOST_RANKS: Final = 1_000_000
# torch calls the entry points of this group when it is imported, and so nothing of the program is
# changed: https://docs.pytorch.org/tutorials/unstable/python_extension_autoload.html
_ENTRY_POINT: Final = "[torch.backends]\ntorchmem = pytest_torchmem.record.mirrored_ranks:join\n"
_METADATA: Final = "Metadata-Version: 2.1\nName: torchmem-mirrored-ranks\nVersion: 1\n"


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


@cache_written()
def entry_point_folder() -> Path:
    """Return a folder for the import path; with it torch lets the rank join when it is loaded."""
    key = sha256((_METADATA + _ENTRY_POINT).encode()).hexdigest()[:12]
    folder = cache_folder() / f"world-{key}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            package = Path(made) / folder.name / "torchmem_mirrored_ranks-1.dist-info"
            package.mkdir(parents=True)
            (package / "METADATA").write_text(_METADATA)
            (package / "entry_points.txt").write_text(_ENTRY_POINT)
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
        raise SimulationError(f"rank {rank} of how many? The size of the world is not said")
    return World(int(size), int(rank or 0)) if size else None
