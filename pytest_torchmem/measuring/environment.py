"""The environment that a number depends on beside the code, with the rank of this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pytest_torchmem.values.measured import Rank

PLACE: Final = "{rank}"
"""What stands for the rank's number in the name of a file."""


def environment_rank(environment: Mapping[str, str] = os.environ) -> Rank:
    """Return what a launcher such as ``torchrun`` says; rank 0 of 1 where none does."""
    number, count = environment.get("RANK", ""), environment.get("WORLD_SIZE", "")
    if number.isdecimal() and count.isdecimal() and int(number) < int(count):
        return Rank(int(number), int(count))
    return Rank()


def current_rank() -> Rank:
    """Return this process's rank in torch's process group, else what its launcher says."""
    if "torch" in sys.modules:
        from pytest_torchmem.record.process_group import group_rank

        if found := group_rank():
            return Rank(*found)
    return environment_rank()


def path_of_rank(path: str | os.PathLike[str], rank: Rank) -> Path:
    """Return the path for one rank: with its number for ``{rank}``, or at the name's end.

    Where there is one rank only, a path without ``{rank}`` stays as it is.
    """
    text = os.fspath(path)
    if PLACE in text:
        return Path(text.replace(PLACE, str(rank.number)))
    plain = Path(text)
    return plain if rank.count == 1 else plain.with_stem(f"{plain.stem}-rank{rank.number}")


def allocator_settings() -> str:
    """The allocator settings that torch would find in the environment of this process."""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


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
