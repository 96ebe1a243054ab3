"""Autograd's sequence numbers, made unique among threads."""

from __future__ import annotations

from collections import defaultdict
from itertools import compress, count
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytest_torchmem.record.torch_api import profiler
from pytest_torchmem.record.tree.event_tree import EventTree, are_calls
from pytest_torchmem.values.trace import EventKind

#: How far the numbers of one thread are from those of the next. No thread makes so many nodes.
_APART: Final = 1 << 40


class SequenceNumbers:
    """Tells the numbers of one thread from those of another, in all sessions of a body.

    Each thread counts for itself. On a GPU a backward pass runs on a thread of the engine, and so
    does a forward pass that is run again there: its numbers are those of other operators.
    """

    def __init__(self) -> None:
        self._places: defaultdict[int, int] = defaultdict(count().__next__)

    def unique(
        self, tree: EventTree, makes_nodes: NDArray[np.bool_], result: profiler.ProfilerResult
    ) -> NDArray[np.int64]:
        """Return the number of each operator of a tree, or -1: int64, shape (N,).

        ``makes_nodes`` tells operators of a forward pass from nodes of the backward graph.
        """
        sequences = np.array(tree.sequences, np.int64)
        numbered = np.flatnonzero(sequences >= 0)
        starts_ns, threads = _times(tree, sequences >= 0)
        forward: set[int] = set(self._places)
        backward: set[int] = set()
        for thread, makes in zip(threads, makes_nodes[numbered].tolist(), strict=True):
            (forward if makes else backward).add(thread)
        if len(forward) == 1 and not forward & backward:
            threads = [*forward] * len(numbered)
        # On the CPU all of it is one thread, and asking would take half as long as all the reading.
        elif len(forward) > 1 or _on_device(tree):
            made_by = _makers(result)
            threads = [made_by.get(key, key[0]) for key in zip(threads, starts_ns, strict=True)]
        places = np.array([self._places[thread] for thread in threads], np.int64)
        sequences[numbered] += _APART * places
        return sequences


def _times(tree: EventTree, chosen: NDArray[np.bool_]) -> tuple[list[int], list[int]]:
    """Start and thread of some of a tree's operators."""
    kinds = np.array(tree.kinds, np.uint8)
    timed = kinds[~are_calls(kinds)] == EventKind.TORCH_OP
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
