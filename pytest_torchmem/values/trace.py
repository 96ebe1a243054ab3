"""Trace: what a body did, as columns. Recording ends in one, analysis starts from one.

A trace needs numpy and nothing else: one that was recorded on a machine with a GPU can be analysed
on a laptop without torch.
"""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytest_torchmem.values.errors import TraceError, is_torchmem_error
from pytest_torchmem.values.json_values import Json
from pytest_torchmem.values.packed import Table
from pytest_torchmem.values.units import Device, printable, resolve_device

__tracebackhide__ = is_torchmem_error

# A trace of another number is to be recorded again.
FORMAT: Final = 5

# The text of a BACKWARD_BEGIN mark when the backward pass itself is differentiated.
CREATE_GRAPH: Final = "create_graph"
# The text of a STEP mark is whose step it is, this, and the number of the loop.
LOOP: Final = " loop "


class EventKind(enum.IntEnum):
    """The kind of a row of `Trace.events`; the names are those of torch's profiler."""

    TORCH_OP = 0
    ALLOCATION = 1
    PY_CALL = 2
    PY_C_CALL = 3
    OUT_OF_MEMORY = 4
    OTHER = 5


class Scope(enum.IntEnum):
    """torch's ``RecordScope``, as far as the analysis looks at it."""

    FUNCTION = 0
    BACKWARD_FUNCTION = 1
    OTHER = 2
    NONE = 3


class Role(enum.IntEnum):
    """Why a tensor is mentioned in `Trace.tensors`."""

    OPERATOR_INPUT = 0
    MODULE_PARAMETER = 1
    MODULE_GRADIENT = 2
    OPTIMIZER_PARAMETER = 3
    OPTIMIZER_GRADIENT = 4
    OPTIMIZER_STATE = 5


class Mutable(enum.IntEnum):
    """The answer to whether an operator writes to an input; UNKNOWN when no schema fits."""

    NO = 0
    YES = 1
    UNKNOWN = 2


class Ownership(enum.IntEnum):
    """The owner of a storage, as seen at a mark; see `Trace.owners`."""

    LIVE = 0
    PARAMETER = 1
    BUFFER = 2
    GRADIENT = 3
    OPTIMIZER_STATE = 4
    SAVED = 5
    LEAF = 6
    GRADIENT_ROOT = 7
    SURVIVOR = 8
    USED = 9
    WRITTEN = 10
    RETURNED = 11


class MarkKind(enum.IntEnum):
    """The event at a row of `Trace.marks`."""

    START = 0
    STOP = 1
    REGION_BEGIN = 2
    REGION_END = 3
    STEP = 4
    BACKWARD_BEGIN = 5
    BACKWARD_END = 6
    OPTIMIZER_BEGIN = 7
    OPTIMIZER_END = 8
    STORAGE_FREED = 9
    MODULE_SEEN = 10
    CALL = 11


class DeviceEventKind(enum.IntEnum):
    """The kind of a row of `Trace.device_events`."""

    LAUNCH = 0
    KERNEL = 1
    COPY = 2
    ANNOTATION = 3
    RUNTIME = 4


def are_among(codes: NDArray[np.uint8], members: Iterable[int]) -> NDArray[np.bool_]:
    """Return which codes are those of ``members``: bool, of the same shape.

    `numpy.isin` takes ten times as long for the tables of a small test.
    """
    is_call = np.zeros(256, np.bool_)
    is_call[list(members)] = True
    return is_call[codes]


_COLUMNS: Final = {
    "events": "kind:EventKind scope:Scope is_operator:? thread:i4 parent:i4 end:i4 name:text "
    "file:text? line:i4 start_ns:i8 end_ns:i8 sequence:i8",
    "tensors": "event:event role:Role argument:i2 mutable:Mutable keyed:? device:device "
    "name:text? id:i4 allocation_id:i4 ptr:u8 size_bytes:i8",
    "allocations": "event:event keyed:? device:device id:i4 allocation_id:i4 ptr:u8 size_bytes:i8 "
    "requested_bytes:i8 total_allocated:i8",
    "module_calls": "event:event module:u8 class_name:text",
    "device_events": "kind:DeviceEventKind correlation:i8 start_ns:i8 end_ns:i8 name:text? "
    "device:i4 stream:i4",
    "details": "event:event text:text? inputs:text? overload:text? correlation:i8",
    "marks": "kind:MarkKind time_ns:i8 event:event? text:text",
    "owners": "mark:mark kind:Ownership device:device ptr:u8 size_bytes:i8 module:u8 name:text",
    "module_edges": "mark:mark child:u8 parent:u8 name:text class_name:text",
    "compiled_lines": "file:text? line:i4 operator:text? source_file:text? source_line:i4 "
    "function:text? module:u8",
}
COLUMNS: Final[Mapping[str, Mapping[str, str]]] = {
    table: dict(column.split(":") for column in columns.split())
    for table, columns in _COLUMNS.items()
}
"""The columns of each table, and what is in each: numbers of a type of numpy's, the members of an
enum, or places in ``strings``, ``events``, ``marks`` or ``devices``; with ``?`` it may be -1."""

KINDS: Final[Mapping[str, type[enum.IntEnum]]] = {
    kind.__name__: kind
    for kind in (EventKind, Scope, Role, Mutable, Ownership, MarkKind, DeviceEventKind)
}
_PLACES: Final = {"text": "i4", "event": "i4", "mark": "i4", "device": "i2"}
TABLES: Final[Mapping[str, np.dtype[np.void]]] = {
    table: np.dtype(
        [(n, "u1" if k in KINDS else _PLACES.get(k.rstrip("?"), k)) for n, k in columns.items()]
    )
    for table, columns in COLUMNS.items()
}
"""The dtype of each table's rows."""

EVENT: Final = TABLES["events"]
TENSOR: Final = TABLES["tensors"]
ALLOCATION: Final = TABLES["allocations"]
MODULE_CALL: Final = TABLES["module_calls"]
DEVICE_EVENT: Final = TABLES["device_events"]
DETAIL: Final = TABLES["details"]
MARK: Final = TABLES["marks"]
OWNER: Final = TABLES["owners"]
MODULE_EDGE: Final = TABLES["module_edges"]
COMPILED_LINE: Final = TABLES["compiled_lines"]


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """The record of a body. Tables are structured arrays; an ``i4`` that refers to nothing is -1.

    Those about events are packed where they are large.

    Attributes:
        events: `EVENT`, in depth-first order, so that the subtree of row i is
            ``i:events["end"][i]``. ``name`` and ``file`` index `strings`; ``line`` is where the
            call stands in the calling Python function, 0 if unknown; ``is_operator`` says that a
            schema of the operator's name fits its inputs; ``sequence`` is autograd's sequence
            number or -1.
        tensors: `TENSOR`, grouped by event in the order of events; one row per mention of a tensor.
            ``size_bytes`` is the extent the tensor spans, a lower bound of its storage, or 0 where
            that is not known. ``keyed`` says that ``id`` and ``allocation_id`` are the profiler's.
        allocations: `ALLOCATION`, one row for each event of that kind; a free has a negative size.
            On a GPU ``size_bytes`` is the block's, and ``requested_bytes`` what was asked for,
            below 0 where that is freed, or 0
            where that is not known.
        module_calls: `MODULE_CALL`, one row for each Python call of an ``nn.Module``; ``module`` is
            the module's ``id()``.
        device_events: `DEVICE_EVENT`, what a GPU did and the calls that told it to, where the
            profiler saw any. The ``correlation`` is that of the operator which launched it, 0 for
            none; ``device`` and ``stream`` are numbers, -1 for calls on the CPU.
        details: `DETAIL`, at most one row for each event, in their order: the ``text`` by which the
            profiler knows a Python call; of an operator the sizes of its ``inputs`` as text, its
            ``overload``, and the ``correlation`` of what it launches. A recording of ours has the
            texts alone.
        marks: `MARK`, moments that the recorder noted itself; ``event`` is where the mark stands in
            `events`, or -1 if only its time is known.
        owners: `OWNER`, which storages were held by whom at a mark; ``module`` is the ``id()`` of
            the module that holds it under ``name``, or 0. At a STORAGE_FREED mark: what was freed.
            At a CALL mark: what a graph of inductor's is called with (USED).
        module_edges: `MODULE_EDGE`, which module was found under which name of which parent
            (parent 0: a module that stood alone).
        compiled_lines: `COMPILED_LINE`, what a line of generated code stands for: the ``operator``
            ("" if the events say it themselves), the user's ``source_file``, ``source_line`` and
            ``function`` (-1 if none is known), and the ``id()`` of the module (0 if none is known);
            one row for each module that it may be.
        strings: Names and paths, each once. They are printable, whatever a program calls its
            modules: every name in a result comes from here.
        devices: Device names, ``"cpu"``, ``"cuda:0"``; indexed by every ``device`` column.
        meta: JSON values: ``library_paths`` (folders whose frames are not the user's), versions,
            ``counters`` of the device.
    """

    events: Table = field(default_factory=np.empty(0, EVENT).copy)
    tensors: Table = field(default_factory=np.empty(0, TENSOR).copy)
    allocations: Table = field(default_factory=np.empty(0, ALLOCATION).copy)
    module_calls: Table = field(default_factory=np.empty(0, MODULE_CALL).copy)
    device_events: NDArray[np.void] = field(default_factory=np.empty(0, DEVICE_EVENT).copy)
    details: Table = field(default_factory=np.empty(0, DETAIL).copy)
    marks: NDArray[np.void] = field(default_factory=np.empty(0, MARK).copy)
    owners: NDArray[np.void] = field(default_factory=np.empty(0, OWNER).copy)
    module_edges: NDArray[np.void] = field(default_factory=np.empty(0, MODULE_EDGE).copy)
    compiled_lines: NDArray[np.void] = field(default_factory=np.empty(0, COMPILED_LINE).copy)
    strings: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    meta: Mapping[str, Json] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "strings", tuple(map(printable, self.strings)))

    def device_named(self, device: Device | None = None) -> str:
        """Return the device that a name means here, by default the one that was recorded for.

        Raises `DeviceError` for one that is not in `devices`. Tensors on ``meta`` have no memory.
        """
        if device is None:
            return str(self.meta.get("device", "cpu"))
        there = [name for name in self.devices if not name.startswith("meta")]
        return resolve_device(device, there, "the recording")

    def texts_are(
        self, numbers: NDArray[np.int32], wanted: Callable[[str], bool]
    ) -> NDArray[np.bool_]:
        """Return which ``numbers`` of `strings` stand for a text that is ``wanted``; -1 does not.

        Each text that they stand for is looked at once, and none of the others: most are names of
        Python's functions.
        """
        answers = np.zeros(len(self.strings) + 1, np.bool_)
        answers[numbers] = True
        answers[-1] = False
        for number in np.flatnonzero(answers).tolist():
            answers[number] = wanted(self.strings[number])
        return answers[numbers]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace to ``path``, a compressed numpy archive.

        Raises `TraceError` when the file cannot be written.
        """
        header = {
            "format": FORMAT,
            "strings": self.strings,
            "devices": self.devices,
            "meta": dict(self.meta),
        }
        text = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
        tables = {name: getattr(self, name) for name in TABLES}
        try:
            with Path(path).open("wb") as file:
                np.savez_compressed(file, header=text, **tables)
        except OSError as error:
            raise TraceError(
                f"the trace cannot be written to {os.fspath(path)!r} "
                f"({error.strerror or error}); give a file in a folder that is there"
            ) from None


def summed_by_row(
    first: NDArray[np.int64], end: NDArray[np.int64], amounts: NDArray[np.int64], row_count: int
) -> NDArray[np.int64]:
    """Return the sum of the amounts that are there at each row, from ``first`` to before ``end``.

    Three rows, 8 bytes that live in the first two and 4 from the second on::

        change     [+8, +4, -8, -4]
        levels     [8, 12, 4]
    """
    change = np.zeros(row_count + 1, dtype=np.int64)
    np.add.at(change, first, amounts)
    np.add.at(change, end, -amounts)
    return np.cumsum(change[:-1])
