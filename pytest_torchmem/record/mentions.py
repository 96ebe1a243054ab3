"""Tensors that the event tree mentions: operator inputs, parameters of modules and optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pytest_torchmem.record import torch_api
from pytest_torchmem.record.schemas import OTHER_LIST, TENSOR, TENSORS, SchemaTable, Signature
from pytest_torchmem.trace import TENSOR as TENSOR_ROW
from pytest_torchmem.trace import Mutable, Role

if TYPE_CHECKING:
    from numpy.typing import NDArray

_IDENTITY = attrgetter("id", "allocation_id", "storage_data_ptr", "device")
_EXTENT = attrgetter("layout", "dtype", "sizes", "strides")


@dataclass(slots=True)
class Mentions:
    """Columns in the making: one entry for each mention of a tensor, grouped by event."""

    tensors: list[Any] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    roles: list[int] = field(default_factory=list)
    arguments: list[int] = field(default_factory=list)
    mutable: list[int] = field(default_factory=list)
    names: list[int] = field(default_factory=list)

    def add(self, tensor: Any, event: int, role: Role, name: int = -1) -> None:
        self.tensors.append(tensor)
        self.events.append(event)
        self.roles.append(role)
        self.arguments.append(-1)
        self.mutable.append(Mutable.NO)
        self.names.append(name)

    def add_inputs(self, events: Sequence[int], inputs: Sequence[InputShape]) -> None:
        """Add the columns of what operators take in; their tensors are in ``tensors`` already."""
        counts = [len(shape.arguments) for shape in inputs]
        self.events += np.repeat(events, counts).tolist()
        self.arguments += chain.from_iterable(shape.arguments for shape in inputs)
        self.mutable += chain.from_iterable(shape.mutable for shape in inputs)
        self.roles += [Role.OPERATOR_INPUT] * sum(counts)
        self.names += [-1] * sum(counts)


@dataclass(frozen=True, slots=True)
class InputShape:
    """What inputs of the same kinds have in common.

    Attributes:
        is_operator: A schema of the operator's name fits the inputs.
        arguments: Which argument each tensor among them stands in.
        mutable: `Mutable` of each tensor.
    """

    is_operator: bool
    arguments: tuple[int, ...]
    mutable: tuple[int, ...]


class OperatorInputs:
    """Finds the tensors among operators' inputs and resolves each operator's signature."""

    def __init__(self, schemas: SchemaTable) -> None:
        self._schemas = schemas
        self._shapes: dict[Any, InputShape] = {}

    def collect(
        self, operators: Sequence[Any], names: Sequence[str], tensors: list[Any]
    ) -> list[InputShape]:
        """Append the operators' tensors to ``tensors``; return the shape of each one's inputs."""
        shapes, found = self._shapes, []
        for operator, name in zip(operators, names, strict=True):
            inputs = operator.inputs
            key = (name, *map(type, inputs))
            shape = shapes.get(key)
            if shape is None:
                shape = self._shape(name, inputs)
                if list in key:
                    tensors += _flat(inputs)
                    found.append(shape)
                    continue
                shapes[key] = shape
            found.append(shape)
            for argument in shape.arguments:
                tensors.append(inputs[argument])
        return found

    def _shape(self, name: str, inputs: Sequence[Any]) -> InputShape:
        signature = self._schemas.resolve(name, tuple(_kind(value) for value in inputs))
        arguments = tuple(argument for argument, value in enumerate(inputs) for _ in _flat([value]))
        return InputShape(
            signature.is_operator, arguments, tuple(int(signature.mutable[a]) for a in arguments)
        )

    def resolve_again(self, operator: Any) -> Signature:
        """The signature when some tensors have no identity: these then count as no tensor."""
        kinds = tuple(_kind(value, keyed_only=True) for value in operator.inputs)
        return self._schemas.resolve(operator.name, kinds)


def _flat(inputs: Sequence[Any]) -> list[Any]:
    """The tensors among inputs and in the lists among them."""
    items = chain.from_iterable(v if isinstance(v, list) else (v,) for v in inputs)
    return [item for item in items if type(item) is torch_api.TensorMetadata]


def _kind(value: Any, keyed_only: bool = False) -> Any:
    if type(value) is torch_api.TensorMetadata:
        return TENSOR if not keyed_only or _is_keyed(value) else type(None)
    if isinstance(value, list):
        tensors = all(
            type(item) is torch_api.TensorMetadata and (not keyed_only or _is_keyed(item))
            for item in value
        )
        return TENSORS if tensors else OTHER_LIST
    return type(value)


def _is_keyed(tensor: Any) -> bool:
    return None not in (tensor.id, tensor.allocation_id, tensor.storage_data_ptr)


def tensor_table(
    mentions: Mentions, device_numbers: dict[Any, int], allocations: NDArray[Any]
) -> NDArray[Any]:
    """Return `trace.TENSOR` rows, one per mention, in the order of the mentions.

    Extents are read only for storages without an allocation in ``allocations``: the allocation
    knows better, and reading sizes and strides costs more than all else together.
    """
    table = np.zeros(len(mentions.tensors), TENSOR_ROW)
    if not len(table):
        return table
    ids, allocation_ids, pointers, devices = zip(*map(_IDENTITY, mentions.tensors), strict=True)
    unkeyed = [
        i for i, key in enumerate(zip(ids, allocation_ids, pointers, strict=True)) if None in key
    ]
    table["keyed"] = True
    table["keyed"][unkeyed] = False
    table["id"] = _filled(ids, unkeyed)
    table["allocation_id"] = _filled(allocation_ids, unkeyed)
    table["ptr"] = _filled(pointers, unkeyed)
    table["device"] = [device_numbers[device] for device in devices]
    table["event"] = mentions.events
    table["role"] = mentions.roles
    table["argument"] = mentions.arguments
    table["mutable"] = mentions.mutable
    table["name"] = mentions.names
    known = np.isin(storage_codes(table), storage_codes(allocations[allocations["keyed"]]))
    for row in np.flatnonzero(table["keyed"] & ~known).tolist():
        table["size_bytes"][row] = _extent_bytes(mentions.tensors[row])
    return table


def storage_codes(table: NDArray[Any]) -> NDArray[np.int64]:
    """One int64 for each row's (id, allocation id, device); equal exactly if all three are."""
    # The profiler counts both ids up from 0 in each session, so 28 bits each leave room to spare.
    codes = (table["id"] << 35) | (table["allocation_id"] << 7) | table["device"]
    result: NDArray[np.int64] = codes.astype(np.int64)
    return result


def _filled(values: Sequence[Any], missing: list[int]) -> Sequence[Any]:
    if not missing:
        return values
    filled = list(values)
    for row in missing:
        filled[row] = 0
    return [0 if value is None else value for value in filled]


def _extent_bytes(tensor: Any) -> int:
    layout, dtype, sizes, strides = _EXTENT(tensor)
    if layout is not torch.strided:
        return 0
    # A tensor of no dimension spans one element.
    elements = max(map(int.__mul__, sizes, strides)) if sizes else 1
    return int(max(0, elements * dtype.itemsize))
