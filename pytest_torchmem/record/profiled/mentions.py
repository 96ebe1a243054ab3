"""Tensors that the event tree mentions: operator inputs, parameters of modules and optimizers.

The profiler records an operator's name but not its overload, so every schema of that name which
accepts the recorded kinds is a candidate, and an input is mutable if any candidate writes to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from pytest_torchmem.record.recorded_tables import StringTable
from pytest_torchmem.record.torch_api import dispatcher, profiler
from pytest_torchmem.values.trace import TENSOR as TENSOR_ROW
from pytest_torchmem.values.trace import Mutable, Role

#: Allocation id, id, device, pointer, bytes, and the allocator's total of allocated bytes.
Allocation: TypeAlias = tuple[int, int | None, torch.device, int, int, int]

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
# So are the signatures for inputs of such names, with the argument that each tensor stands in:
# another body calls mostly the same operators.
_SIGNATURES: dict[tuple[str, tuple[object, ...]], tuple[Signature, tuple[int, ...]]] = {}
_MOST_SIGNATURES: Final = 4096


def resolve(name: str, kinds: tuple[Kind, ...]) -> Signature:
    """Return the signature for inputs of ``kinds``: `TENSOR`, `TENSORS`, `OTHER_LIST` or a type."""
    matches = [
        schema
        for schema in _schemas_of(name)
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


def _schemas_of(name: str) -> list[_Schema]:
    if name not in _SCHEMAS and (schemas := dispatcher.schemas_of(name)):
        _SCHEMAS[name] = [
            _Schema(
                schema.overload_name,
                [_accepted_kinds(a.type) for a in schema.arguments],
                [bool(getattr(a.alias_info, "is_write", False)) for a in schema.arguments],
            )
            for schema in schemas
        ]
    return _SCHEMAS.get(name, [])


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


_name = profiler.reader(profiler.TorchOpFields, "name")
_inputs = profiler.reader(profiler.TorchOpFields, "inputs")
_allocation_id = profiler.reader(profiler.TensorMetadata, "allocation_id")
_sizes = profiler.reader(profiler.TensorMetadata, "sizes")
_IDENTITY = attrgetter("id", "device")
_EXTENT = attrgetter("layout", "dtype", "sizes", "strides")
_IDENTITY_COLUMNS: Final = ("allocation_id", "id", "ptr", "device")
# Where a mention has no allocation id; the last entry of every array.
_UNKEYED: Final = -1


@dataclass(frozen=True, slots=True)
class InputShape:
    """The facts that operators of one name with inputs of the same kinds share.

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
        self._numbers: dict[tuple[str, tuple[object, ...]], int] = {}
        self.known: list[InputShape] = []
        #: By name and types of the inputs: number of the shape, arguments. None of them is a list.
        self.plain: dict[tuple[str | type, ...], tuple[int, tuple[int, ...]]] = {}

    def learn(self, key: tuple[Any, ...], inputs: Sequence[object]) -> int:
        """The number of the shape of ``inputs``; ``key`` is the operator's name and their types."""
        # What is in a list is part of the shape.
        exact = tuple(tuple(map(type, v)) if type(v) is list else type(v) for v in inputs)
        number = self._numbers.setdefault((key[0], exact), len(self.known))
        if number == len(self.known):
            self.known.append(self._shape(key[0], exact, inputs))
        if list not in key:
            self.plain[key] = number, self.known[number].arguments
        return number

    def _shape(self, name: str, exact: tuple[object, ...], inputs: Sequence[object]) -> InputShape:
        signature_and_places = _SIGNATURES.get((name, exact))
        if signature_and_places is None:
            signature = resolve(name, tuple(_kind(value) for value in inputs))
            signature_and_places = (
                signature,
                tuple(n for n, value in enumerate(inputs) for _ in flat([value])),
            )
            if name in _SCHEMAS and len(_SIGNATURES) < _MOST_SIGNATURES:
                _SIGNATURES[name, exact] = signature_and_places
        signature, arguments = signature_and_places
        mutable = tuple(int(signature.mutable[a]) for a in arguments)
        return InputShape(self._strings.number(name), signature.is_operator, arguments, mutable)


def signature_of(operator: profiler.TorchOpFields) -> Signature:
    """Return an operator's signature. Tensors that have no identity count as no tensor."""
    kinds = tuple(_kind(value, keyed_only=True) for value in _inputs(operator))
    return resolve(_name(operator), kinds)


def flat(inputs: Iterable[object]) -> list[profiler.TensorMetadata]:
    """The tensors among inputs and in the lists among them."""
    items = chain.from_iterable(v if isinstance(v, list) else (v,) for v in inputs)
    return [item for item in items if type(item) is profiler.TensorMetadata]


def _kind(value: object, keyed_only: bool = False) -> Kind:
    if type(value) is profiler.TensorMetadata:
        return TENSOR if not keyed_only or _is_keyed(value) else type(None)
    if isinstance(value, list):
        tensors = all(
            type(item) is profiler.TensorMetadata and (not keyed_only or _is_keyed(item))
            for item in value
        )
        return TENSORS if tensors else OTHER_LIST
    return type(value)


def _is_keyed(tensor: profiler.TensorMetadata) -> bool:
    return None not in (tensor.id, tensor.allocation_id, profiler.storage_pointer(tensor))


class InputSizes:
    """The sizes of the inputs of operators, as text: ``[[2, 3], []]`` for a tensor and a number.

    As in torch, what is no tensor has no sizes, and neither has a list of tensors.
    """

    def __init__(self, strings: StringTable) -> None:
        self._strings = strings
        self._number_by_shapes: dict[tuple[tuple[int, ...], ...], int] = {}
        #: For each operator the number of its text.
        self.numbers: list[int] = []

    def add(self, inputs: Sequence[object]) -> None:
        """Add the inputs of the next operator."""
        sizes = tuple(
            tuple(_sizes(value)) if type(value) is profiler.TensorMetadata else ()
            for value in inputs
        )
        number = self._number_by_shapes.get(sizes)
        if number is None:
            number = self._number_by_shapes[sizes] = self._strings.number(
                str(list(map(list, sizes)))
            )
        self.numbers.append(number)


class Mentions:
    """The mentions of tensors in one tree: first those by operators, then those by owners.

    The profiler gives one allocation id to each lifetime of a pointer on a device, and one id to
    all tensors in it. Once we have met an allocation, its id tells the rest: of the many mentions
    that follow we read nothing else.
    """

    def __init__(self, shapes: InputShapes, sizes: InputSizes | None = None) -> None:
        #: The shapes whose numbers the operators have.
        self.shapes = shapes
        self._sizes = sizes
        # Allocation ids of which an allocation was met, and of others all that they stand for.
        self._allocated: set[int] = set()
        self._identities: dict[int, tuple[Any, ...]] = {}
        self._allocation_ids: list[int] = []
        # By the number of the mention; of storages of which no allocation was met.
        self._extents: dict[int, int] = {}
        self._unkeyed_devices: dict[int, torch.device] = {}
        self._owners: list[tuple[int, int, int]] = []
        self._operator_count = 0
        #: Operators that take a tensor without identity, by their number among the operators.
        self.unkeyed: dict[int, profiler.TorchOpFields] = {}

    def add_allocation(self, allocation: Allocation) -> None:
        """Learn of an allocation: its allocation id, id, device and pointer."""
        if allocation[1] is not None and allocation[3]:
            self._allocated.add(allocation[0])

    def add_operator(self, operator: profiler.TorchOpFields) -> int:
        """Add what an operator takes in; return the number of its `InputShape`."""
        inputs = _inputs(operator)
        if self._sizes is not None:
            self._sizes.add(inputs)
        key = (_name(operator), *map(type, inputs))
        if plain := self.shapes.plain.get(key):
            number, arguments = plain
            tensors = [inputs[argument] for argument in arguments]
        else:
            number, tensors = self.shapes.learn(key, inputs), flat(inputs)
        for tensor in tensors:
            allocation_id = _allocation_id(tensor)
            if allocation_id not in self._allocated:
                allocation_id = self._meet(tensor, allocation_id)
                if allocation_id == _UNKEYED:
                    self.unkeyed[self._operator_count] = operator
            self._allocation_ids.append(allocation_id)
        self._operator_count += 1
        return number

    def add_owned(
        self, tensor: profiler.TensorMetadata, event: int, role: Role, name: int = -1
    ) -> None:
        """Add a tensor that a module or an optimizer owns."""
        allocation_id = _allocation_id(tensor)
        if allocation_id not in self._allocated:
            allocation_id = self._meet(tensor, allocation_id)
        self._allocation_ids.append(allocation_id)
        self._owners.append((event, role, name))

    def _meet(self, tensor: profiler.TensorMetadata, allocation_id: int | None) -> int:
        """Look closer at the next mention; return its allocation id or `_UNKEYED`."""
        number = len(self._allocation_ids)
        if allocation_id not in self._identities:
            tensor_id, device = _IDENTITY(tensor)
            ptr = profiler.storage_pointer(tensor)
            if allocation_id is None or tensor_id is None or ptr is None:
                self._unkeyed_devices[number] = device
                return _UNKEYED
            self._identities[allocation_id] = tensor_id, ptr, device
        self._extents[number] = _extent_bytes(tensor)
        return allocation_id

    def table(
        self,
        operators: NDArray[np.int64],
        shapes: Sequence[int],
        allocations: NDArray[np.void],
        device_numbers: dict[torch.device, int],
    ) -> NDArray[np.void]:
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
        self._fill_identities(table, allocations[allocations["keyed"]], device_numbers)
        unkeyed = list(self._unkeyed_devices)
        table["device"][unkeyed] = [device_numbers[d] for d in self._unkeyed_devices.values()]
        table["keyed"] = True
        table["keyed"][unkeyed] = False
        return table

    def _fill_inputs(
        self, table: NDArray[np.void], operators: NDArray[np.int64], shapes: Sequence[int]
    ) -> None:
        known = self.shapes.known
        lengths = np.array([len(shape.arguments) for shape in known], np.int64)
        counts = lengths[shapes]
        table["event"] = np.repeat(operators, counts)
        table["role"] = Role.OPERATOR_INPUT
        table["name"] = -1
        # The columns of all shapes one after the other, and the place of each mention in these.
        begins = (np.cumsum(lengths) - lengths)[shapes] - (np.cumsum(counts) - counts)
        places = np.arange(len(table)) + np.repeat(begins, counts)
        for name, columns in (
            ("argument", [shape.arguments for shape in known]),
            ("mutable", [shape.mutable for shape in known]),
        ):
            table[name] = np.array([*chain.from_iterable(columns)], table[name].dtype)[places]

    def _fill_identities(
        self,
        table: NDArray[np.void],
        allocations: NDArray[np.void],
        device_numbers: dict[torch.device, int],
    ) -> None:
        """Fill in what each allocation id stands for."""
        mentioned = np.array(self._allocation_ids, np.int64)
        met = np.array(
            [
                (allocation_id, tensor_id, ptr, device_numbers[device])
                for allocation_id, (tensor_id, ptr, device) in self._identities.items()
            ],
            [(name, TENSOR_ROW[name]) for name in _IDENTITY_COLUMNS],
        )
        # The last entry is that of mentions without identity.
        size = 2 + max(mentioned.max(initial=0), allocations["allocation_id"].max(initial=0))
        for name in _IDENTITY_COLUMNS:
            column = np.zeros(size, met.dtype[name])
            for identities in (met, allocations):
                column[identities["allocation_id"]] = identities[name]
            table[name] = column[mentioned]
        # An allocation knows better how large its storage is.
        allocated = np.zeros(size, np.bool_)
        allocated[allocations["allocation_id"]] = True
        rows = np.array(list(self._extents), np.int64)
        extents = np.array(list(self._extents.values()), np.int64)
        table["size_bytes"][rows] = np.where(allocated[mentioned[rows]], 0, extents)


def _extent_bytes(tensor: profiler.TensorMetadata) -> int:
    layout, dtype, sizes, strides = _EXTENT(tensor)
    if layout is not torch.strided:
        return 0
    # A tensor of no dimension spans one element.
    elements = max(map(int.__mul__, sizes, strides)) if sizes else 1
    return int(max(0, elements * dtype.itemsize))
