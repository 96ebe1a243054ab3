"""Every private torch name that estimating uses, in one place; checked on torch 2.13.

Each line names what the public interface lacks. A name that a release may lack is looked up here,
so that the rest of the package sees one shape.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

# Fake tensors have no public home: torch.compile and torch.export use them, nobody documents them.
from torch._subclasses import fake_tensor as _fake_tensor
from torch.fx.experimental import symbolic_shapes as _symbolic_shapes
from torch.optim import optimizer as _optimizer
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

FakeTensor: Any = _fake_tensor.FakeTensor
FakeTensorMode: Any = _fake_tensor.FakeTensorMode
DispatchMode: Any = TorchDispatchMode

# What a fake run raises when the program asks for a value that only a real run has.
VALUE_ERRORS: tuple[type[Exception], ...] = (
    _fake_tensor.DataDependentOutputException,
    _fake_tensor.DynamicOutputShapeException,
    _symbolic_shapes.GuardOnDataDependentSymNode,
)
# What it raises for an operator that nobody taught what its output looks like.
OPERATOR_ERRORS: tuple[type[Exception], ...] = (
    _fake_tensor.UnsupportedFakeTensorException,
    _fake_tensor.UnsupportedOperatorException,
)

LOCAL_SCALAR: Any = torch.ops.aten._local_scalar_dense.default
# ``torch.tensor(data)`` ends in one of these: what comes out is new, although it aliases the input.
LIFTS: frozenset[Any] = frozenset(
    {torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default}
)

# torch's own guess for a size that no input determines (its ``unbacked_symint_fallback``).
_UNBACKED_HINT = 8192


def leaves(tree: Any) -> list[Any]:
    """The leaves of nested lists, tuples, dicts and registered containers."""
    found: list[Any] = _pytree.tree_leaves(tree)
    return found


def tensors_in(tree: Any) -> list[Any]:
    """The tensors among the leaves; of one that wraps others (a subclass), those it wraps."""
    found: list[Any] = []
    for leaf in leaves(tree):
        if isinstance(leaf, torch.Tensor):
            if is_traceable_wrapper_subclass(leaf):
                names, _ = leaf.__tensor_flatten__()
                found += tensors_in([getattr(leaf, name) for name in names])
            else:
                found.append(leaf)
    return found


def map_tensors(function: Any, tree: Any) -> Any:
    """The same nesting with ``function`` applied to every tensor."""
    return _pytree.tree_map_only(torch.Tensor, function, tree)


def storage_key(tensor: Any) -> int:
    """Identity of a storage while it lives: the address of its C++ object."""
    key: int = tensor.untyped_storage()._cdata
    return key


def size_hint(size: Any) -> int:
    """A size as a number: the hint of a symbolic one."""
    if isinstance(size, int):
        return size
    if hasattr(_symbolic_shapes, "optimization_hint"):
        return int(_symbolic_shapes.optimization_hint(size))
    return int(_symbolic_shapes.hint_int(size, fallback=_UNBACKED_HINT))


def in_backward() -> bool:
    """Whether the autograd engine is running on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def running_node() -> tuple[str, int]:
    """Name and sequence number of the autograd node that is being evaluated; ``("", -1)``."""
    node: Any = torch._C._current_autograd_node()
    return (node.name(), node._sequence_nr()) if node is not None else ("", -1)


def has_parallel_edges() -> bool:
    """Whether two edges of the running autograd node lead to the same input of the same node."""
    node: Any = torch._C._current_autograd_node()
    edges = (
        [edge for edge in node.next_functions if edge[0] is not None] if node is not None else []
    )
    return len(set(edges)) < len(edges)


def frees_graph() -> bool:
    """Whether the running backward pass lets go of what its nodes have saved."""
    return not torch._C._autograd._get_current_graph_task_keep_graph()


def next_sequence_number() -> int:
    """The number that the next autograd node will get. A node is numbered before its operator
    runs, so an operator's own node has one less."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def lacks_device(kind: str) -> bool:
    """Whether autograd cannot work for a kind of device here, not even on fake tensors.

    A torch built without it ends the process at its sight (``InputMetadata`` in
    ``torch/csrc/autograd/input_metadata.cpp`` wants a device guard). One built with CUDA puts a
    guard in the place of the missing device that does nothing (``ensureCUDADeviceGuardSet``), but
    the engine asks the driver all the same, and raises.
    """
    if kind in ("cpu", "meta"):
        return False
    if kind == "cuda":
        return not torch.cuda._is_compiled() or torch.cuda.device_count() == 0
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is None or accelerator.type != kind or not torch.accelerator.is_available()


@contextlib.contextmanager
def optimizers_accept_fakes(*, cpu_stands_in: bool) -> Iterator[None]:
    """Let optimizers choose the multi-tensor path for fake tensors as they do for real ones.

    With ``cpu_stands_in``, for those on the CPU too, which stand for tensors on a GPU.
    """
    types: Any = getattr(_optimizer, "_foreach_supported_types", None)
    devices: Any = getattr(_optimizer, "_get_foreach_kernels_supported_devices", None)
    if types is None or devices is None:
        yield
        return
    before = list(types)
    types.append(FakeTensor)
    if cpu_stands_in:
        _optimizer._get_foreach_kernels_supported_devices = lambda: [*devices(), "cpu"]
    try:
        yield
    finally:
        types[:] = before
        _optimizer._get_foreach_kernels_supported_devices = devices


def set_constant(fake: Any, value: Any) -> None:
    """Let a fake tensor know its value, so that asking for it (``.item()``) has an answer."""
    fake.constant = value


def constant_of(fake: Any) -> Any:
    return getattr(fake, "constant", None)


def move_fake(fake: Any, device: Any) -> None:
    """Put a fake tensor on another device; nothing is copied, as it has no data."""
    fake.fake_device = device


def is_view(operator: Any) -> bool:
    """Whether every output of an operator looks into an input that it does not write to."""
    return bool(getattr(operator, "is_view", False))


def writes_in_place(operator: Any) -> bool:
    """Whether an operator changes one of its inputs, by its schema."""
    return bool(getattr(getattr(operator, "_schema", None), "is_mutable", False))


def aliased_argument(operator: Any, output: int) -> str | None:
    """Name of the argument that an output shares its storage with, by the operator's schema."""
    schema = getattr(operator, "_schema", None)
    if schema is None or output >= len(schema.returns):
        return None
    alias = schema.returns[output].alias_info
    if alias is None:
        return None
    for argument in schema.arguments:
        other = argument.alias_info
        # A list of views (``split``) has no name for what its elements share.
        if other is not None and (
            set(other.before_set) & set(alias.before_set) or is_view(operator)
        ):
            return str(argument.name)
    return None
