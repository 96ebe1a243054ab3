"""A tensor's memory: who owns the object, which storage is whose, what a wrapper is made of."""

from __future__ import annotations

from typing import Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pytest_torchmem.record.torch_api import ALL_RELEASES, Checked, dispatcher
from pytest_torchmem.values.errors import is_of_a_signal

CHECKED: Final[Checked] = {
    "torch._subclasses.fake_tensor.FakeTensor": ALL_RELEASES,
    "torch.Tensor._indices": ALL_RELEASES,
    "torch.Tensor._values": ALL_RELEASES,
    "torch.UntypedStorage._cdata": ALL_RELEASES,
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass": ALL_RELEASES,
}

#: Gives a storage another size, and so another place.
RESIZE_STORAGE: Final = "torch.UntypedStorage.resize_"

# The public accessors of the first refuse a tensor with duplicate indices, as most gradients are.
_SPARSE: Final[dict[torch.layout, tuple[str, ...]]] = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


#: What holds memory and may be asked of the collector.
HOLDING: Final[tuple[type[torch.Tensor] | type[torch.UntypedStorage], ...]] = (
    torch.Tensor,
    torch.UntypedStorage,
)


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of a storage while it lives: the address of its C++ object."""
    return address_of(tensor.untyped_storage())


def address_of(storage: torch.UntypedStorage) -> int:
    """The address of a storage's C++ object."""
    return int(storage._cdata)


def sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The indices and values that a sparse tensor is made of; empty for any other."""
    if tensor.layout not in _SPARSE:
        return []
    # These are operators: a dispatch mode of the user's would see them.
    with dispatcher.undispatched():
        return [getattr(tensor, part)() for part in _SPARSE[tensor.layout]]


def flattened(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a wrapper subclass says it is made of; none where it does not say."""
    if not is_traceable_wrapper_subclass(tensor):
        return []
    try:
        names, _ = tensor.__tensor_flatten__()
        return [getattr(tensor, name) for name in names]
    except Exception as error:
        if is_of_a_signal(error):
            raise
        return []


def has_memory(tensor: torch.Tensor) -> bool:
    """False for a stand-in: asking one for its data warns on some releases, raises on others."""
    return tensor.device.type != "meta" and not isinstance(tensor, FakeTensor)
