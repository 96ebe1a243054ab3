"""Where a tensor's memory is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from pytest_torchmem.record import torch_api
from pytest_torchmem.record.kineto import device_name

# Of these, and of no class derived from them, it is known at once what they are made of.
_ORDINARY = frozenset({torch.Tensor, torch.nn.Parameter})


def places_of(tensor: object) -> Iterable[tuple[str, int]]:
    """Device and pointer of the storages that hold ``tensor``; none for one without data.

    Asks the tensor and never its storage. A storage that has been seen from Python has one owner
    more, and autograd, which adds gradients up in place only if nobody else owns them, would
    allocate where it does not when nobody looks.
    """
    # Asked some thousand times while a body runs, nearly always of an ordinary tensor.
    if type(tensor) in _ORDINARY and _has_storage(tensor):
        return _place_of(tensor)
    return [place for part in plain_tensors(tensor) for place in _place_of(part)]


def _has_storage(tensor: torch.Tensor) -> bool:
    """Whether an ordinary tensor has a storage of its own."""
    return (
        tensor.layout is torch.strided
        and not tensor.is_meta
        and not torch_api.is_functorch_wrapper(tensor)
    )


def _place_of(part: torch.Tensor) -> tuple[tuple[str, int], ...]:
    ptr = _data_ptr(part)
    if not ptr:
        return ()
    return ((device_name(part.device), ptr - part.storage_offset() * part.element_size()),)


def _data_ptr(holder: torch.Tensor | torch.UntypedStorage) -> int:
    try:
        return int(holder.data_ptr())
    except (RuntimeError, NotImplementedError):
        # Opaque tensors, and others that a compiler traces with, have no data to point at.
        return 0


def storages_of(holder: object) -> Iterator[tuple[str, int, int]]:
    """Device, pointer and bytes of the storages of a tensor, see `places_of`, or of a storage."""
    if isinstance(holder, torch.UntypedStorage):
        # One that a compiler traces with is on the device "meta", whatever its tensor says.
        if holder.device.type != "meta" and (ptr := _data_ptr(holder)):
            yield device_name(holder.device), ptr, holder.nbytes()
        return
    for part in plain_tensors(holder):
        for device, ptr in places_of(part):
            yield device, ptr, part.untyped_storage().nbytes()


def plain_tensors(tensor: object) -> Iterator[torch.Tensor]:
    """The tensors with a storage of their own that ``tensor`` is made of."""
    if not isinstance(tensor, torch.Tensor):
        # None, where backward gives no gradient, or an edge of a graph in a tensor's place.
        return
    tensor = torch_api.unwrap_functorch(tensor)
    if not torch_api.has_memory(tensor):
        return
    if parts := torch_api.inner_tensors(tensor):
        for part in parts:
            yield from plain_tensors(part)
    else:
        yield tensor
