"""The inputs that an operator may write to, resolved once per name and kinds of inputs.

The profiler records an operator's name but not its overload, so every schema of that name which
accepts the recorded kinds is a candidate, and an input is mutable if any candidate writes to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from pytest_torchmem.record.torch_api import dispatcher
from pytest_torchmem.values.trace import Mutable

TENSOR = "tensor"
TENSORS = "tensors"
OTHER_LIST = "list"
#: What an input of an operator is: one of the words above, or the type of a scalar.
Kind: TypeAlias = "str | type[object]"

_SCALARS: dict[type[object], frozenset[Kind]] = {
    torch.BoolType: frozenset({bool}),
    torch.IntType: frozenset({int, bool}),
    torch.FloatType: frozenset({float}),
    dispatcher.COMPLEX_TYPE: frozenset({complex}),
    torch.NumberType: frozenset({bool, int, float, complex}),
}
_NOTHING = frozenset({type(None)})


@dataclass(frozen=True, slots=True)
class Signature:
    """The facts that an operator's name and the kinds of its inputs tell.

    Attributes:
        is_operator: At least one schema of that name accepts the inputs.
        mutable: For each input whether it may be written to.
        overloads: The names of the overloads that accept the inputs, ``""`` for the one without a
            name.
    """

    is_operator: bool
    mutable: tuple[Mutable, ...]
    overloads: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Schema:
    """The facts of one overload that matching needs.

    Attributes:
        overload: Its name after the operator's.
        accepted: For each argument the kinds it takes; None stands for every kind.
        writes: For each argument whether the operator writes to it.
    """

    overload: str
    accepted: list[frozenset[Kind] | None]
    writes: list[bool]


# Asking torch for the schemas of a name is slow, and once it has some they stay; so the answers are
# kept for the life of the process. A name without any may get some later, so that is not kept.
_SCHEMAS: dict[str, list[_Schema]] = {}


class SchemaTable:
    """Remembers the answer for each operator name and kinds of inputs."""

    def __init__(self) -> None:
        self._missing: set[str] = set()
        self._signatures: dict[tuple[str, tuple[Kind, ...]], Signature] = {}

    def resolve(self, name: str, kinds: tuple[Kind, ...]) -> Signature:
        """The signature for inputs of ``kinds``: `TENSOR`, `TENSORS`, `OTHER_LIST` or a type."""
        key = (name, kinds)
        found = self._signatures.get(key)
        if found is None:
            found = self._signatures[key] = self._match(name, kinds)
        return found

    def _match(self, name: str, kinds: tuple[Kind, ...]) -> Signature:
        matches = [
            schema
            for schema in self._schemas_of(name)
            if len(schema.accepted) == len(kinds)
            and all(a is None or kind in a for a, kind in zip(schema.accepted, kinds, strict=True))
        ]
        if not matches:
            return Signature(False, (Mutable.UNKNOWN,) * len(kinds))
        written = (any(column) for column in zip(*(m.writes for m in matches), strict=True))
        return Signature(
            True,
            tuple(Mutable.YES if w else Mutable.NO for w in written),
            tuple(match.overload for match in matches),
        )

    def _schemas_of(self, name: str) -> list[_Schema]:
        if name in self._missing:
            return []
        if name not in _SCHEMAS:
            schemas = dispatcher.schemas_of(name)
            if not schemas:
                self._missing.add(name)
                return []
            _SCHEMAS[name] = [
                _Schema(
                    schema.overload_name,
                    [_accepted_kinds(a.type) for a in schema.arguments],
                    [bool(getattr(a.alias_info, "is_write", False)) for a in schema.arguments],
                )
                for schema in schemas
            ]
        return _SCHEMAS[name]


def _accepted_kinds(schema_type: Any) -> frozenset[Kind] | None:
    """The kinds an argument of ``schema_type`` takes; None stands for every kind."""
    if isinstance(schema_type, torch.OptionalType):
        inner = _accepted_kinds(schema_type.getElementType())
        return None if inner is None else inner | _NOTHING
    if isinstance(schema_type, torch.AnyType):
        return None
    if schema_type.isSubtypeOf(torch.ListType.ofTensors()):
        return frozenset({TENSORS})
    if isinstance(schema_type, torch.TensorType):
        return frozenset({TENSOR})
    for scalar, kinds in _SCALARS.items():
        if isinstance(schema_type, scalar):
            return kinds
    # The profiler records few kinds of arguments and None in place of all others. So an argument
    # of any other type can only be recorded as None.
    return _NOTHING
