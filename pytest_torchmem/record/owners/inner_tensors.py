"""The tensors that a tensor is made of: one that is sparse, or a wrapper around others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from types import MemberDescriptorType
from typing import Final

import torch

from pytest_torchmem.record.owners.autograd_graph import tensors_in
from pytest_torchmem.record.torch_api import memory

#: Of these classes, and not of those derived from them, it is known what a tensor is made of.
ORDINARY: Final = (torch.Tensor, torch.nn.Parameter)
#: What an opaque tensor raises, or another that a compiler traces with, when it is asked for data.
NO_DATA: Final = (RuntimeError, NotImplementedError)


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


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or the values of a sparse one."""
    return inner_tensors(tensor)[1] if tensor.layout is torch.sparse_coo else tensor


def _in_attributes(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors in a tensor's attributes and slots; asks no property."""
    yield from tensors_in(vars(tensor))
    for kind in type(tensor).__mro__:
        for slot in vars(kind).values():
            if isinstance(slot, MemberDescriptorType):
                with suppress(AttributeError):  # not set
                    yield from tensors_in(slot.__get__(tensor))
