"""Tests the library on one small sum, before anything that it sees is believed."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FrameType

import numpy as np
import torch

from pytest_torchmem.contexts import gc_paused
from pytest_torchmem.record.native.library import Library
from pytest_torchmem.record.native.row_reader import RowReader, resolved
from pytest_torchmem.record.recorded_tables import Tables
from pytest_torchmem.record.torch_api.dispatcher import undispatched, unseen_by_modes
from pytest_torchmem.values.packed import Table
from pytest_torchmem.values.trace import EventKind, Role

#: What ``x + 1`` takes for three numbers: 1 as an integer, as a number like x, and the sum.
_BYTES = [4, 8, 12]
# It calls these in all releases; more may stand between them.
_CALLED = {"aten::empty_strided", "aten::copy_"}


@dataclass(frozen=True, slots=True)
class Faults:
    """Return what the library sees wrong, in words; "" where nothing is.

    Attributes:
        memory: Of operators and memory.
        stacks: Of the functions of Python around them.
    """

    memory: str
    stacks: str


def tried(library: Library) -> Faults:
    """Record one small sum with a library and compare."""
    columns, frame = RowReader(library), sys._getframe()
    with gc_paused(), unseen_by_modes(), undispatched():
        numbers = torch.ones(3, dtype=torch.float32, device="cpu")
        library.prepare()
        library.begin()
        try:
            result, line = numbers + 1, frame.f_lineno
            del result
        finally:
            library.end()
    try:
        tables = columns.read()
        memory = _wrong_memory(tables, columns, numbers.untyped_storage().data_ptr())
        stacks = memory or _wrong_stack(tables, columns, _calls(frame, line))
        return Faults(memory, stacks)
    except Exception as error:  # of rows that make no sense, anything may come
        return Faults(f"{type(error).__name__}: {error}", "")
    finally:
        library.let_go()


def _wrong_memory(tables: Tables, columns: RowReader, input_address: int) -> str:
    events, strings = tables.events, columns.strings.values()
    operators = np.flatnonzero((events["kind"] == EventKind.TORCH_OP) & (events["thread"] == 0))
    names = [strings[number] for number in events["name"][operators].tolist()]
    if not names or names[0] != "aten::add" or not set(names) >= _CALLED:
        return f"x + 1 called {', '.join(names) or 'no operator'}"
    first = operators[0]
    if not (operators < events["end"][first]).all():
        return "the operators that aten::add calls are not within it"
    mentioned = tables.tensors[tables.tensors["event"] == first]
    is_mention = (mentioned["ptr"] == input_address) & (mentioned["role"] == Role.OPERATOR_INPUT)
    if mentioned["size_bytes"][is_mention].tolist() != [12]:
        return "the input of aten::add was not seen"
    return _wrong_allocations(np.array(tables.allocations), np.array(events))


def _wrong_allocations(allocations: Table, events: Table) -> str:
    live, sizes = set(), []
    for row in np.asarray(allocations)[events["thread"][allocations["event"]] == 0]:
        if row["size_bytes"] > 0:
            live.add(int(row["ptr"]))
            sizes.append(int(row["size_bytes"]))
        else:
            live.discard(int(row["ptr"]))
    if sorted(sizes) != _BYTES:
        return f"x + 1 took {sizes} bytes, and not {_BYTES}"
    return f"{len(live)} of {len(sizes)} allocations were not seen to be freed" if live else ""


def _calls(frame: FrameType | None, line: int) -> list[tuple[str, str, int]]:
    """Return the functions that run, outermost first: name, file, and the line each is on."""
    calls = []
    while frame is not None:
        calls.append((frame.f_code.co_name, resolved(frame.f_code.co_filename), line))
        frame = frame.f_back
        line = frame.f_lineno or 0 if frame else 0
    return calls[::-1]


def _wrong_stack(tables: Tables, columns: RowReader, calls: list[tuple[str, str, int]]) -> str:
    events, strings = tables.events, columns.strings.values()
    row, line, seen_calls = int(tables.allocations["event"][0]), 0, []
    line = int(events["line"][row])
    while (row := int(events["parent"][row])) >= 0:
        if events["kind"][row] == EventKind.PY_CALL:
            name, file = (strings[int(events[part][row])] for part in ("name", "file"))
            seen_calls.append((name, file, line))
            line = int(events["line"][row])
    seen_calls.reverse()
    for seen, there in zip(seen_calls, calls, strict=False):
        if seen != there:
            return "{} ({}:{}) was seen where {} ({}:{}) ran".format(*seen, *there)
    if len(seen_calls) != len(calls):
        return f"{len(seen_calls)} functions were seen where {len(calls)} ran"
    return ""
