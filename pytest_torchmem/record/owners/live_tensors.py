"""Tensors, storages, modules and optimizers that are alive in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import wraps
from typing import TypeVar

import torch

from pytest_torchmem.record.owners.live_objects import Census, instances_of, is_a
from pytest_torchmem.record.patches import Installed
from pytest_torchmem.record.torch_api import dispatcher, memory

_T = TypeVar("_T")


def _gradients(found: list[object]) -> list[object]:
    """Return what is in a ``.grad``, which may have no Python object until we ask."""
    with dispatcher.unseen_by_modes():
        leaves = [tensor for tensor in _tensors(found) if tensor.is_leaf]
        return [leaf.grad for leaf in leaves if leaf.grad is not None]


# One for the process: what was found in one test is known in the next.
_CENSUS = Census(
    *memory.HOLDING,
    torch.nn.Module,
    torch.optim.Optimizer,
    released=torch.Tensor,
    beside=_gradients,
)


@dataclass(frozen=True, slots=True)
class Live:
    """All that is alive and has a Python object; a storage gets one when somebody asks for it."""

    tensors: list[torch.Tensor]
    storages: list[torch.UntypedStorage]
    modules: list[torch.nn.Module]
    optimizers: list[torch.optim.Optimizer]


def find_live() -> Live:
    """Return everything of torch's that is alive."""
    found = _CENSUS.find()
    return Live(
        tensors=_tensors(found),
        storages=_of(torch.UntypedStorage, found),
        modules=_of(torch.nn.Module, found),
        optimizers=_of(torch.optim.Optimizer, found),
    )


def find_holding() -> list[torch.Tensor | torch.UntypedStorage]:
    """Return every tensor and then every storage, looking at all objects there are."""
    found = instances_of(memory.HOLDING)
    return [*_tensors(found), *_of(torch.UntypedStorage, found)]


def _tensors(found: Sequence[object]) -> list[torch.Tensor]:
    tensors = _of(torch.Tensor, found)
    for tensor in tensors:
        memory.hold(tensor)
    return tensors


def _of(kind: type[_T], found: Sequence[object]) -> list[_T]:
    return [thing for thing in found if is_a(thing, kind)]


def settle_collector(*, collect: bool) -> None:
    """Leave Python's collector as after a collection, and the next look a short one.

    ``collect`` is whether garbage has to go. A collection takes 0.1 to 0.2 s where much is
    imported.
    """
    _CENSUS.settle(collect=collect)


def forget() -> None:
    """Drop all weak references to what is alive."""
    _CENSUS.forget()


def let_go() -> None:
    """Drop all weak references to tensors, which nobody can swap as long as there are any."""
    _CENSUS.let_go()


class SwapWatch:
    """Lets ``torch.utils.swap_tensors`` swap while a body is recorded, as it would without us.

    It refuses tensors that anybody refers to weakly. We do, to know what is alive, and the profiler
    does, to each tensor that an operator has read. Converting a module of tensor subclasses
    (quantised, distributed) swaps its tensors. So each swap interrupts the recording:
    ``interrupted()`` is to return a context without a profiler.
    """

    def __init__(self, interrupted: Callable[[], AbstractContextManager[object]]) -> None:
        self._interrupted = interrupted

    def install(self, patches: Installed) -> None:
        # What is known to be alive is known by weak references.
        patches.finally_do(let_go)
        patches.replace("torch.utils.swap_tensors", self._interrupting)

    def _interrupting(
        self, swap: Callable[[torch.Tensor, torch.Tensor], None]
    ) -> Callable[[torch.Tensor, torch.Tensor], None]:
        @wraps(swap)
        def watched(one: torch.Tensor, other: torch.Tensor) -> None:
            with self._interrupted():
                forget()
                swap(one, other)

        return watched
