"""The rows that the library has noted, as tables of a trace."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from pytest_torchmem.record.native.library import Library
from pytest_torchmem.record.recorded_tables import StringTable, Tables
from pytest_torchmem.values.packed import packed
from pytest_torchmem.values.trace import (
    ALLOCATION,
    DETAIL,
    EVENT,
    LETTERS,
    MODULE_CALL,
    OVERLOAD,
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
        rows, mentions = self._rows()
        kinds = rows["kind"].copy()
        events = self._events(rows)
        # Memory that was not seen to be made: its birth stands where an operator met it first.
        is_met = (kinds == EventKind.ALLOCATION) & (rows["scope"] > 0)
        were_there = _were_there(rows, is_met, known)
        of_others = is_met & (rows["scope"] == _OF_OTHERS)
        events["kind"][of_others | were_there] = EventKind.OTHER
        operators = np.flatnonzero(kinds == EventKind.TORCH_OP)
        calls = np.flatnonzero(kinds == EventKind.PY_CALL)
        marks = np.flatnonzero(kinds == MARK_ROW)
        self.placed = np.stack([rows["value"][marks], marks], axis=1)
        events["name"] = self.strings.number("")
        module_calls, details = self._fill_calls(rows, calls, events)
        overloads, writes = self._fill_operators(rows, operators, events)
        # One after the other: of a long recording no two are there in full.
        packed_events, packed_overloads = packed(events), packed(overloads)
        del events, overloads
        return Tables(
            packed_events,
            packed(self._tensors(rows, mentions, writes)),
            packed(self._allocations(rows, mentions, ~were_there)),
            packed(module_calls),
            packed_overloads,
            packed(details),
        )

    def _rows(self) -> tuple[NDArray[np.void], NDArray[np.void]]:
        """Return the rows of all threads, and the mentions in them: parents and ends are rows."""
        rows, mentions, first = [], [], 0
        for thread, (own, mentioned) in enumerate(self._library.threads(ROW, MENTION)):
            count = len(own)
            own["end"][own["end"] == 0] = count
            own["end"] += first
            own["parent"][own["parent"] >= 0] += first
            mentioned["row"] += first
            rows.append((thread, own))
            mentions.append(mentioned)
            first += count
        self._thread = np.repeat(
            np.array([t for t, _ in rows], np.int32), [len(own) for _, own in rows]
        )
        if len(rows) == 1:
            return rows[0][1], mentions[0]  # no second copy of what most recordings are
        return (
            np.concatenate([np.empty(0, ROW), *(own for _, own in rows)]),
            np.concatenate([np.empty(0, MENTION), *mentions]),
        )

    def _events(self, rows: NDArray[np.void]) -> NDArray[np.void]:
        events = np.empty(len(rows), EVENT)
        for name in ("kind", "parent", "end", "line", "start_ns"):
            events[name] = rows[name]
        events["thread"] = self._thread
        events["scope"], events["is_operator"] = Scope.NONE, False
        events["file"] = events["sequence"] = -1
        is_memory = rows["kind"] == EventKind.ALLOCATION
        stops = np.where(rows["stop"] == 0, self._library.now_ns(), rows["stop"])
        events["end_ns"] = np.where(is_memory, rows["start_ns"], stops)
        return events

    def _fill_calls(
        self, rows: NDArray[np.void], calls: NDArray[np.int64], events: NDArray[np.void]
    ) -> tuple[NDArray[np.void], NDArray[np.void]]:
        """Fill names and files of Python calls; return those of modules, and what each is called.

        As torch's profiler has it: ``path/to/file.py(12): function``, with the function's line.
        """
        numbers = rows["name"][calls]
        codes, place = np.unique(numbers, return_inverse=True)
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
        table = np.array(known, np.int32).reshape(-1, 4)[place]
        events["name"][calls], events["file"][calls] = table[:, 0], table[:, 1]
        of_modules = table[:, 2] >= 0
        module_calls = np.empty(np.count_nonzero(of_modules), MODULE_CALL)
        module_calls["event"] = calls[of_modules]
        module_calls["module"] = rows["value"][calls[of_modules]].view(np.uint64)
        module_calls["class_name"] = table[of_modules, 2]
        details = np.full(len(calls), -1, DETAIL)
        details["event"], details["text"] = calls, table[:, 3]
        return module_calls, details

    def _fill_operators(
        self, rows: NDArray[np.void], operators: NDArray[np.int64], events: NDArray[np.void]
    ) -> tuple[NDArray[np.void], NDArray[np.int32]]:
        """Fill the rest of operators.

        Return their overloads, and for each row where the letters of its arguments start, and how
        many there are.
        """
        names, place = np.unique(rows["name"][operators], return_inverse=True)
        number, known = self.strings.number, []
        letters: list[str] = []
        for name in names.tolist():
            text, overload, writes = self._library.name(name)
            known.append(
                (
                    number(text),
                    writes is not None,
                    number(overload),
                    number(writes or ""),
                    len(letters),
                    len(writes or ""),
                )
            )
            letters += writes or ""
        table = np.array(known, np.int32).reshape(-1, 6)[place]
        scopes = rows["scope"][operators]
        is_operator = (table[:, 1] > 0) & (scopes == Scope.FUNCTION)
        events["name"][operators] = table[:, 0]
        events["is_operator"][operators] = is_operator
        events["scope"][operators] = np.minimum(scopes, Scope.OTHER)
        events["sequence"][operators] = rows["value"][operators]
        # As in torch's own tree, the evaluation of a node has the node's number.
        nodes = operators[scopes == Scope.BACKWARD_FUNCTION][::-1]
        around = events["parent"][nodes]
        evaluated = (around >= 0) & (rows["kind"][around] == EventKind.TORCH_OP)
        evaluated &= (rows["scope"][around] == Scope.FUNCTION) & (rows["value"][around] < 0)
        events["sequence"][around[evaluated]] = events["sequence"][nodes[evaluated]]
        overloads = np.empty(len(operators), OVERLOAD)
        overloads["event"], overloads["names"] = operators, table[:, 2]
        overloads["writes"] = table[:, 3]
        starts = np.zeros((len(rows), 2), np.int32)
        starts[operators[is_operator]] = table[is_operator, 4:]
        self._letters = np.array([LETTERS.index(letter) for letter in letters], np.uint8)
        return overloads, starts

    def _tensors(
        self,
        rows: NDArray[np.void],
        mentions: NDArray[np.void],
        starts: NDArray[np.int32],
    ) -> NDArray[np.void]:
        table = np.zeros(len(mentions), TENSOR)
        table["event"], table["argument"] = mentions["row"], mentions["argument"]
        table["role"], table["keyed"], table["name"] = Role.OPERATOR_INPUT, True, -1
        table["ptr"], table["size_bytes"] = mentions["ptr"], mentions["size_bytes"]
        table["device"] = self._devices(mentions["device"])
        table["mutable"] = Mutable.UNKNOWN
        start, counts = starts[mentions["row"]].T
        # A call from TorchScript may come with more than its schema has.
        known = np.flatnonzero(mentions["argument"] < counts)
        table["mutable"][known] = self._letters[start[known] + mentions["argument"][known]]
        return table

    def _allocations(
        self, rows: NDArray[np.void], mentions: NDArray[np.void], counted: NDArray[np.bool_]
    ) -> NDArray[np.void]:
        found = np.flatnonzero((rows["kind"] == EventKind.ALLOCATION) & counted)
        table = np.zeros(len(found), ALLOCATION)
        table["event"], table["keyed"] = found, True
        table["ptr"], table["size_bytes"] = (
            rows["value"][found].view(np.uint64),
            rows["stop"][found],
        )
        table["device"] = self._devices(rows["device"][found])
        on_gpu = np.flatnonzero(rows["device"][found] != 0)
        if len(on_gpu):
            asked = table["size_bytes"][on_gpu]
            table["requested_bytes"][on_gpu] = asked
            blocks = (np.abs(asked) + _BLOCK - 1) // _BLOCK * _BLOCK
            table["size_bytes"][on_gpu] = np.sign(asked) * blocks
            table["keyed"][on_gpu] = self._are_mentioned(rows, mentions, found[on_gpu])
        return table

    @staticmethod
    def _are_mentioned(
        rows: NDArray[np.void], mentions: NDArray[np.void], allocations: NDArray[np.int64]
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
        found = np.flatnonzero(~is_birth & (last >= 0))
        found = found[pointers[order[last[found]]] == pointers[order[found]]]
        mentioned = np.zeros(len(rows), np.bool_)
        mentioned[births[order[last[found]]]] = True
        return mentioned[allocations]

    def _devices(self, codes: NDArray[np.int16]) -> NDArray[np.int16]:
        """Return the numbers of devices: the library has the type in the upper byte."""
        found, place = np.unique(codes, return_inverse=True)
        numbers = [self.device_names.number(_device(code)) for code in found.tolist()]
        return np.array(numbers, np.int16)[place]


def _were_there(
    rows: NDArray[np.void], is_met: NDArray[np.bool_], known: NDArray[np.uint64]
) -> NDArray[np.bool_]:
    """Return which rows of memory that was met tell of what was there at the start.

    The first at each place does, where a storage is known to have been: what was there was met.
    """
    found = np.zeros(len(rows), np.bool_)
    met = np.flatnonzero(is_met)
    if len(met) and len(known):
        places = rows["value"][met].view(np.uint64)
        _, first = np.unique(places, return_index=True)
        found[met[first[np.isin(places[first], known)]]] = True
    return found


@lru_cache(maxsize=64)
def _device(code: int) -> str:
    kind = torch.profiler.DeviceType(code >> 8).name.lower() if code else "cpu"
    return "cpu" if kind == "cpu" else f"{kind}:{code & 0xFF}"


@lru_cache(maxsize=4096)
def resolved(file: str) -> str:
    """Return the place of a source; the text itself where it is none, such as ``<string>``."""
    return str(Path(file).resolve()) if file.endswith(".py") else file
