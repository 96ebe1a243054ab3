"""The environment that a number depends on beside the code."""

from __future__ import annotations

import os
import sys

from pytest_torchmem.store.provenance import environment_rank
from pytest_torchmem.values.measured import Rank


def allocator_settings() -> str:
    """The allocator settings that torch would find in the environment of this process."""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


def current_rank() -> Rank:
    """Return this process's rank in torch's process group, else what its launcher says."""
    if "torch" in sys.modules:
        from pytest_torchmem.record.torch_api.distributed import group_rank

        if found := group_rank():
            return Rank(*found)
    return environment_rank()


def environment(device: str) -> dict[str, str]:
    """Return the environment that a number depends on; see `record.devices.environment`.

    In a job of several ranks it depends on the rank: the last stage of a pipeline grows alone.
    """
    from pytest_torchmem.record import devices

    return {**devices.environment(device), **current_rank().environment}


def device_names(device: str) -> tuple[str, str]:
    """Return what a device is called in limits by device: its model, and its kind."""
    return environment(device)["device"], device.partition(":")[0]


def require_device_name(name: str) -> None:
    """Raise `DeviceNameError` for a name that no device has on any machine."""
    from pytest_torchmem.record.devices import named_device

    named_device(name)
