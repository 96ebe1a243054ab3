"""The rows that the library has noted, as tables of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from pytest_torchmem.record.native.library import Library, Pieces
from pytest_torchmem.record.recorded_tables import StringTable, Tables
from pytest_torchmem.values.packed import Table, table_for
from pytest_torchmem.values.trace import (
    ALLOCATION,
    DETAIL,
    EVENT,
    MODULE_CALL,
    TENSOR,
    EventKind,
    Mutable,
    Role,
    Scope,
)

#: As `Row` and `Mention` in ``observer/rows.h``.
ROW: Final = np.dtype(
    [
        *((name, "i8") for name in ("start_ns", "stop", "value")),
        *((name, "i4") for name in ("parent", "end", "name", "line")),
        ("device", "i2"),
        *((name, "u1") for name in ("kind", "scope")),
    ]
)
MENTION: Final = np.dtype(
    [("ptr", "u8"), ("size_bytes", "i8"), ("row", "i4"), ("argument", "i2"), ("device", "i2")]
)
#: The kind of a row that is a mark; the value of one is the mark's number.
MARK_ROW: Final = int(EventKind.OTHER)
# The scope of a row of memory that others allocated, as `Origin` has it.
_OF_OTHERS: Final = 1
_NOTHING_KNOWN: Final = np.empty(0, np.uint64)
# torch's caching allocators round a request up to a whole number of these.
_BLOCK: Final = 512


class RowReader:
    """Turns rows into tables; strings and devices are numbered for one recording.

    Attributes:
        placed: For each mark that stands among the events its number and its row, after `read`.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self.strings = StringTable()
        self.device_names = StringTable()
        self.placed: NDArray[np.int64] = np.empty((0, 2), np.int64)

    def read(self, known: NDArray[np.uint64] = _NOTHING_KNOWN) -> Tables:
        """Return what all threads did up to now, one thread after the other.

        ``known`` are the places of storages on the CPU that were there at the start.
        """
        rows, mentions = self._noted_rows()
        kinds = rows["kind"]
        # Memory that was not seen to be made: its birth stands where an operator met it first.
        is_met = (kinds == EventKind.ALLOCATION) & (rows["scope"] > 0)
        were_there = _were_there(rows, is_met, known)
        operators = np.flatnonzero(kinds == EventKind.TORCH_OP)
        calls = np.flatnonzero(kinds == EventKind.PY_CALL)
        marks = np.flatnonzero(kinds == MARK_ROW)
        self.placed = np.stack([rows["value"][marks], marks], axis=1)
        # A column after the other: of a long recording no table is there in full.
        events = table_for(len(kinds), EVENT)
        names = np.full(len(kinds), self.strings.number(""), np.int32)
        module_calls, details = self._fill_calls(rows, calls, events, names)
        writes = self._fill_operators(rows, operators, events, names)
        events["name"] = names
        del names
        allocations = self._allocations(rows, mentions, ~were_there)
        tensors = self._tensors(mentions, writes)
        del writes
        is_memory = kinds == EventKind.ALLOCATION
        kinds[were_there | (is_met & (rows["scope"] == _OF_OTHERS))] = EventKind.OTHER
        events["kind"] = kinds
        events["thread"] = rows.threads()
        for name in ("parent", "end", "line"):
            events[name] = rows[name]
        starts, stops = rows["start_ns"], rows["stop"]
        events["start_ns"] = starts
        stops[stops == 0] = self._library.now_ns()
        stops[is_memory] = starts[is_memory]
        events["end_ns"] = stops
        return Tables(events, tensors, allocations, module_calls, details)

    def _noted_rows(self) -> tuple[_NotedRows, _NotedRows]:
        """Return the rows of all threads, and the mentions in them."""
        threads = [*self._library.threads(ROW, MENTION)]
        rows = _NotedRows(ROW, [own for own, _ in threads])
        return rows, _NotedRows(MENTION, [own for _, own in threads], rows)

    def _fill_calls(
        self, rows: _NotedRows, calls: NDArray[np.int64], events: Table, names: NDArray[np.int32]
    ) -> tuple[Table, Table]:
        """Fill names and files of Python calls; return those of modules, and what each is called.

        As torch's profiler has it: ``path/to/file.py(12): function``, with the function's line.
        """
        codes, place = np.unique(rows["name"][calls], return_inverse=True)
        number, known = self.strings.number, []
        for code in codes.tolist():
            file, function, first_line, class_name = self._library.code(code)
            if class_name:
                text = number(f"nn.Module: {class_name}")
                known.append((text, -1, number(class_name), text))
            else:
                name = function.rpartition(".")[2] or function
                text = number(f"{file}({first_line}): {name}")
                known.append((number(name), number(resolved(file)), -1, text))
        table = np.array(known, np.int32).reshape(-1, 4)
        names[calls] = table[place, 0]
        files = np.full(len(names), -1, np.int32)
        files[calls] = table[place, 1]
        events["file"] = files
        del files
        of_modules = np.flatnonzero(table[place, 2] >= 0)
        module_calls = table_for(len(of_modules), MODULE_CALL)
        module_calls["event"] = calls[of_modules]
        module_calls["module"] = rows["value"][calls[of_modules]].view(np.uint64)
        module_calls["class_name"] = table[place[of_modules], 2]
        details = table_for(len(calls), DETAIL)
        for column in DETAIL.names or ():
            details[column] = np.int32(-1)
        details["event"], details["text"] = calls, table[place, 3]
        return module_calls, details

    def _fill_operators(
        self,
        rows: _NotedRows,
        operators: NDArray[np.int64],
        events: Table,
        names: NDArray[np.int32],
    ) -> NDArray[np.int32]:
        """Fill the rest of operators; return each row's number among `_writes`, or -1."""
        numbers, place = np.unique(rows["name"][operators], return_inverse=True)
        number, known = self.strings.number, []
        self._writes: list[str] = []
        for name in numbers.tolist():
            text, writes = self._library.name(name)
            known.append((number(text), writes is not None))
            self._writes.append(writes or "")
        table = np.array(known, np.int32).reshape(-1, 2)
        names[operators] = table[place, 0]
        scopes = rows["scope"][operators]
        is_operator = (table[place, 1] > 0) & (scopes == Scope.FUNCTION)
        whole = np.zeros(len(names), np.bool_)
        whole[operators] = is_operator
        events["is_operator"] = whole
        whole = np.full(len(names), Scope.NONE, np.uint8)
        whole[operators] = np.minimum(scopes, Scope.OTHER)
        events["scope"] = whole
        events["sequence"] = self._sequences(rows, operators, scopes)
        of_rows = np.full(len(names), -1, np.int32)
        of_rows[operators[is_operator]] = place[is_operator]
        return of_rows

    @staticmethod
    def _sequences(
        rows: _NotedRows, operators: NDArray[np.int64], scopes: NDArray[np.uint8]
    ) -> NDArray[np.int64]:
        """Return autograd's number of each row, or -1.

        As in torch's own tree, the evaluation of a node has the node's number.
        """
        values = rows["value"]
        places = np.full(len(values), -1, np.int64)
        places[operators] = values[operators]
        nodes = operators[scopes == Scope.BACKWARD_FUNCTION][::-1]
        around = rows["parent"][nodes]
        evaluated = (around >= 0) & (rows["kind"][around] == EventKind.TORCH_OP)
        evaluated &= (rows["scope"][around] == Scope.FUNCTION) & (values[around] < 0)
        places[around[evaluated]] = places[nodes[evaluated]]
        return places

    def _tensors(self, mentions: _NotedRows, of_rows: NDArray[np.int32]) -> Table:
        events, arguments = mentions["row"], mentions["argument"]
        table = table_for(len(events), TENSOR)
        for name in TENSOR.names or ():
            table[name] = np.zeros(1, TENSOR[name])
        table["event"], table["argument"] = events, arguments
        table["role"], table["keyed"], table["name"] = Role.OPERATOR_INPUT, True, np.int32(-1)
        table["ptr"], table["size_bytes"] = mentions["ptr"], mentions["size_bytes"]
        table["device"] = self._devices(mentions["device"])
        # The letters of all operators in a row, and where each begins; the last one has none.
        counts = np.array([*map(len, self._writes), 0], np.int32)
        starts = np.cumsum(counts) - counts
        letters = np.array(["rw".index(letter) for letter in "".join(self._writes)], np.uint8)
        mutable = np.full(len(events), Mutable.UNKNOWN, np.uint8)
        of_mentions = of_rows[events]
        # A call from TorchScript may come with more than its schema has.
        known_rows = np.flatnonzero(arguments < counts[of_mentions])
        mutable[known_rows] = letters[starts[of_mentions[known_rows]] + arguments[known_rows]]
        table["mutable"] = mutable
        return table

    def _allocations(
        self, rows: _NotedRows, mentions: _NotedRows, counted: NDArray[np.bool_]
    ) -> Table:
        allocations = np.flatnonzero((rows["kind"] == EventKind.ALLOCATION) & counted)
        table = table_for(len(allocations), ALLOCATION)
        for name in ALLOCATION.names or ():
            table[name] = np.zeros(1, ALLOCATION[name])
        devices, sizes = rows["device"][allocations], rows["stop"][allocations]
        keyed = np.ones(len(allocations), np.bool_)
        table["event"], table["device"] = allocations, self._devices(devices)
        table["ptr"] = rows["value"][allocations].view(np.uint64)
        on_gpu = np.flatnonzero(devices != 0)
        if len(on_gpu):
            requested_bytes = np.zeros(len(allocations), np.int64)
            requested_bytes[on_gpu] = sizes[on_gpu]
            table["requested_bytes"] = requested_bytes
            blocks = (np.abs(requested_bytes[on_gpu]) + _BLOCK - 1) // _BLOCK * _BLOCK
            sizes[on_gpu] = np.sign(requested_bytes[on_gpu]) * blocks
            keyed[on_gpu] = self._are_mentioned(rows, mentions, allocations[on_gpu])
        table["size_bytes"], table["keyed"] = sizes, keyed
        return table

    @staticmethod
    def _are_mentioned(
        rows: _NotedRows, mentions: _NotedRows, allocations: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Return which allocations have a tensor that an operator takes: scratch has none.

        Allocations and mentions at one address, in the order of time::

            time       1      2        3      4
            address 7  alloc  mention  free   alloc
            mentioned  True                   False
        """
        births = allocations[rows["stop"][allocations] > 0]
        pointers = np.concatenate([rows["value"][births].view(np.uint64), mentions["ptr"]])
        at = np.concatenate([births, mentions["row"]])
        times = rows["start_ns"][at]
        order = np.lexsort((at, times, pointers))
        is_birth = order < len(births)
        last = np.maximum.accumulate(np.where(is_birth, np.arange(len(order)), -1))
        rereads = np.flatnonzero(~is_birth & (last >= 0))
        rereads = rereads[pointers[order[last[rereads]]] == pointers[order[rereads]]]
        mentioned = np.zeros(rows.count, np.bool_)
        mentioned[births[order[last[rereads]]]] = True
        return mentioned[allocations]

    def _devices(self, codes: NDArray[np.int16]) -> NDArray[np.int16]:
        """Return the numbers of devices: the library has the type in the upper byte."""
        distinct_codes, place = np.unique(codes, return_inverse=True)
        numbers = [self.device_names.number(_device(code)) for code in distinct_codes.tolist()]
        return np.array(numbers, np.int16)[place]


class _NotedRows:
    """The rows of all threads, a column at a time: parents, ends and rows count over all threads.

    Each column is a copy. The table itself lies in the library.
    """

    def __init__(
        self, dtype: np.dtype[np.void], threads: Sequence[Pieces], rows: _NotedRows | None = None
    ) -> None:
        self._dtype, self._threads = dtype, threads
        counts = [sum(map(len, pieces)) for pieces in threads]
        self.count = sum(counts)
        self._counts = np.array(counts, np.int32)
        self._firsts = (np.cumsum(self._counts) - self._counts).astype(np.int32)
        self._rows = rows
        if rows is not None:
            rows_of = (rows._counts[n] for n in range(len(threads)))
            self._threads = [
                [piece[: np.searchsorted(piece["row"], count)] for piece in pieces]
                for pieces, count in zip(threads, rows_of, strict=True)
            ]

    def threads(self) -> NDArray[np.int32]:
        return np.repeat(np.arange(len(self._counts), dtype=np.int32), self._counts)

    def __getitem__(self, name: str) -> NDArray[Any]:
        whole = [np.empty(0, self._dtype[name]), *(p[name] for t in self._threads for p in t)]
        column = np.concatenate(whole)
        if name == "end":
            ends = np.repeat(self._counts, self._counts)
            np.copyto(column, ends, where=column == 0)
        if name in ("end", "parent"):
            np.add(column, np.repeat(self._firsts, self._counts), out=column, where=column >= 0)
        if self._rows is not None and name == "row":
            counts = [sum(map(len, pieces)) for pieces in self._threads]
            column += np.repeat(self._rows._firsts, counts)
        return column


def _were_there(
    rows: _NotedRows, is_met: NDArray[np.bool_], known: NDArray[np.uint64]
) -> NDArray[np.bool_]:
    """Return which rows of memory that was met tell of what was there at the start.

    The first at each place does, where a storage is known to have been: what was there was met.
    """
    is_there = np.zeros(rows.count, np.bool_)
    met = np.flatnonzero(is_met)
    if len(met) and len(known):
        places = rows["value"][met].view(np.uint64)
        _, first = np.unique(places, return_index=True)
        is_there[met[first[np.isin(places[first], known)]]] = True
    return is_there


@lru_cache(maxsize=64)
def _device(code: int) -> str:
    kind = torch.profiler.DeviceType(code >> 8).name.lower() if code else "cpu"
    return "cpu" if kind == "cpu" else f"{kind}:{code & 0xFF}"


@lru_cache(maxsize=4096)
def resolved(file: str) -> str:
    """Return the place of a source; the text itself where it is none, such as ``<string>``."""
    return str(Path(file).resolve()) if file.endswith(".py") else file
