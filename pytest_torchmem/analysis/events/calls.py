"""A recording as a list of calls: operators, annotations, Python calls, and what a GPU did.

As ``profile.events()`` has them (``torch/autograd/profiler_util.py``): what lies within what is
told by the times on a thread and not by the profiler's tree, since an annotation begins within the
Python call of its ``__enter__`` and outlives it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytest_torchmem.analysis.events.op_tree import OpTree, are_labels
from pytest_torchmem.values.trace import DeviceEventKind, EventKind

#: The names of the calls that stand for memory outside of every other call.
MEMORY: Final = "[memory]"
OUT_OF_MEMORY: Final = "[OutOfMemory]"
_STEP: Final = "ProfilerStep#"
_CALLS: Final = (EventKind.TORCH_OP, EventKind.PY_CALL, EventKind.PY_C_CALL)
_ON_CPU: Final = (DeviceEventKind.LAUNCH, DeviceEventKind.RUNTIME)
# What only asks a tensor for something, and the profiler's own.
_LEFT_OUT: Final = frozenset(
    {
        "profiler::_record_function_enter",
        "profiler::_record_function_enter_new",
        "profiler::_record_function_exit",
        "aten::is_leaf",
        "aten::output_nr",
        "aten::_version",
    }
)
# Unlinked calls of a GPU's libraries are on no thread that a tree knows.
_NO_THREAD: Final = -1


@dataclass(frozen=True, eq=False)
class CallList:
    """Calls in the order of their starts, of equal ones the longer first; C of them.

    Attributes:
        tree: Where they come from.
        rows: int64, shape (C,); the event of each, or -1 for what a GPU did or was told.
        device_rows: int64, shape (C,); its row in `Trace.device_events`, or -1.
        names: int64, shape (C,); index of its name in `strings`.
        starts_ns: int64, shape (C,).
        ends_ns: int64, shape (C,).
        threads: int64, shape (C,).
        strings: The strings of the trace, and more.
    """

    tree: OpTree
    rows: NDArray[np.int64]
    device_rows: NDArray[np.int64]
    names: NDArray[np.int64]
    starts_ns: NDArray[np.int64]
    ends_ns: NDArray[np.int64]
    threads: NDArray[np.int64]
    strings: tuple[str, ...]

    @property
    def durations_ns(self) -> NDArray[np.int64]:
        """int64, shape (C,)."""
        return self.ends_ns - self.starts_ns

    @cached_property
    def on_device(self) -> NDArray[np.bool_]:
        """Return whether it ran on a GPU: bool, shape (C,)."""
        kinds = self.tree.trace.device_events["kind"]
        result: NDArray[np.bool_] = self.device_rows >= 0
        result[result] = ~np.isin(kinds[self.device_rows[result]], _ON_CPU)
        return result

    @cached_property
    def nesting(self) -> Nesting:
        """The nesting of the calls."""
        return _nesting(self)

    def detail(self, column: str) -> NDArray[np.int64]:
        """A column of `Trace.details` for each call, -1 where nothing is known: shape (C,)."""
        details = self.tree.trace.details
        of_event = np.full(len(self.tree.trace.events) + 1, -1, np.int64)
        of_event[details["event"]] = details[column]
        return of_event[self.rows]

    def event_column(self, column: str) -> NDArray[np.int64]:
        """A column of `Trace.events` for each call, -1 for a GPU's: shape (C,)."""
        values = np.append(self.tree.trace.events[column].astype(np.int64), -1)
        return values[self.rows]


@dataclass(frozen=True, slots=True)
class Nesting:
    """The nesting of calls, by time.

    Attributes:
        parents: For each call the one around it, or -1.
        merged: Whether the call is the only one within another of its name, and counts as that one:
            ``Tensor.sum()`` runs ``aten::sum``, which runs an ``aten::sum`` with a dimension.
        inner: Of a call that others were merged into the innermost of these, else itself.
    """

    parents: list[int]
    merged: list[bool]
    inner: list[int]


def list_calls(tree: OpTree) -> CallList:
    """Return the calls of a recording."""
    trace = tree.trace
    events, device_events = trace.events, trace.device_events
    strings = dict.fromkeys((*trace.strings, MEMORY, OUT_OF_MEMORY))
    numbers = {text: number for number, text in enumerate(strings)}
    texts = PythonStacks(tree).texts
    hidden = [number for text, number in numbers.items() if text in _LEFT_OUT]
    is_call = np.isin(events["kind"], _CALLS) & ~np.isin(texts, hidden)
    rows = np.flatnonzero(is_call)
    memory = _outside(tree, rows)
    failed = np.flatnonzero(events["kind"] == EventKind.OUT_OF_MEMORY)
    rows = np.concatenate([rows, memory, failed])
    names = np.concatenate(
        [
            texts[rows[: int(is_call.sum())]],
            np.full(len(memory), numbers[MEMORY]),
            np.full(len(failed), numbers[OUT_OF_MEMORY]),
            device_events["name"],
        ]
    ).astype(np.int64)
    starts = np.concatenate([events["start_ns"][rows], device_events["start_ns"]])
    ends = np.concatenate([events["end_ns"][rows], device_events["end_ns"]])
    threads = np.concatenate([events["thread"][rows], _threads(tree)]).astype(np.int64)
    order = np.lexsort((-ends, starts))
    none = np.full(len(device_events), -1, np.int64)
    device_rows = np.concatenate([np.full(len(rows), -1), np.arange(len(device_events))])
    return CallList(
        tree,
        np.concatenate([rows, none])[order],
        device_rows[order].astype(np.int64),
        names[order],
        starts[order],
        ends[order],
        threads[order],
        tuple(strings),
    )


def _outside(tree: OpTree, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the allocations and frees at whose time no call ran, on whatever thread.

    Calls from 1 to 4 and from 2 to 6; allocations at 0, 3 and 7::

        begun before or then    [0, 2, 2]
        ended before            [0, 0, 2]
        outside, where equal    [yes, no, yes]
    """
    events = tree.trace.events
    allocation_events = tree.trace.allocations["event"].astype(np.int64)
    times = events["start_ns"][allocation_events]
    begun = np.searchsorted(np.sort(events["start_ns"][rows]), times, side="right")
    ended = np.searchsorted(np.sort(events["end_ns"][rows]), times, side="left")
    outside: NDArray[np.int64] = allocation_events[begun == ended]
    return outside


def _threads(tree: OpTree) -> NDArray[np.int64]:
    """The thread of each device event: that of the operator it belongs to."""
    trace = tree.trace
    linked = trace.details[trace.details["correlation"] > 0]
    thread_of = dict(
        zip(
            linked["correlation"].tolist(),
            trace.events["thread"][linked["event"]].tolist(),
            strict=True,
        )
    )
    correlations = trace.device_events["correlation"].tolist()
    return np.array([thread_of.get(c, _NO_THREAD) for c in correlations], np.int64)


def _nesting(calls: CallList) -> Nesting:
    count = len(calls.rows)
    parents, children = [-1] * count, [0] * count
    open_calls: dict[int, list[int]] = defaultdict(list)
    starts, ends = calls.starts_ns.tolist(), calls.ends_ns.tolist()
    threads = calls.threads.tolist()
    for call in np.flatnonzero(~calls.on_device).tolist():
        # A call that ends after the one around it lies in neither: the outer one is given up.
        around = open_calls[threads[call]]
        while around and (starts[call] >= ends[around[-1]] or ends[call] > ends[around[-1]]):
            around.pop()
        if around:
            parents[call] = around[-1]
            children[around[-1]] += 1
        around.append(call)
    return _merged(calls.names.tolist(), parents, children)


def _merged(names: list[int], parents: list[int], children: list[int]) -> Nesting:
    """Merge each call that is alone in one of its name into it, from the outside in."""
    merged, outer = [False] * len(names), list(range(len(names)))
    inner = list(range(len(names)))
    for call in range(len(names)):
        if parents[call] < 0:
            continue
        parent = parents[call] = outer[parents[call]]
        if names[call] == names[parent] and children[parent] == 1:
            merged[call], outer[call] = True, parent
            inner[parent], children[parent] = call, children[call]
    return Nesting(parents, merged, inner)


def is_annotation(calls: CallList) -> NDArray[np.bool_]:
    """Return whether a call is a ``record_function`` label: bool, shape (C,)."""
    return np.append(are_labels(calls.tree.trace.events), False)[calls.rows]


def is_step(name: str) -> bool:
    """Return whether a name is that of a step, as ``torch.profiler.profile.step`` marks them."""
    return name.startswith(_STEP)


def without_step_number(name: str) -> str:
    """``ProfilerStep*`` for every ``ProfilerStep#3``; other names as they are."""
    return "ProfilerStep*" if is_step(name) else name


_PYTHON: Final = (EventKind.PY_CALL, EventKind.PY_C_CALL)
# Frames of a backward pass that every one has, as in ``torch/autograd/profiler_util.py``.
_OF_EACH_BACKWARD: Final = (
    ("autograd/__init__", "_make_grads"),
    ("autograd/__init__", "backward"),
    ("torch/tensor", "backward"),
)


@dataclass(frozen=True, eq=False)
class PythonStacks:
    """Python stacks as a tree: two events have the same stack exactly if they have the same node.

    A function that calls itself once, and an operator in the inner call::

        step        node 1 = (0, "step")
          step      node 2 = (1, "step")
            mm      stack 2: ("step", "step")
    """

    tree: OpTree

    @cached_property
    def texts(self) -> NDArray[np.int64]:
        """The number of each event's text: that of the profiler where it is known, else its name.

        int64, shape (E,).
        """
        events, details = self.tree.trace.events, self.tree.trace.details
        texts: NDArray[np.int64] = events["name"].astype("i8")
        named_details = details[details["text"] >= 0]
        texts[named_details["event"]] = named_details["text"]
        return texts

    @cached_property
    def _nodes(self) -> tuple[list[int], list[tuple[int, str]]]:
        """For each event the node of the stack around it, and for each node its parent and text."""
        events, strings = self.tree.trace.events, self.tree.trace.strings
        texts = [strings[number] for number in self.texts.tolist()]
        numbers: dict[tuple[int, str], int] = {}
        nodes: list[tuple[int, str]] = [(-1, "")]
        around: list[int] = []
        below: list[int] = []
        rows = zip(events["parent"].tolist(), events["kind"].tolist(), texts, strict=True)
        for parent, kind, text in rows:
            node = below[parent] if parent >= 0 else 0
            around.append(node)
            if kind in _PYTHON and not any(f in text and n in text for f, n in _OF_EACH_BACKWARD):
                key = (node, text)
                if (known := numbers.get(key)) is None:
                    known = numbers[key] = len(nodes)
                    nodes.append(key)
                node = known
            below.append(node)
        return around, nodes

    @property
    def around(self) -> list[int]:
        """The node of the stack around each event, 0 for none."""
        return self._nodes[0]

    def frames(self, node: int) -> tuple[str, ...]:
        """Return the frames of a node, innermost first."""
        frames = []
        while node > 0:
            node, text = self._nodes[1][node]
            frames.append(text)
        return tuple(frames)
