"""Nested values, and the sizes of the fake tensors that tracing leaves on the nodes of a graph."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils import _pytree

from pytest_torchmem.record.torch_api import ALL_RELEASES, Checked

CHECKED: Final[Checked] = {
    "torch.utils._pytree.tree_leaves": ALL_RELEASES,
    "torch.utils._pytree.tree_map": ("2.13.0", "2.13.0"),
}

# torch's own guess for a size that no input determines (its ``unbacked_symint_fallback``).
_UNBACKED_HINT = 8192


def leaves(tree: object) -> list[object]:
    """The leaves of nested lists, tuples, dicts and registered containers."""
    return _pytree.tree_leaves(tree)


def map_leaves(function: Callable[[object], object], tree: Any) -> Any:
    """The same nesting with ``function`` applied to every leaf."""
    return _pytree.tree_map(function, tree)


def size_hint(size: int | torch.SymInt) -> int:
    """A size as a number: the hint of a symbolic one."""
    if isinstance(size, int):
        return size
    # It imports sympy, which measuring does without.
    shapes: Any = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    if hasattr(shapes, "optimization_hint"):
        return int(shapes.optimization_hint(size))
    return int(shapes.hint_int(size, fallback=_UNBACKED_HINT))
