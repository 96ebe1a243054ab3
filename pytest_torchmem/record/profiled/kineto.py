"""The profiler's event tree, turned into the columns of a trace."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import compress, count
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from pytest_torchmem.contexts import gc_paused
from pytest_torchmem.record.devices import device_name
from pytest_torchmem.record.profiled.event_tree import (
    EventTree,
    WorthKeeping,
    are_calls,
    find_kept,
    line_of,
    read_tree,
    times_of,
)
from pytest_torchmem.record.profiled.mentions import InputShapes, InputSizes, Mentions, signature_of
from pytest_torchmem.record.profiled.python_calls import PythonCalls, find_gaps
from pytest_torchmem.record.recorded_tables import StringTable, Tables
from pytest_torchmem.record.torch_api import profiler
from pytest_torchmem.values.packed import Table
from pytest_torchmem.values.trace import (
    ALLOCATION,
    DETAIL,
    EVENT,
    MODULE_CALL,
    EventKind,
    Role,
    Scope,
)

#: Marks travel through the profiler as annotations, so that they stand in the tree exactly where
#: they happened.
MARKED: Final = "pytest-torchmem mark "
_MARK_NAME: Final = re.compile(rf"{MARKED}(\d+)")


def place_marks(events: Table, marks: NDArray[np.void], strings: StringTable) -> None:
    """Give each mark the row and time at which it stands in the tree."""
    texts = strings.values()
    numbers = {
        number: int(match[1])
        for number, text in enumerate(texts)
        if text.startswith(MARKED) and (match := _MARK_NAME.fullmatch(text))
    }
    is_mark = np.zeros(len(texts), np.bool_)
    is_mark[list(numbers)] = True
    names, kinds = events["name"], events["kind"]
    rows = np.flatnonzero((kinds == EventKind.TORCH_OP) & is_mark[names])
    placed = np.array([numbers[name] for name in names[rows].tolist()], np.int64)
    marks["event"][placed] = rows
    marks["time_ns"][placed] = events["start_ns"][rows]
    kinds[rows] = EventKind.OTHER
    events["kind"] = kinds


class _DeviceNumbers(dict[torch.device, int]):
    """Numbers devices as they are first met."""

    def __init__(self, names: StringTable) -> None:
        super().__init__()
        self._names = names

    def __missing__(self, device: torch.device) -> int:
        number = self[device] = self._names.number(device_name(device))
        return number


class TreeReader:
    """Reads event trees. Strings, devices and schemas are shared between the trees it reads.

    Attributes:
        threads: All that have more than calls of Python, as torch numbers them.
    """

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.strings = StringTable()
        self.device_names = StringTable()
        self.device_numbers = _DeviceNumbers(self.device_names)
        self._shapes = InputShapes(self.strings)
        self._python = PythonCalls(self.strings)
        self._thread_places: defaultdict[int, int] = defaultdict(count().__next__)

    def read(self, result: profiler.ProfilerResult, whole: bool = False) -> Tables:
        """Return the tables of one profiling session; ``result`` is its kineto result.

        ``whole`` asks for every event, and for details that only an analysis of times needs.
        """
        # Reading makes many small objects and no cycles: looking for some on the way would cost
        # as much as the reading itself.
        with gc_paused():
            sizes = InputSizes(self.strings) if whole else None
            mentions = Mentions(self._shapes, sizes)
            tree = read_tree(result.experimental_event_tree(), mentions, whole)
            return self._tables(result, tree, mentions, sizes)

    def _tables(
        self,
        result: profiler.ProfilerResult,
        tree: EventTree,
        mentions: Mentions,
        sizes: InputSizes | None,
    ) -> Tables:
        self.threads.update(tree.times.threads)
        kept = find_kept(tree, sizes is not None)
        calls = tree.calls(kept.calls)
        events = _events(tree, kept, calls)
        self._fill_operators(tree, events)
        operators = _rows_of(events, EventKind.TORCH_OP)
        events["sequence"][operators] = _unique_sequences(
            self._thread_places, tree, events["is_operator"][operators], result
        )
        texts, call_details = self._fill_python(calls, events)
        text_of = dict(zip(np.flatnonzero(are_calls(events["kind"])).tolist(), texts, strict=True))
        self._place_operators(tree, kept, text_of, events)
        details = np.concatenate([call_details, self._details(tree, sizes, events)])
        details = details[np.argsort(details["event"], kind="stable")]
        module_calls = self._add_owners(tree, kept, events, mentions)
        allocations = self._allocations(tree, events)
        tensors = mentions.table(operators, tree.shapes, allocations, self.device_numbers)
        _settle_unkeyed(mentions, operators, events, tensors)
        # A tensor without identity has no memory, or none that the profiler knows. To take them for
        # one storage would have each say what the others are: an empty result, a parameter.
        tensors = tensors[tensors["keyed"]]
        tensors = tensors[np.argsort(tensors["event"], kind="stable")]
        return Tables(events, tensors, allocations, module_calls, details)

    def _fill_operators(self, tree: EventTree, events: NDArray[np.void]) -> None:
        events["name"] = self.strings.number("")
        events["file"] = -1
        events["scope"] = Scope.NONE
        events["sequence"] = -1
        rows, known = _rows_of(events, EventKind.TORCH_OP), self._shapes.known
        shapes = np.array(tree.shapes, np.int64)
        names = np.array([shape.name for shape in known], np.int32)
        is_operator = np.array([shape.is_operator for shape in known], np.bool_)[shapes]
        events["name"][rows] = names[shapes]
        events["is_operator"][rows] = is_operator
        # Only annotations and nodes of the backward graph have other scopes than functions, and
        # neither has a schema.
        events["scope"][rows] = Scope.FUNCTION
        events["scope"][rows[~is_operator]] = [min(int(s), Scope.OTHER) for s in tree.scopes]

    def _fill_python(
        self, calls: Sequence[profiler.ProfilerEvent], events: NDArray[np.void]
    ) -> tuple[list[str], NDArray[np.void]]:
        """Fill names, files and lines of Python calls; return their texts and their details."""
        rows = np.flatnonzero(are_calls(events["kind"]))
        texts = [profiler.name_of(call) for call in calls]
        lines = list(map(line_of, calls))
        details = np.full(len(rows), -1, DETAIL)
        details["event"] = rows
        details["text"] = self._python.read(rows, texts, lines, events)
        return texts, details

    def _place_operators(
        self,
        tree: EventTree,
        kept: WorthKeeping,
        text_of: Mapping[int, str],
        events: NDArray[np.void],
    ) -> None:
        gaps = find_gaps(tree, kept, lambda row: self._python.is_users(text_of[row]))
        names = self.strings.values()
        self._python.place_operators(
            gaps,
            [text_of[gap.parent] for gap in gaps],
            [names[name] for gap in gaps for name in events["name"][list(gap.operators)].tolist()],
            events,
        )

    def _details(
        self, tree: EventTree, sizes: InputSizes | None, events: NDArray[np.void]
    ) -> NDArray[np.void]:
        """Return the details of a whole tree's operators; none of another tree."""
        details = np.full(len(tree.operators), -1, DETAIL)
        if sizes is not None:
            details["event"] = _rows_of(events, EventKind.TORCH_OP)
            details["inputs"] = sizes.numbers
            overloads = map(profiler.overload_of, tree.operators)
            details["overload"] = [self.strings.number(overload) for overload in overloads]
            details["correlation"] = [event.correlation_id for event in tree.operators]
        return details

    def _add_owners(
        self, tree: EventTree, kept: WorthKeeping, events: NDArray[np.void], mentions: Mentions
    ) -> NDArray[np.void]:
        number, calls = self.strings.number, []
        rows = np.flatnonzero(are_calls(events["kind"]))
        for call, module, optimizer in tree.owners:
            row = int(rows[np.searchsorted(kept.calls, call)])
            if module is not None:
                calls.append((row, module.self_ptr, number(module.cls_name)))
                for name, parameter, gradient in module.parameters:
                    mentions.add_owned(parameter, row, Role.MODULE_PARAMETER, number(name))
                    if gradient is not None:
                        mentions.add_owned(gradient, row, Role.MODULE_GRADIENT, number(name))
            if optimizer is not None:
                for parameter, gradient, state in optimizer.parameters:
                    mentions.add_owned(parameter, row, Role.OPTIMIZER_PARAMETER)
                    if gradient is not None:
                        mentions.add_owned(gradient, row, Role.OPTIMIZER_GRADIENT)
                    for name, tensor in state:
                        mentions.add_owned(tensor, row, Role.OPTIMIZER_STATE, number(name))
        return np.array(calls, MODULE_CALL)

    def _allocations(self, tree: EventTree, events: NDArray[np.void]) -> NDArray[np.void]:
        rows = _rows_of(events, EventKind.ALLOCATION)
        table = np.zeros(len(rows), ALLOCATION)
        if not len(rows):
            return table
        allocation_ids, ids, devices, pointers, sizes, allocated = zip(
            *tree.allocations, strict=True
        )
        table["event"] = rows
        table["keyed"] = True
        for name, values in (("id", ids), ("allocation_id", allocation_ids)):
            if None in values:
                table["keyed"] &= [value is not None for value in values]
            table[name] = [value or 0 for value in values] if None in values else values
        table["device"] = list(map(self.device_numbers.__getitem__, devices))
        table["ptr"] = pointers
        table["size_bytes"] = sizes
        table["total_allocated"] = allocated
        return table


def _settle_unkeyed(
    mentions: Mentions,
    operators: NDArray[np.int64],
    events: NDArray[np.void],
    tensors: NDArray[np.void],
) -> None:
    """Resolve operators again in which a tensor turned out to have no identity."""
    for number, operator in mentions.unkeyed.items():
        row = operators[number]
        signature = signature_of(operator)
        events["is_operator"][row] = signature.is_operator
        mine = tensors["event"] == row
        arguments = tensors["argument"][mine]
        tensors["mutable"][mine] = [signature.mutable[a] for a in arguments.tolist()]


def _rows_of(events: NDArray[np.void], kind: EventKind) -> NDArray[np.int64]:
    return np.flatnonzero(events["kind"] == int(kind))


def _events(
    tree: EventTree, kept: WorthKeeping, calls: Sequence[profiler.ProfilerEvent]
) -> NDArray[np.void]:
    """`trace.EVENT` rows with their places and times."""
    events = np.zeros(len(kept.rows), EVENT)
    events["kind"] = tree.kinds[kept.rows]
    parents = tree.parents[kept.rows]
    events["parent"] = np.where(parents >= 0, kept.row[parents], -1)
    events["end"] = kept.end
    threads = np.zeros(len(events), np.uint64)
    is_python = are_calls(events["kind"])
    for rows, times in ((~is_python, tree.times), (is_python, times_of(calls))):
        events["start_ns"][rows] = times.starts_ns
        events["end_ns"][rows] = times.ends_ns
        threads[rows] = times.threads
    # Numbered as they are first met. Nearly always there is one.
    if np.any(threads != threads[:1]):
        numbers: defaultdict[int, int] = defaultdict(count().__next__)
        events["thread"] = [numbers[thread] for thread in threads.tolist()]
    return events


#: How far the numbers of one thread are from those of the next. No thread makes so many nodes.
_APART: Final = 1 << 40


def _unique_sequences(
    places: defaultdict[int, int],
    tree: EventTree,
    makes_nodes: NDArray[np.bool_],
    result: profiler.ProfilerResult,
) -> NDArray[np.int64]:
    """Return the number of each operator of a tree, or -1: int64, shape (N,).

    Each thread counts for itself. On a GPU a backward pass runs on a thread of the engine, and so
    does a forward pass that is run again there: its numbers are those of other operators.
    ``places`` numbers the threads of all sessions of a body. ``makes_nodes`` tells operators of a
    forward pass from nodes of the backward graph.
    """
    sequences = np.array(tree.sequences, np.int64)
    numbered = np.flatnonzero(sequences >= 0)
    one_thread = len({*places, *tree.times.threads}) == 1
    if one_thread and len(numbered) and not _on_device(tree):
        sequences[numbered] += _APART * places[tree.times.threads[0]]
        return sequences
    starts_ns, threads = _times(tree, sequences >= 0)
    forward: set[int] = set(places)
    backward: set[int] = set()
    for thread, makes in zip(threads, makes_nodes[numbered].tolist(), strict=True):
        (forward if makes else backward).add(thread)
    if len(forward) == 1 and not forward & backward:
        threads = [*forward] * len(numbered)
    # On the CPU all of it is one thread, and asking would take half as long as all the reading.
    elif len(forward) > 1 or _on_device(tree):
        made_by = _makers(result)
        threads = [made_by.get(key, key[0]) for key in zip(threads, starts_ns, strict=True)]
    sequences[numbered] += _APART * np.array([places[thread] for thread in threads], np.int64)
    return sequences


def _times(tree: EventTree, chosen: NDArray[np.bool_]) -> tuple[list[int], list[int]]:
    """Start and thread of some of a tree's operators."""
    timed = tree.kinds[~are_calls(tree.kinds)] == EventKind.TORCH_OP
    timed[timed] = chosen
    return list(compress(tree.times.starts_ns, timed)), list(compress(tree.times.threads, timed))


def _on_device(tree: EventTree) -> bool:
    return any(device.type != "cpu" for _, _, device, *_ in tree.allocations)


def _makers(result: profiler.ProfilerResult) -> dict[tuple[int, int], int]:
    """The thread that made each node, by the node's own thread and its start."""
    return {
        (event.start_thread_id(), event.start_ns()): maker
        for event in result.events()
        if (maker := event.fwd_thread_id())
    }
