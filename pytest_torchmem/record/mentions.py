"""Tensors that the event tree mentions: operator inputs, parameters of modules and optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
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

    def add_inputs(
        self, tensors: list[Any], event: int, arguments: Iterable[int], mutable: Iterable[int]
    ) -> None:
        count = len(tensors)
        self.tensors += tensors
        self.events += [event] * count
        self.roles += [Role.OPERATOR_INPUT] * count
        self.arguments += arguments
        self.mutable += mutable
        self.names += [-1] * count


class OperatorInputs:
    """Collects the tensors among operators' inputs and resolves each operator's signature."""

    def __init__(self, schemas: SchemaTable) -> None:
        self._schemas = schemas
        self._simple: dict[Any, tuple[Signature, tuple[int, ...], tuple[int, ...]]] = {}

    def collect(self, operator: Any, event: int, mentions: Mentions) -> bool:
        """Add the operator's tensors to ``mentions``; return whether a schema fits its inputs."""
        inputs = operator.inputs
        key = (operator.name, *map(type, inputs))
        known = self._simple.get(key)
        if known is None:
            if list in key:
                return self._collect_lists(operator.name, inputs, event, mentions)
            known = self._simple[key] = self._learn(operator.name, inputs)
        signature, positions, mutable = known
        if positions:
            mentions.add_inputs([inputs[p] for p in positions], event, positions, mutable)
        return signature.is_operator

    def _learn(
        self, name: str, inputs: Sequence[Any]
    ) -> tuple[Signature, tuple[int, ...], tuple[int, ...]]:
        kinds = tuple(_kind(value) for value in inputs)
        signature = self._schemas.resolve(name, kinds)
        positions = tuple(p for p, kind in enumerate(kinds) if kind is TENSOR)
        return signature, positions, tuple(int(signature.mutable[p]) for p in positions)

    def _collect_lists(
        self, name: str, inputs: Sequence[Any], event: int, mentions: Mentions
    ) -> bool:
        signature = self._schemas.resolve(name, tuple(_kind(value) for value in inputs))
        for argument, value in enumerate(inputs):
            items = value if isinstance(value, list) else [value]
            tensors = [item for item in items if type(item) is torch_api.TensorMetadata]
            count = len(tensors)
            mentions.add_inputs(
                tensors, event, [argument] * count, [int(signature.mutable[argument])] * count
            )
        return signature.is_operator

    def resolve_again(self, operator: Any) -> Signature:
        """The signature when some tensors have no identity: these then count as no tensor."""
        kinds = tuple(_kind(value, keyed_only=True) for value in operator.inputs)
        return self._schemas.resolve(operator.name, kinds)


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
