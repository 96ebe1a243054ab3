"""The profiler's event tree, turned into the columns of a trace.

Every attribute of an event crosses a language border, so each is read once, in bulk, and only for
the events that have it. Python calls that lead to no operator and no allocation are left out.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from pytest_torchmem.record import torch_api
from pytest_torchmem.record.mentions import Mentions, OperatorInputs, tensor_table
from pytest_torchmem.record.python_calls import Gap, PythonCalls
from pytest_torchmem.record.schemas import SchemaTable
from pytest_torchmem.record.strings import StringTable
from pytest_torchmem.trace import ALLOCATION, EVENT, MODULE_CALL, EventKind, Role, Scope

if TYPE_CHECKING:
    from numpy.typing import NDArray

_KINDS = {
    torch_api.TorchOpFields: EventKind.TORCH_OP,
    torch_api.AllocationFields: EventKind.ALLOCATION,
    torch_api.PyCallFields: EventKind.PY_CALL,
    torch_api.PyCCallFields: EventKind.PY_C_CALL,
    torch_api.OutOfMemoryFields: EventKind.OUT_OF_MEMORY,
}
_PYTHON = (EventKind.PY_CALL, EventKind.PY_C_CALL)
_TIMES = attrgetter("start_time_ns", "end_time_ns", "start_tid")
_OPERATOR = attrgetter("name", "sequence_number")
_ALLOCATION = attrgetter(
    "id", "allocation_id", "device", "ptr", "alloc_size", "total_allocated", "total_reserved"
)


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables of one profiling session; rows refer to rows of the same session."""

    events: NDArray[Any]
    tensors: NDArray[Any]
    allocations: NDArray[Any]
    module_calls: NDArray[Any]


class _DeviceNumbers(dict[Any, int]):
    """Numbers devices as they are first met."""

    def __init__(self, names: StringTable) -> None:
        super().__init__()
        self._names = names

    def __missing__(self, device: Any) -> int:
        number = self[device] = self._names.number(device_name(device))
        return number


def device_name(device: Any) -> str:
    """``cpu`` or ``cuda:1``; the CPU has one memory, whatever index torch gives it."""
    return "cpu" if device.type == "cpu" else f"{device.type}:{device.index or 0}"


class TreeReader:
    """Reads event trees. Strings, devices and schemas are shared between the trees it reads."""

    def __init__(self) -> None:
        self.strings = StringTable()
        self.device_names = StringTable()
        self.device_numbers = _DeviceNumbers(self.device_names)
        self._inputs = OperatorInputs(SchemaTable())
        self._python = PythonCalls(self.strings)

    def read(self, result: Any, segment: int = 0) -> Tables:
        """Return the tables of one profiling session; ``result`` is its kineto result."""
        # Reading makes many small objects and no cycles: looking for some on the way would cost
        # as much as the reading itself.
        collecting = gc.isenabled()
        gc.disable()
        try:
            return self._read(result, segment)
        finally:
            if collecting:
                gc.enable()

    def _read(self, result: Any, segment: int) -> Tables:
        tree = _flatten(result.experimental_event_tree())
        fields, events = tree.fields, tree.events
        events["segment"] = segment
        if len(events):
            starts, ends, threads = zip(*map(_TIMES, tree.nodes), strict=True)
            events["start_ns"], events["end_ns"] = starts, ends
            numbers: dict[int, int] = {}
            events["thread"] = [numbers.setdefault(t, len(numbers)) for t in threads]
        mentions = Mentions()
        self._read_python(tree)
        self._read_operators(fields, events, mentions)
        module_calls = self._read_owners(fields, events, mentions)
        allocations = self._read_allocations(fields, events)
        tensors = tensor_table(mentions, self.device_numbers, allocations)
        self._settle_unkeyed(fields, events, tensors)
        tensors = tensors[np.argsort(tensors["event"], kind="stable")]
        return Tables(events, tensors, allocations, module_calls)

    def _read_python(self, tree: _Tree) -> None:
        events = tree.events
        rows = np.flatnonzero(np.isin(events["kind"], _PYTHON)).tolist()
        events["name"] = self.strings.number("")
        events["file"] = -1
        self._python.read(
            rows,
            [tree.nodes[row].name for row in rows],
            [tree.fields[row].caller.line_number for row in rows],
            events,
        )
        self._python.place_operators(
            tree.gaps,
            [tree.nodes[gap.parent].name for gap in tree.gaps],
            [tree.fields[row].name for gap in tree.gaps for row in gap.operators],
            events,
        )

    def _read_operators(
        self, fields: Sequence[Any], events: NDArray[Any], mentions: Mentions
    ) -> None:
        rows = np.flatnonzero(events["kind"] == EventKind.TORCH_OP).tolist()
        events["scope"] = Scope.NONE
        events["sequence"] = -1
        if not rows:
            return
        operators = [fields[row] for row in rows]
        texts, sequences = zip(*map(_OPERATOR, operators), strict=True)
        inputs = self._inputs.collect(operators, texts, mentions.tensors)
        mentions.add_inputs(rows, inputs)
        events["name"][rows] = [self.strings.number(text) for text in texts]
        events["is_operator"][rows] = [shape.is_operator for shape in inputs]
        events["sequence"][rows] = sequences
        # Only annotations and nodes of the backward graph have other scopes than functions, and
        # neither has a schema.
        events["scope"][rows] = Scope.FUNCTION
        for row, shape in zip(rows, inputs, strict=True):
            if not shape.is_operator:
                events["scope"][row] = min(int(fields[row].scope), Scope.OTHER)

    def _read_owners(
        self, fields: Sequence[Any], events: NDArray[Any], mentions: Mentions
    ) -> NDArray[Any]:
        number, calls = self.strings.number, []
        for row in np.flatnonzero(events["kind"] == EventKind.PY_CALL).tolist():
            call = fields[row]
            if (module := call.module) is not None:
                calls.append((row, module.self_ptr, number(module.cls_name)))
                for name, parameter, gradient in module.parameters:
                    mentions.add(parameter, row, Role.MODULE_PARAMETER, number(name))
                    if gradient is not None:
                        mentions.add(gradient, row, Role.MODULE_GRADIENT, number(name))
            if (optimizer := call.optimizer) is not None:
                for parameter, gradient, state in optimizer.parameters:
                    mentions.add(parameter, row, Role.OPTIMIZER_PARAMETER)
                    if gradient is not None:
                        mentions.add(gradient, row, Role.OPTIMIZER_GRADIENT)
                    for name, tensor in state:
                        mentions.add(tensor, row, Role.OPTIMIZER_STATE, number(name))
        return np.array(calls, MODULE_CALL)

    def _read_allocations(self, fields: Sequence[Any], events: NDArray[Any]) -> NDArray[Any]:
        rows = np.flatnonzero(events["kind"] == EventKind.ALLOCATION)
        table = np.zeros(len(rows), ALLOCATION)
        if not len(rows):
            return table
        ids, allocation_ids, devices, pointers, sizes, allocated, reserved = zip(
            *(_ALLOCATION(fields[row]) for row in rows.tolist()), strict=True
        )
        table["event"] = rows
        table["keyed"] = [None not in key for key in zip(ids, allocation_ids, strict=True)]
        table["device"] = [self.device_numbers[device] for device in devices]
        table["id"] = [value or 0 for value in ids]
        table["allocation_id"] = [value or 0 for value in allocation_ids]
        table["ptr"] = pointers
        table["size_bytes"] = sizes
        table["total_allocated"] = allocated
        table["total_reserved"] = reserved
        return table

    def _settle_unkeyed(
        self, fields: Sequence[Any], events: NDArray[Any], tensors: NDArray[Any]
    ) -> None:
        """Resolve operators again in which a tensor turned out to have no identity."""
        inputs = tensors["role"] == Role.OPERATOR_INPUT
        for row in np.unique(tensors["event"][inputs & ~tensors["keyed"]]).tolist():
            signature = self._inputs.resolve_again(fields[row])
            events["is_operator"][row] = signature.is_operator
            mine = inputs & (tensors["event"] == row)
            arguments = tensors["argument"][mine]
            tensors["mutable"][mine] = [signature.mutable[a] for a in arguments.tolist()]


@dataclass(frozen=True, slots=True)
class _Tree:
    """The nodes worth keeping in depth-first order, their fields, and their rows.

    The rows have ``kind``, ``parent`` and ``end`` set.
    """

    nodes: list[Any]
    fields: list[Any]
    events: NDArray[Any]
    gaps: list[Gap]


def _flatten(roots: Sequence[Any]) -> _Tree:
    nodes: list[Any] = []
    parents: list[int] = []
    stack, above = list(reversed(roots)), [-1] * len(roots)
    while stack:
        node = stack.pop()
        nodes.append(node)
        parents.append(above.pop())
        if children := node.children:
            above += [len(nodes) - 1] * len(children)
            stack += reversed(children)
    fields = torch_api.fields_of(nodes)
    kinds = [_KINDS.get(type(field), EventKind.OTHER) for field in fields]
    kept, sizes = _kept(parents, kinds, fields)
    rows = np.flatnonzero(kept)
    new_row = np.cumsum(kept, dtype=np.int32) - 1
    events = np.zeros(len(rows), EVENT)
    old_parents = np.array(parents, np.int32)[rows]
    events["kind"] = np.array(kinds, np.uint8)[rows]
    events["parent"] = np.where(old_parents >= 0, new_row[old_parents], -1)
    events["end"] = np.arange(len(rows)) + np.array(sizes, np.int32)[rows]
    order = rows.tolist()
    gaps = [
        Gap(int(new_row[parent]), tuple(new_row[operators].tolist()), *_lines(fields, around))
        for parent, operators, around in _gaps(parents, kinds)
    ]
    return _Tree([nodes[row] for row in order], [fields[row] for row in order], events, gaps)


def _kept(
    parents: Sequence[int], kinds: Sequence[EventKind], fields: Sequence[Any]
) -> tuple[list[bool], list[int]]:
    """Which nodes are worth keeping, and how many such are in each subtree, itself included."""
    kept = [
        kind not in _PYTHON
        or (kind is EventKind.PY_CALL and not (field.module is None and field.optimizer is None))
        for kind, field in zip(kinds, fields, strict=True)
    ]
    # Children come after their parents, so walking backwards meets every descendant first.
    sizes = list(map(int, kept))
    for row in range(len(parents) - 1, -1, -1):
        if sizes[row]:
            if not kept[row]:
                kept[row] = True
                sizes[row] += 1
            if (parent := parents[row]) >= 0:
                sizes[parent] += sizes[row]
    return kept, sizes


def _gaps(
    parents: Sequence[int], kinds: Sequence[EventKind]
) -> Iterator[tuple[int, list[int], tuple[int, int]]]:
    """Runs of operators directly below a Python function, and the calls around (-1: none)."""
    open_gaps: dict[int, tuple[int, list[int]]] = {}
    for row, (parent, kind) in enumerate(zip(parents, kinds, strict=True)):
        if kind in _PYTHON:
            before, operators = open_gaps.pop(parent, (-1, []))
            if operators:
                yield parent, operators, (before, row)
            open_gaps[parent] = (row, [])
        elif kind is EventKind.TORCH_OP and parent >= 0 and kinds[parent] is EventKind.PY_CALL:
            open_gaps.setdefault(parent, (-1, []))[1].append(row)
    for parent, (before, operators) in open_gaps.items():
        if operators:
            yield parent, operators, (before, -1)


def _lines(fields: Sequence[Any], rows: tuple[int, int]) -> tuple[int, int]:
    before, after = (fields[row].caller.line_number if row >= 0 else 0 for row in rows)
    return before, after
