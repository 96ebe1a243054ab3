"""``torch.func``: its wrappers around tensors, and where its transforms begin and end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from pytest_torchmem.record.torch_api import Checked

CHECKED: Final[Checked] = {
    "torch._C._functorch.get_unwrapped": ("2.6.0", "2.15.0"),
    "torch._C._functorch.is_functorch_wrapped_tensor": ("2.6.0", "2.15.0"),
    "torch._C._functorch.peek_interpreter_stack": ("2.6.0", "2.15.0"),
    "torch._functorch.eager_transforms._func_decrement_nesting": ("2.6.0", "2.15.0"),
    "torch._functorch.eager_transforms._func_increment_nesting": ("2.6.0", "2.15.0"),
    "torch._functorch.eager_transforms._grad_decrement_nesting": ("2.6.0", "2.15.0"),
    "torch._functorch.eager_transforms._grad_increment_nesting": ("2.6.0", "2.15.0"),
    "torch._functorch.eager_transforms._jvp_decrement_nesting": ("2.6.0", "2.15.0"),
    "torch._functorch.eager_transforms._jvp_increment_nesting": ("2.6.0", "2.15.0"),
    "torch._functorch.vmap._vmap_decrement_nesting": ("2.6.0", "2.15.0"),
    "torch._functorch.vmap._vmap_increment_nesting": ("2.6.0", "2.15.0"),
}

#: Whether a tensor stands for another one within a ``torch.func`` transform.
is_wrapper: Callable[[Any], bool] = torch._C._functorch.is_functorch_wrapped_tensor


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor below the wrappers of ``torch.func`` transforms."""
    return levels_of(tensor)[-1]


def levels_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensor and what each wrapper of ``torch.func`` holds, down to the plain tensor.

    Each level of ``func.grad`` has a graph of its own.
    """
    levels = [tensor]
    while is_wrapper(levels[-1]):
        levels.append(torch._C._functorch.get_unwrapped(levels[-1]))
    return levels


_TRANSFORMS: Final = "torch._functorch.eager_transforms"
#: The functions that enter and leave each kind of transform. They are called by the names that they
#: were imported under.
NESTING: Final = (
    (f"{_TRANSFORMS}._grad_increment_nesting", f"{_TRANSFORMS}._grad_decrement_nesting"),
    (f"{_TRANSFORMS}._jvp_increment_nesting", f"{_TRANSFORMS}._jvp_decrement_nesting"),
    (f"{_TRANSFORMS}._func_increment_nesting", f"{_TRANSFORMS}._func_decrement_nesting"),
    (
        "torch._functorch.vmap._vmap_increment_nesting",
        "torch._functorch.vmap._vmap_decrement_nesting",
    ),
)


def within_transform() -> bool:
    """Return whether a ``torch.func`` transform is running on this thread."""
    return torch._C._functorch.peek_interpreter_stack() is not None
