"""The environment that a number depends on beside the code: device, releases, settings, rank."""

from __future__ import annotations

import os
import platform
import sys
import sysconfig
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Final, TypeAlias

import torch
import torch.distributed as dist

from pytest_torchmem.record.torch_api import allocator
from pytest_torchmem.values.measured import Rank

#: The ranks that take part; a process alone has none.
ProcessGroup: TypeAlias = "dist.ProcessGroup"


def environment(device_name: str) -> dict[str, str]:
    """Return all that a baseline depends on beside the code; see `values.baseline`.

    In a job of several ranks it depends on the rank: the last stage of a pipeline grows alone. A
    setting counts when it changes what is allocated. CPU models do not: oneDNN's scratch differs by
    about 1 % between AVX2 and AVX-512, no more than with the number of threads; without oneDNN, as
    on an Apple machine, a convolution needs half as much again.
    """
    return {**_environment(torch.device(device_name)), **current_rank().environment}


def _environment(device: torch.device) -> dict[str, str]:
    version = ".".join(torch.__version__.split(".")[:2])
    if device.type != "cuda":
        is_cpu = device.type == "cpu"
        return {
            "device": "cpu" if is_cpu else allocator.accelerator_name(device),
            "capability": _architecture() if is_cpu else "",
            "torch": version,
            "runtime": "",
            "allocator": "" if is_cpu else _allocator_settings("PYTORCH_ALLOC_CONF"),
            "libraries": _settings(_CPU_LIBRARIES) if is_cpu else "",
        }
    if not torch.cuda.is_available():  # a result from another machine, or of a simulated GPU
        return {"device": str(device), "capability": "", "torch": version}
    properties = torch.cuda.get_device_properties(device)
    hip: str | None = torch.version.hip
    return {
        "device": properties.name,
        "capability": str(getattr(properties, "gcnArchName", "")).partition(":")[0]
        if hip
        else f"sm{properties.major}{properties.minor}",
        "torch": version,
        "runtime": f"rocm{_major(hip)}" if hip else f"cuda{_major(torch.version.cuda or '')}",
        "allocator": _allocator_settings(*_CUDA_SETTINGS),
        "libraries": _settings(_GPU_LIBRARIES),
        **({"cudnn": cudnn_release()} if properties.name.startswith("simulated ") else {}),
    }


def cudnn_release() -> str:
    """Return the release of cuDNN, which plans convolutions: ``9.20``; ``""`` without it."""
    version: Callable[[], int | None] = torch.backends.cudnn.version
    number = version() or 0
    return f"{number // 10_000}.{number // 100 % 100}" if number else ""


# What oneDNN may use, and whether torch uses it, decides how wide its layouts and scratch are.
_CPU_LIBRARIES: Final = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
# The sizes of workspaces and whether they stay, and without the caching allocator no rounding.
_GPU_LIBRARIES: Final = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "HIPBLASLT_WORKSPACE_SIZE",
    "TORCH_CUBLAS_WORKSPACE_CACHE",
    "TORCH_CUBLASLT_UNIFIED_WORKSPACE",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "PYTORCH_NO_HIP_MEMORY_CACHING",
)
_CUDA_SETTINGS: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def _architecture() -> str:
    machine = platform.machine().lower()
    usual = ("x86_64", "amd64", "x64", "i386", "i686", "")
    return "" if machine in usual else {"aarch64": "arm64"}.get(machine, machine)


def _major(version: str) -> str:
    return version.partition(".")[0]


def _settings(names: tuple[str, ...]) -> str:
    return ",".join(f"{name}={os.environ[name]}" for name in names if os.environ.get(name))


def _allocator_settings(*names: str) -> str:
    settings = {part for n in names for part in os.environ.get(n, "").split(",") if part}
    return ",".join(sorted(settings))


def device_names(device: str) -> tuple[str, str]:
    """Return what a device is called in limits by device: its model, and its kind."""
    return environment(device)["device"], device.partition(":")[0]


def allocator_settings() -> str:
    """The allocator settings that torch would find in the environment of this process."""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


def current_rank() -> Rank:
    """Return this process's rank in torch's process group, else what its launcher says."""
    rank = group_rank()
    return Rank(*rank) if rank else Rank.launched()


def group_rank(group: ProcessGroup | None = None) -> tuple[int, int] | None:
    """Return this process's rank in a group and the group's size; None without a group."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.get_rank(group), dist.get_world_size(group)


def library_paths() -> list[str]:
    """Folders whose frames are not the user's: installed packages, the standard library, ours."""
    return list(_libraries(tuple(sys.path)))


@lru_cache(maxsize=4)
def _libraries(searched: tuple[str, ...]) -> list[str]:
    paths = sysconfig.get_paths()
    folders = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders.add(str(Path(__file__).resolve().parents[1]))
    # Packages lie outside of a virtual environment, too, where it sees those of the system.
    folders.update(e for e in searched if Path(e).name in ("site-packages", "dist-packages"))
    # torch may lie elsewhere, built from source, or its folder be one of links to where it lies.
    folders.add(str(Path(torch.__file__).parent))
    folders.add(str(Path(torch.nn.__file__).resolve().parents[1]))
    # A link may lead there, and the paths of frames are resolved.
    return sorted(folders | {str(Path(folder).resolve()) for folder in folders})
