"""Rows that say who holds a storage, in the making."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Final, ParamSpec, TypeVar

import torch

from pytest_torchmem.contexts import gc_paused
from pytest_torchmem.record.owners.places import places_of, storages_of, values_of
from pytest_torchmem.record.patches.python_tracing import TracingPause
from pytest_torchmem.record.torch_api import dispatcher
from pytest_torchmem.record.torch_api.dynamo import set_frame_callback
from pytest_torchmem.record.tree.tables import Rows, StringTable
from pytest_torchmem.values.trace import MODULE_EDGE, OWNER, Ownership

_P = ParamSpec("_P")
_R = TypeVar("_R")
# Notes of a storage that say how large it is.
_WITH_BYTES: Final = (Ownership.LIVE, Ownership.SURVIVOR)
_GRADIENTS: Final = (Ownership.GRADIENT, Ownership.RETURNED)


@dataclass(slots=True)
class OwnershipLog:
    """Rows of `trace.OWNER` and `trace.MODULE_EDGE` in the making."""

    strings: StringTable
    devices: StringTable
    owners: Rows = field(default_factory=partial(Rows, OWNER))
    edges: Rows = field(default_factory=partial(Rows, MODULE_EDGE))

    def owner(
        self, mark: int, kind: Ownership, tensor: object, module: int = 0, name: str = ""
    ) -> None:
        """Note that ``tensor``'s storage is held as ``kind``; one without storage is skipped.

        Bytes are noted for LIVE, the mark at which a storage is met first, and for SURVIVOR.
        """
        number, name_number = self.devices.number, self.strings.number(name)
        if kind in _WITH_BYTES:
            for device, ptr, size_bytes in storages_of(tensor):
                self.owners.append(
                    (mark, kind, number(device), ptr, size_bytes, module, name_number)
                )
            return
        if kind in _GRADIENTS and type(tensor) is torch.Tensor and tensor.is_sparse:
            # The indices of an embedding's sparse gradient are the input that was looked up.
            tensor = values_of(tensor)
        for device, ptr in places_of(tensor):
            self.owners.append((mark, kind, number(device), ptr, 0, module, name_number))

    def edge(self, mark: int, child: object, parent: object | None, name: str) -> None:
        number = self.strings.number
        parent_id = 0 if parent is None else id(parent)
        self.edges.append((mark, id(child), parent_id, number(name), number(type(child).__name__)))


def quiet(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Hide what a method does from the body's function modes, from the collector and the recording.

    The collector runs after so many new objects: with those of the method it would run earlier than
    it does without us. And the recording of the method's calls takes longer than the calls. Dynamo
    traces none of them.
    """

    @wraps(method)
    def quietly(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        tracing = TracingPause()
        traced_by = set_frame_callback(None)
        tracing.suspend()
        try:
            with gc_paused(), dispatcher.unseen_by_modes():
                return method(*args, **kwargs)
        finally:
            tracing.resume()
            set_frame_callback(traced_by)

    return quietly
