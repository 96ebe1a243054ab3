"""Traces written by hand: what a recorder would have seen, in a few lines.

    b = TraceBuilder()
    w = b.existing(100, Ownership.PARAMETER)
    with b.op("aten::mm", reads=[w]):
        y = b.alloc(40)
    b.free(y)
    profile = analyze(b.build())

Time passes by one with every event, and rows come in the order of time. Whatever is not said is
what a CPU recording of a body on one thread would hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from pytest_torchmem.values.trace import (
    ALLOCATION,
    CREATE_GRAPH,
    EVENT,
    MARK,
    MODULE_CALL,
    MODULE_EDGE,
    OWNER,
    TENSOR,
    EventKind,
    MarkKind,
    Mutable,
    Ownership,
    Role,
    Scope,
    Trace,
)


@dataclass(frozen=True)
class Block:
    """A piece of memory: one allocation, or one that was there before."""

    number: int
    ptr: int
    size_bytes: int
    device: int = 0


class TraceBuilder:
    """Notes events as they are told, and turns them into a trace."""

    def __init__(self, devices: Sequence[str] = ("cpu",)) -> None:
        self._devices = tuple(devices)
        self._strings: dict[str, int] = {}
        self._rows: dict[str, list[dict[str, Any]]] = {
            name: [] for name in ("events", "tensors", "allocations", "marks", "owners", "edges")
        }
        self._calls: list[dict[str, Any]] = []
        self._open: list[int] = []
        self._blocks = 0
        self._now = 0
        self._start = self._mark_row(MarkKind.START, "", -1)

    # --- what runs ----------------------------------------------------------------------------

    @contextmanager
    def op(
        self,
        name: str,
        reads: Sequence[Block] = (),
        writes: Sequence[Block] = (),
        scope: Scope = Scope.FUNCTION,
        is_operator: bool = True,
        sequence: int = -1,
        kind: EventKind = EventKind.TORCH_OP,
    ) -> Iterator[int]:
        """An operator around what happens in the block; its inputs are ``reads`` and ``writes``."""
        row = self._event(
            kind, name, scope=scope, is_operator=is_operator, sequence=sequence, end=-1
        )
        for argument, block in enumerate((*reads, *writes)):
            self.mention(block, row, argument=argument, writes=block in writes)
        self._open.append(row)
        try:
            yield row
        finally:
            self._open.pop()
            events = self._rows["events"]
            events[row]["end"] = len(events)
            events[row]["end_ns"] = self._now
            self._now += 1

    @contextmanager
    def node(self, name: str, reads: Sequence[Block] = ()) -> Iterator[int]:
        """A node of the backward graph, within the engine's event for it."""
        with (
            self.op(f"autograd::engine::evaluate_function: {name}", is_operator=False),
            self.op(name, reads, scope=Scope.BACKWARD_FUNCTION, is_operator=False) as row,
        ):
            yield row

    @contextmanager
    def backward(self, create_graph: bool = False) -> Iterator[None]:
        self.mark(MarkKind.BACKWARD_BEGIN, CREATE_GRAPH if create_graph else "")
        yield
        self.mark(MarkKind.BACKWARD_END)

    @contextmanager
    def optimizer_step(self) -> Iterator[None]:
        self.mark(MarkKind.OPTIMIZER_BEGIN)
        yield
        self.mark(MarkKind.OPTIMIZER_END)

    @contextmanager
    def module(self, module: int, class_name: str = "Net") -> Iterator[int]:
        """A call of the module with that ``id()``."""
        with self.op(f"nn.Module: {class_name}", kind=EventKind.PY_CALL, is_operator=False) as row:
            self._calls.append(
                {"event": row, "module": module, "class_name": self._string(class_name)}
            )
            yield row

    # --- memory -------------------------------------------------------------------------------

    def existing(self, size_bytes: int, *owners: Ownership, device: int = 0) -> Block:
        """A block from before the recording, held as ``owners``."""
        block = self._block(size_bytes, None, device)
        for kind in (Ownership.LIVE, *owners):
            self.owner(block, kind, mark=self._start)
        return block

    def unheard_of(self, size_bytes: int, device: int = 0) -> Block:
        """A block that was there before or is another allocator's: no Python object has it."""
        return self._block(size_bytes, None, device)

    def alloc(self, size_bytes: int, at: Block | None = None, device: int = 0) -> Block:
        """Allocate, in the place of a dead block if ``at`` is one."""
        block = self._block(size_bytes, at, device)
        self._allocation(block, size_bytes)
        return block

    def free(self, block: Block) -> None:
        self._allocation(block, -block.size_bytes)

    def mention(
        self,
        block: Block,
        event: int,
        role: Role = Role.OPERATOR_INPUT,
        argument: int = -1,
        writes: bool = False,
    ) -> None:
        self._rows["tensors"].append(
            {
                "event": event,
                "role": role,
                "argument": argument,
                "mutable": Mutable.YES if writes else Mutable.NO,
                "keyed": True,
                "device": block.device,
                "name": -1,
                "id": block.number,
                "allocation_id": block.number,
                "ptr": block.ptr,
                "size_bytes": block.size_bytes,
            }
        )

    def read(self, *blocks: Block, name: str = "aten::view") -> None:
        """An operator that looks at blocks and makes nothing."""
        with self.op(name, reads=blocks):
            pass

    # --- what is known ------------------------------------------------------------------------

    def mark(self, kind: MarkKind, text: str = "") -> int:
        """Note a moment; returns its number."""
        row = self._event(EventKind.OTHER, "mark")
        return self._mark_row(kind, text, row)

    def owner(
        self,
        block: Block,
        kind: Ownership,
        mark: int | None = None,
        module: int = 0,
        name: str = "",
    ) -> None:
        """Say that a block is held as ``kind``, at the last mark if not told otherwise."""
        self._rows["owners"].append(
            {
                "mark": len(self._rows["marks"]) - 1 if mark is None else mark,
                "kind": kind,
                "device": block.device,
                "ptr": block.ptr,
                "size_bytes": block.size_bytes,
                "module": module,
                "name": self._string(name),
            }
        )

    def part_of(
        self,
        child: int,
        parent: int,
        name: str,
        class_name: str = "Net",
        mark: int | None = None,
    ) -> None:
        """Say that a module is part of another one: from the start, if not told otherwise."""
        self._rows["edges"].append(
            {
                "mark": self._start if mark is None else mark,
                "child": child,
                "parent": parent,
                "name": self._string(name),
                "class_name": self._string(class_name),
            }
        )

    def build(self) -> Trace:
        """The trace of all that was told, ended by a STOP mark."""
        self.mark(MarkKind.STOP)
        rows = self._rows
        tensors = _table(rows["tensors"], TENSOR)
        return Trace(
            events=_table(rows["events"], EVENT),
            tensors=tensors[np.argsort(tensors["event"], kind="stable")],
            allocations=_table(rows["allocations"], ALLOCATION),
            module_calls=_table(self._calls, MODULE_CALL),
            marks=_table(rows["marks"], MARK),
            owners=_table(rows["owners"], OWNER),
            module_edges=_table(rows["edges"], MODULE_EDGE),
            strings=tuple(self._strings),
            devices=self._devices,
            meta={"device": self._devices[0]},
        )

    # --- rows ---------------------------------------------------------------------------------

    def _string(self, text: str) -> int:
        return self._strings.setdefault(text, len(self._strings))

    def _block(self, size_bytes: int, at: Block | None, device: int) -> Block:
        self._blocks += 1
        ptr = 4096 * self._blocks if at is None else at.ptr
        return Block(self._blocks, ptr, size_bytes, device)

    def _event(self, kind: EventKind, name: str, **columns: Any) -> int:
        row = len(self._rows["events"])
        self._now += 1
        columns.setdefault("scope", Scope.NONE)
        columns.setdefault("sequence", -1)
        columns.setdefault("end", row + 1)
        self._rows["events"].append(
            {
                "kind": kind,
                "parent": self._open[-1] if self._open else -1,
                "name": self._string(name),
                "file": -1,
                "start_ns": self._now,
                "end_ns": self._now,
                **columns,
            }
        )
        return row

    def _mark_row(self, kind: MarkKind, text: str, event: int) -> int:
        marks = self._rows["marks"]
        row = {"kind": kind, "time_ns": self._now, "event": event, "text": self._string(text)}
        marks.append(row)
        return len(marks) - 1

    def _allocation(self, block: Block, size_bytes: int) -> None:
        event = self._event(EventKind.ALLOCATION, "[memory]")
        self._rows["allocations"].append(
            {
                "event": event,
                "keyed": True,
                "device": block.device,
                "id": block.number,
                "allocation_id": block.number,
                "ptr": block.ptr,
                "size_bytes": size_bytes,
            }
        )


def _table(rows: list[dict[str, Any]], dtype: np.dtype[Any]) -> Any:
    """Rows as a structured array; columns that a row does not name are 0."""
    table = np.zeros(len(rows), dtype)
    for index, row in enumerate(rows):
        for column, value in row.items():
            table[column][index] = value
    return table
