"""Tensors that the event tree mentions: operator inputs, parameters of modules and optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pytest_torchmem.record import torch_api
from pytest_torchmem.record.schemas import OTHER_LIST, TENSOR, TENSORS, SchemaTable, Signature
from pytest_torchmem.record.strings import StringTable
from pytest_torchmem.trace import TENSOR as TENSOR_ROW
from pytest_torchmem.trace import Mutable, Role

if TYPE_CHECKING:
    from numpy.typing import NDArray

_name = torch_api.reader(torch_api.TorchOpFields, "name")
_inputs = torch_api.reader(torch_api.TorchOpFields, "inputs")
_allocation_id = torch_api.reader(torch_api.TensorMetadata, "allocation_id")
_IDENTITY = attrgetter("allocation_id", "id", "storage_data_ptr", "device")
_EXTENT = attrgetter("layout", "dtype", "sizes", "strides")


@dataclass(frozen=True, slots=True)
class InputShape:
    """What operators of one name with inputs of the same kinds have in common.

    Attributes:
        name: The operator's name as a number.
        is_operator: A schema of the name fits the inputs.
        arguments: Which argument each tensor among them stands in.
        mutable: `Mutable` of each tensor.
    """

    name: int
    is_operator: bool
    arguments: tuple[int, ...]
    mutable: tuple[int, ...]


class InputShapes:
    """Resolves the signature of each operator, once for each shape of its inputs."""

    def __init__(self, strings: StringTable) -> None:
        self._strings = strings
        self._schemas = SchemaTable()
        self._numbers: dict[Any, int] = {}
        self.known: list[InputShape] = []
        #: By name and types of the inputs: number of the shape, arguments. None of them is a list.
        self.plain: dict[Any, tuple[int, tuple[int, ...]]] = {}

    def learn(self, key: tuple[Any, ...], inputs: Sequence[Any]) -> int:
        """The number of the shape of ``inputs``; ``key`` is the operator's name and their types."""
        # What is in a list is part of the shape.
        exact = tuple(tuple(map(type, v)) if type(v) is list else type(v) for v in inputs)
        number = self._numbers.setdefault((key[0], exact), len(self.known))
        if number == len(self.known):
            self.known.append(self._shape(key[0], inputs))
        if list not in key:
            self.plain[key] = number, self.known[number].arguments
        return number

    def _shape(self, name: str, inputs: Sequence[Any]) -> InputShape:
        signature = self._schemas.resolve(name, tuple(_kind(value) for value in inputs))
        arguments = tuple(argument for argument, value in enumerate(inputs) for _ in flat([value]))
        mutable = tuple(int(signature.mutable[a]) for a in arguments)
        return InputShape(self._strings.number(name), signature.is_operator, arguments, mutable)

    def resolve_again(self, operator: Any) -> Signature:
        """The signature when some tensors have no identity: these then count as no tensor."""
        kinds = tuple(_kind(value, keyed_only=True) for value in _inputs(operator))
        return self._schemas.resolve(_name(operator), kinds)


def flat(inputs: Iterable[Any]) -> list[Any]:
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


class Mentions:
    """The mentions of tensors in one tree: first those by operators, then those by owners.

    The profiler gives each lifetime of a pointer on a device an allocation id, and all tensors in
    it one id. So where an allocation was met, its id tells the rest, and is all that is read of the
    many mentions that follow.
    """

    def __init__(self, shapes: InputShapes) -> None:
        #: The shapes that operators were given the numbers of.
        self.shapes = shapes
        self._allocated: set[int] = set()
        self._allocation_ids: list[int] = []
        # Mentions of what was not seen to be allocated: their numbers, identities and tensors.
        self._strangers: list[tuple[int, tuple[Any, ...], Any]] = []
        self._owners: list[tuple[int, int, int]] = []
        self._operator_count = 0
        #: Operators that take a tensor without identity, by their number among the operators.
        self.unkeyed: dict[int, Any] = {}

    def add_allocation(self, allocation: tuple[Any, ...]) -> None:
        """Learn of an allocation: its allocation id, id, device and pointer."""
        allocation_id, tensor_id, _, ptr, *_ = allocation
        if tensor_id is not None and allocation_id is not None and ptr:
            self._allocated.add(allocation_id)

    def add_operator(self, operator: Any) -> int:
        """Add what an operator takes in; return the number of its `InputShape`."""
        inputs = _inputs(operator)
        key = (_name(operator), *map(type, inputs))
        if plain := self.shapes.plain.get(key):
            number, arguments = plain
            tensors = [inputs[argument] for argument in arguments]
        else:
            number, tensors = self.shapes.learn(key, inputs), flat(inputs)
        for tensor in tensors:
            allocation_id = _allocation_id(tensor)
            if allocation_id not in self._allocated:
                allocation_id = self._meet(tensor)
                if not allocation_id:
                    self.unkeyed[self._operator_count] = operator
            self._allocation_ids.append(allocation_id)
        self._operator_count += 1
        return number

    def add_owned(self, tensor: Any, event: int, role: Role, name: int = -1) -> None:
        """Add a tensor that a module or an optimizer owns."""
        self._allocation_ids.append(self._meet(tensor))
        self._owners.append((event, role, name))

    def _meet(self, tensor: Any) -> int:
        """Note the next mention for a closer look; return its allocation id, 0 if unkeyed."""
        identity = _IDENTITY(tensor)
        self._strangers.append((len(self._allocation_ids), identity, tensor))
        # Without the device, which never is None and is slow to compare.
        return 0 if None in identity[:3] else int(identity[0])

    def table(
        self,
        operators: NDArray[np.int64],
        shapes: Sequence[int],
        allocations: NDArray[Any],
        device_numbers: dict[Any, int],
    ) -> NDArray[Any]:
        """Return `trace.TENSOR` rows, one per mention.

        ``operators`` are the rows of the operators that were added, and ``shapes`` the numbers of
        their shapes.
        """
        table = np.zeros(len(self._allocation_ids), TENSOR_ROW)
        split = len(table) - len(self._owners)
        self._fill_inputs(table[:split], operators, shapes)
        table["argument"][split:] = -1
        table["mutable"][split:] = Mutable.NO
        owners = zip(("event", "role", "name"), zip(*self._owners, strict=True), strict=False)
        for name, values in owners:
            table[name][split:] = values
        known = allocations[allocations["keyed"]]
        self._fill_allocated(table, known)
        self._fill_strangers(table, known, device_numbers)
        return table

    def _fill_inputs(
        self, table: NDArray[Any], operators: NDArray[np.int64], shapes: Sequence[int]
    ) -> None:
        known = self.shapes.known
        counts = np.array([len(shape.arguments) for shape in known], np.int64)[shapes]
        table["event"] = np.repeat(operators, counts)
        table["role"] = Role.OPERATOR_INPUT
        table["name"] = -1
        taken = [known[shape] for shape in shapes]
        for name, columns in (
            ("argument", (shape.arguments for shape in taken)),
            ("mutable", (shape.mutable for shape in taken)),
        ):
            table[name] = np.fromiter(chain.from_iterable(columns), table[name].dtype, len(table))

    def _fill_allocated(self, table: NDArray[Any], allocations: NDArray[Any]) -> None:
        """Fill in what an allocation says of its allocation id."""
        table["keyed"] = True
        table["allocation_id"] = self._allocation_ids
        size = max(
            table["allocation_id"].max(initial=0), allocations["allocation_id"].max(initial=0)
        )
        for name in ("id", "ptr", "device"):
            column = np.zeros(size + 1, table[name].dtype)
            column[allocations["allocation_id"]] = allocations[name]
            table[name] = column[table["allocation_id"]]

    def _fill_strangers(
        self, table: NDArray[Any], allocations: NDArray[Any], device_numbers: dict[Any, int]
    ) -> None:
        """Fill in what strangers say of themselves.

        Extents are read only for storages without an allocation: that knows better, and reading
        sizes and strides costs more than all else together.
        """
        if not self._strangers:
            return
        numbers, identities, tensors = zip(*self._strangers, strict=True)
        rows = np.array(numbers)
        unkeyed = [n for n, identity in enumerate(identities) if None in identity[:3]]
        allocation_ids, ids, pointers, devices = zip(*identities, strict=True)
        table["allocation_id"][rows] = _filled(allocation_ids, unkeyed)
        table["id"][rows] = _filled(ids, unkeyed)
        table["ptr"][rows] = _filled(pointers, unkeyed)
        table["device"][rows] = [device_numbers[device] for device in devices]
        table["keyed"][rows[unkeyed]] = False
        known = np.isin(storage_codes(table[rows]), storage_codes(allocations))
        strange = np.flatnonzero(table["keyed"][rows] & ~known)
        table["size_bytes"][rows[strange]] = [_extent_bytes(tensors[n]) for n in strange.tolist()]


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
    return filled


def _extent_bytes(tensor: Any) -> int:
    layout, dtype, sizes, strides = _EXTENT(tensor)
    if layout is not torch.strided:
        return 0
    # A tensor of no dimension spans one element.
    elements = max(map(int.__mul__, sizes, strides)) if sizes else 1
    return int(max(0, elements * dtype.itemsize))
