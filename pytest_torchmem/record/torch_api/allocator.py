"""A device's allocator: its counters, its history, its workspaces; for CUDA and others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from pytest_torchmem.record.torch_api import ALL_RELEASES, Checked
from pytest_torchmem.values.results import ReservedSegment

CHECKED: Final[Checked] = {
    "torch._C._cuda_clearCublasWorkspaces": ALL_RELEASES,
    "torch.cuda._lazy_call": ("2.13.0", "2.13.0"),
    "torch.cuda.memory._dump_snapshot": ("2.13.0", "2.13.0"),
    "torch.cuda.memory._record_memory_history": ("2.13.0", "2.13.0"),
}


def when_cuda_begins(call: Callable[[], None]) -> None:
    """Call something when this process uses CUDA first, or now where it has done so."""
    torch.cuda._lazy_call(call)  # type: ignore[no-untyped-call]


def record_history() -> None:
    """Have CUDA's allocator write down what it is asked for, each time with a stack."""
    torch.cuda.memory._record_memory_history(stacks="all", max_entries=1_000_000)


def dump_history(path: str) -> None:
    torch.cuda.memory._dump_snapshot(path)  # type: ignore[no-untyped-call]


def accelerator_counts(device_type: str) -> bool:
    """Return whether ``torch.accelerator`` stands for this kind of device and counts its memory."""
    current = torch.accelerator.current_accelerator()
    return current is not None and current.type == device_type


def _memory_of(device: torch.device) -> Any:
    """The module of torch's that counts what is allocated on a device."""
    return torch.cuda if device.type == "cuda" else torch.accelerator


def memory_stats(device: torch.device) -> dict[str, int]:
    """Return the caching allocator's counters of bytes; keys as in ``torch.cuda.memory_stats``.

    That function makes 160 keys and sorts them, which a small test would feel.
    """
    if device.type != "cuda":
        return dict(_memory_of(device).memory_stats(device))
    counters: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(device)
    return {
        f"{name}.all.{what}": count
        for name, pools in counters.items()
        if name.endswith("bytes")
        for what, count in pools["all"].items()
    }


def reset_peak_memory_stats(device: torch.device) -> None:
    _memory_of(device).reset_peak_memory_stats(device)


def pinned_counters(device: torch.device) -> dict[str, int]:
    """Return how much of the host's pinned memory was ever asked for, how often, and is in use.

    What another stream may still read counts as in use until the next request; torch before 2.13
    never counts it as free (pytorch/pytorch#182404). {} for devices without such memory.
    """
    if device.type != "cuda":
        return {}
    counters: dict[str, Any] = torch.cuda.host_memory_stats_as_nested_dict()
    size_bytes, requests = counters.get("active_bytes", {}), counters.get("active_requests", {})
    return {
        "pinned": size_bytes.get("allocated", 0),
        "pinned_requests": requests.get("allocated", 0),
        "pinned_in_use": size_bytes.get("current", 0),
    }


def segments(name: str) -> list[ReservedSegment]:
    """Return what CUDA's allocator has reserved on a device; of others nothing is known."""
    device = torch.device(name)
    if device.type != "cuda":
        return []
    cuda: Any = torch.cuda
    return [
        ReservedSegment(
            segment["address"],
            segment["total_size"],
            tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0),
        )
        for segment in cuda.memory_snapshot()
        if segment["device"] == device.index
    ]


def synchronize_device(device: torch.device) -> None:
    _memory_of(device).synchronize(device)


def empty_cache() -> None:
    """Let the accelerator that is not CUDA give back what it keeps and nobody uses."""
    accelerator: Any = torch.accelerator
    accelerator.empty_cache()


def accelerator_name(device: torch.device) -> str:
    """Return the name of an accelerator's model; its kind where the model has none."""
    module: Any = getattr(torch, device.type, None)
    name: Callable[[torch.device], str] | None = getattr(module, "get_device_name", None)
    return str(name(device)) if name else device.type


def allocator_backend(device: torch.device) -> str:
    """``native`` or the name of another CUDA allocator; ``""`` for devices that have no choice."""
    return str(torch.cuda.get_allocator_backend()) if device.type == "cuda" else ""


def cuda_clear_cublas_workspaces() -> None:
    clear: Callable[[], None] | None = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


def cublas_workspace_bytes() -> list[int]:
    """Sizes of a workspace of cuBLAS and of cuBLASLt, as torch has them; none before torch says."""
    blas: Any = torch.backends.cuda
    if not hasattr(blas, "cublas_workspace_size"):
        return []
    return [blas.cublas_workspace_size(), blas.cublaslt_workspace_size()]
