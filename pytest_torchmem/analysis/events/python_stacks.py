"""The Python calls around each event, as the profiler writes them: ``train.py(12): step``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

from pytest_torchmem.analysis.events.op_tree import OpTree
from pytest_torchmem.values.trace import EventKind

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_PYTHON: Final = (EventKind.PY_CALL, EventKind.PY_C_CALL)
# Frames of a backward pass that every one has, as in ``torch/autograd/profiler_util.py``.
_LEFT_OUT: Final = (
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
        known = details[details["text"] >= 0]
        texts[known["event"]] = known["text"]
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
            if kind in _PYTHON and not _left_out(text):
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


def _left_out(text: str) -> bool:
    return any(file in text and function in text for file, function in _LEFT_OUT)
