"""What of torch's is alive in this process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pytest_torchmem.record import torch_api
from pytest_torchmem.record.live_objects import Census, instances_of

_KINDS = (torch.Tensor, torch.UntypedStorage, torch.nn.Module, torch.optim.Optimizer)
# One for the process: what was found in one test is known in the next.
_CENSUS = Census(*_KINDS)


@dataclass(frozen=True, slots=True)
class Live:
    """What is alive and has a Python object; a storage has one if somebody asked for it."""

    tensors: list[torch.Tensor]
    storages: list[torch.UntypedStorage]
    modules: list[torch.nn.Module]
    optimizers: list[torch.optim.Optimizer]


def find_live() -> Live:
    """Return everything of torch's that is alive."""
    found = _held(_CENSUS.find())
    return Live(*([o for o in found if issubclass(type(o), kind)] for kind in _KINDS))


def instances(*classes: type[Any]) -> list[Any]:
    """Return every living object of one of torch's classes, looking at all objects there are."""
    return _held(instances_of(classes))


def _held(found: list[Any]) -> list[Any]:
    for thing in found:
        torch_api.hold(thing)
    return found


def collect_garbage() -> None:
    """Collect all garbage, in a way that makes the next look at what is alive a short one."""
    _CENSUS.collect()


def forget() -> None:
    """Drop all weak references to what is alive."""
    _CENSUS.forget()
