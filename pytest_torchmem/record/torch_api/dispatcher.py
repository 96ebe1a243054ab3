"""The dispatcher: the schemas of its operators, and the modes that it goes through."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final

import torch
from torch._ops import HigherOrderOperator, OpOverload

from pytest_torchmem.record.torch_api import Checked

CHECKED: Final[Checked] = {
    "torch._C.ComplexType": ("2.10.0", "2.15.0"),
    "torch._C.DispatchKey": ("2.10.0", "2.14.0"),
    "torch._C.DisableTorchFunction": ("2.10.0", "2.15.0"),
    "torch._C._DisableTorchDispatch": ("2.10.0", "2.15.0"),
    "torch._C._dispatch_has_kernel_for_dispatch_key": ("2.10.0", "2.14.0"),
    "torch._C._select_conv_backend": ("2.13.0", "2.13.0"),
    "torch._C._jit_get_schemas_for_operator": ("2.10.0", "2.15.0"),
    "torch._C._fft": ("2.10.0", "2.15.0"),
    "torch._C._linalg": ("2.10.0", "2.15.0"),
    "torch._C._nested": ("2.10.0", "2.15.0"),
    "torch._C._nn": ("2.10.0", "2.15.0"),
    "torch._C._sparse": ("2.10.0", "2.15.0"),
    "torch._C._special": ("2.10.0", "2.15.0"),
    "torch._ops.HigherOrderOperator": ("2.10.0", "2.13.0"),
    "torch._ops.OpOverload": ("2.10.0", "2.15.0"),
    "torch._ops.OpOverload._dispatch_cache": ("2.13.0", "2.13.0"),
    "torch._ops.OpOverload._op_dk": ("2.10.0", "2.14.0"),
    "torch._ops.OpOverload._schema": ("2.10.0", "2.15.0"),
    "torch.library.Library._destroy": ("2.10.0", "2.14.0"),
}

#: What a dispatch mode is called with.
Operator = OpOverload
# What is put here comes before the composition.
_ON_DEVICES: Final = ("AutogradCPU", "AutogradCUDA")
# torch.func has a kernel of its own for it, which asks whether a tensor is on a GPU.
_IN_TRANSFORMS: Final = {"aten::dropout": ("FuncTorchDynamicLayerFrontMode",)}
_KERNELS: Final = ("CPU", "CUDA", "CompositeExplicitAutograd")
_COMPOSED: Any = torch._C.DispatchKey.CompositeImplicitAutograd
#: The type of a complex number in a schema; its like for other numbers are public.
COMPLEX_TYPE: Any = torch._C.ComplexType
#: The modules that a builtin function which makes tensors may say it is from.
MAKERS: Final = (
    "torch",
    "torch._C._fft",
    "torch._C._linalg",
    "torch._C._nested",
    "torch._C._nn",
    "torch._C._sparse",
    "torch._C._special",
)


def schemas_of(operator_name: str) -> tuple[Any, ...]:
    """Every registered schema of a qualified operator name; empty if there is none."""
    # Annotations reach the profiler under names of the same shape. Lookup raises for some of them,
    # and a name without a namespace can never be an operator.
    if "::" not in operator_name:
        return ()
    try:
        return tuple(torch._C._jit_get_schemas_for_operator(operator_name))
    except RuntimeError:
        return ()


@lru_cache(maxsize=1024)
def only_views(operator_name: str) -> bool:
    """Return whether an operator does nothing but look at its input in another way."""
    schemas = schemas_of(operator_name)
    return bool(schemas) and all(
        any(value.alias_info is not None for value in schema.returns)
        and not any(getattr(a.alias_info, "is_write", False) for a in schema.arguments)
        for schema in schemas
    )


def is_layer_function(name: str) -> bool:
    """Return whether torch has a builtin function of this name for layers, as ``linear``."""
    return hasattr(torch._C._nn, name)


def schema_of(operator: Any) -> Any:
    """The schema of what is dispatched; None for any other function."""
    return getattr(operator, "_schema", None)


def is_of_functions(operator: object) -> bool:
    """Return whether what is dispatched is given functions to call, as ``torch.cond`` is."""
    return isinstance(operator, HigherOrderOperator)


def convolution_kind(args: Sequence[Any]) -> str:
    """Return which kernels compute a convolution on the CPU, by what the operator is called with.

    Asked of fake tensors, it makes views of them.
    """
    return str(torch._C._select_conv_backend(*args[:9], None)).rpartition(".")[2]


def is_view(operator: Any) -> bool:
    """Return whether every output of an operator looks into an input that it does not write to."""
    return bool(getattr(operator, "is_view", False))


def writes_in_place(operator: Any) -> bool:
    """Return whether an operator changes one of its inputs, by its schema."""
    return bool(getattr(schema_of(operator), "is_mutable", False))


def written_to(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operator writes to, of those that it is called with."""
    found: list[torch.Tensor] = []
    for place, argument in enumerate(schema_of(operator).arguments):
        if getattr(argument.alias_info, "is_write", False):
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            found += [
                t for t in (given if isinstance(given, list | tuple) else [given]) if t is not None
            ]
    return found


def aliased_argument(operator: Any, output: int) -> str | None:
    """Name of the argument that an output shares its storage with, by the operator's schema."""
    schema = schema_of(operator)
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


@lru_cache(maxsize=1024)
def is_composed(operator: Operator) -> bool:
    """Return whether torch's C++ makes an operator of others alone, and has no kernel for it."""
    has_kernel: Any = torch._C._dispatch_has_kernel_for_dispatch_key
    name = operator.name()  # type: ignore[no-untyped-call]  # as it is in torch
    if not has_kernel(name, "CompositeImplicitAutograd"):
        return False
    return not any(has_kernel(name, key) for key in _KERNELS)


def composed(operator: Operator) -> Callable[..., Any]:
    """The operators that torch makes an operator of, whoever has put others in their place."""
    return partial(operator._op_dk, _COMPOSED)


def implement(operator: Operator, function: Callable[..., Any]) -> Callable[[], None]:
    """Have the dispatcher call a function for a composed operator; return how to undo it."""
    library: Any = torch.library
    own = library.Library(operator.namespace, "IMPL")
    name = operator.name()  # type: ignore[no-untyped-call]  # as it is in torch
    # It warns that there was one, to which it comes back.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for key in (*_ON_DEVICES, *_IN_TRANSFORMS.get(name, ())):
            own.impl(operator, function, key)
    # Where calls go is kept: without autograd's kernel, compiled code would have no gradient.
    look_up_anew = operator._dispatch_cache.clear
    look_up_anew()

    def undo() -> None:
        own._destroy()
        look_up_anew()

    return undo


#: A context manager: what is asked of tensors in it goes to no function mode of the user's.
unseen_by_modes: Any = torch._C.DisableTorchFunction

#: A context manager: operators in it go to no dispatch mode of the user's.
undispatched: Any = torch._C._DisableTorchDispatch
