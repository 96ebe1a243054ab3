"""The places of a tensor's memory: device and address of each storage.

A sparse tensor, or a wrapper around others, has the places of the tensors that it is made of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import MemberDescriptorType
from typing import Any, Final

import torch

from pytest_torchmem.record.devices import device_name
from pytest_torchmem.record.torch_api import autograd, memory

#: What an opaque tensor raises, or another that a compiler traces with, when it is asked for data.
NO_DATA: Final = (RuntimeError, NotImplementedError)

_STRIDED: Final = torch.strided

#: Of these classes, and not of those derived from them, it is known what a tensor is made of.
ORDINARY: Final = (torch.Tensor, torch.nn.Parameter)

# All that is ever read of a tensor without a call.
_READ: Final = (
    *("__dict__", "data_ptr", "device", "grad_fn", "is_leaf", "is_meta", "is_sparse", "itemsize"),
    *("layout", "storage_offset", "untyped_storage"),
)


def places_of(tensor: Any) -> Sequence[tuple[str, int]]:
    """Device and pointer of the storages that hold ``tensor``; none for one without data.

    Asks the tensor and never its storage. A storage that has been seen from Python has one owner
    more, and autograd, which adds gradients up in place only if nobody else owns them, would
    allocate where it does not when nobody looks.
    """
    # Asked some thousand times while a body runs, and each call in here is recorded, too.
    if type(tensor) not in ORDINARY or tensor.layout is not _STRIDED or autograd.is_wrapper(tensor):
        return [place for part in plain_tensors(tensor) for place in _place_of(part)]
    return () if tensor.is_meta else _place_of(tensor)


def _place_of(part: torch.Tensor) -> Sequence[tuple[str, int]]:
    try:
        ptr = part.data_ptr()
    except NO_DATA:
        return ()
    if not ptr:
        return ()
    return ((device_name(part.device), ptr - int(part.storage_offset()) * part.itemsize),)


def storages_of(holder: object) -> Iterator[tuple[str, int, int]]:
    """Device, pointer and bytes of the storages of a tensor, see `places_of`, or of a storage."""
    if isinstance(holder, torch.UntypedStorage):
        # One that a compiler traces with is on the device "meta", whatever its tensor says.
        if holder.device.type != "meta" and (ptr := data_ptr(holder)):
            yield device_name(holder.device), ptr, holder.nbytes()
        return
    for part in plain_tensors(holder):
        for device, ptr in places_of(part):
            yield device, ptr, part.untyped_storage().nbytes()


def plain_tensors(tensor: object, around: tuple[object, ...] = ()) -> Iterator[torch.Tensor]:
    """The tensors with a storage of their own that ``tensor`` is made of.

    ``around`` are wrappers that it was found in: one may well refer to another in a circle.
    """
    if not isinstance(tensor, torch.Tensor) or not answers(tensor):
        # None, where backward gives no gradient, or an edge of a graph in a tensor's place.
        return
    plain = autograd.unwrapped(tensor)
    if not memory.has_memory(plain):
        return
    if parts := inner_tensors(plain):
        for part in parts:
            if not any(part is wrapper for wrapper in (*around, plain)):
                yield from plain_tensors(part, (*around, plain))
    else:
        yield plain


def answers(tensor: torch.Tensor) -> bool:
    """False for a tensor whose class raises when it is asked what torch answers for any tensor."""
    if type(tensor) in ORDINARY:
        return True
    try:
        for name in _READ:
            getattr(tensor, name)
    except Exception:
        return False
    return True


def data_ptr(holder: torch.Tensor | torch.UntypedStorage) -> int:
    """Return the address of a tensor's or a storage's data; 0 if it has none."""
    try:
        return int(holder.data_ptr())
    except NO_DATA:
        return 0


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a sparse tensor or a wrapper (quantised, nested, masked) is made of.

    A wrapper that does not say what it is made of has no data of its own, and is made of the
    tensors in its attributes.
    """
    if parts := memory.sparse_parts(tensor):
        return parts
    if type(tensor) in ORDINARY:
        return []
    if parts := memory.flattened(tensor):
        return parts
    return [] if data_ptr(tensor) else [*_in_attributes(tensor)]


def tensors_within(value: object) -> list[torch.Tensor]:
    """Tensors in a value and in the tuples, lists and dicts it is made of."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = [*value.values()]
    if not isinstance(value, (tuple, list)):
        return []
    tensors = []
    for item in value:
        if type(item) is torch.Tensor:
            tensors.append(item)
        else:
            tensors += tensors_within(item)
    return tensors


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or the values of a sparse one."""
    return inner_tensors(tensor)[1] if tensor.layout is torch.sparse_coo else tensor


def _in_attributes(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors in a tensor's attributes and slots; asks no property."""
    yield from tensors_within(vars(tensor))
    for kind in type(tensor).__mro__:
        for slot in vars(kind).values():
            if isinstance(slot, MemberDescriptorType):
                with suppress(AttributeError):  # not set
                    yield from tensors_within(slot.__get__(tensor))
