"""The dispatcher: the schemas of its operators, and the modes that it goes through."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import torch

from pytest_torchmem.record.torch_api import ALL_RELEASES, Checked

CHECKED: Final[Checked] = {
    "torch._C.ComplexType": ALL_RELEASES,
    "torch._C.DisableTorchFunction": ALL_RELEASES,
    "torch._C._DisableTorchDispatch": ALL_RELEASES,
    "torch._C._jit_get_schemas_for_operator": ALL_RELEASES,
    "torch._ops.OpOverload._schema": ALL_RELEASES,
}

#: The type of a complex number in a schema; its like for other numbers are public.
COMPLEX_TYPE: Any = torch._C.ComplexType


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


def schema_of(operator: Any) -> Any:
    """The schema of what is dispatched; None for any other function."""
    return getattr(operator, "_schema", None)


def is_view(operator: Any) -> bool:
    """Return whether every output of an operator looks into an input that it does not write to."""
    return bool(getattr(operator, "is_view", False))


def writes_in_place(operator: Any) -> bool:
    """Return whether an operator changes one of its inputs, by its schema."""
    return bool(getattr(schema_of(operator), "is_mutable", False))


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


#: A context manager: what is asked of tensors in it goes to no function mode of the user's.
unseen_by_modes: Any = torch._C.DisableTorchFunction

#: A context manager: operators in it go to no dispatch mode of the user's.
undispatched: Any = torch._C._DisableTorchDispatch
