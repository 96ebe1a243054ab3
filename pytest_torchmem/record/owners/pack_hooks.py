"""Tells nodes that keep a pack hook's result from others, for releases that do not say.

Before torch 2.10 we can read what a node has saved only by unpacking it, and that calls the user's
unpack hook: a checkpoint would be computed again because we looked. A thread numbers its nodes one
after the other, so we note the numbers between which hooks are in force.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable
from functools import partial, wraps
from typing import ClassVar

from torch.autograd.graph import Node

from pytest_torchmem.record.patches import Installed
from pytest_torchmem.record.torch_api import autograd


class PackHookWatch:
    """Notes when hooks are in force on the thread that installs this, until it is taken out.

    Graphs are read after that, too: the latest watch stays in ``latest``.
    """

    latest: ClassVar[PackHookWatch | None] = None

    def __init__(self) -> None:
        self._thread = 0
        self._depth = 0
        self._begins: list[int] = []
        self._ends: list[int] = []
        # What is known of a node of this number, and of those after it.
        self._known_from = 0
        self._known_until: int | None = None

    def install(self, patches: Installed) -> None:
        """Begin to note, where torch does not let be read what a node has saved."""
        if autograd.READS_SAVED:
            return
        self._thread = threading.get_ident()
        self._known_from = autograd.next_sequence_number()
        PackHookWatch.latest = self
        patches.finally_do(self._end)
        for name, noted in zip(autograd.PACK_HOOKS, (self._push, self._pop), strict=True):
            patches.replace(name, partial(self._noting, noted))

    def _end(self) -> None:
        self._known_until = autograd.next_sequence_number()

    def _noting(
        self, noted: Callable[[], None], function: Callable[..., object]
    ) -> Callable[..., object]:
        @wraps(function)
        def watched(*args: object) -> object:
            if threading.get_ident() == self._thread:
                noted()
            return function(*args)

        return watched

    def _push(self) -> None:
        if not self._depth:
            self._begins.append(autograd.next_sequence_number())
        self._depth += 1

    def _pop(self) -> None:
        if not self._depth:  # in force since before the watch
            self._known_from = autograd.next_sequence_number()
            return
        self._depth -= 1
        if not self._depth:
            end = autograd.next_sequence_number()
            if end == self._begins[-1]:  # nothing was saved meanwhile
                self._begins.pop()
            else:
                self._ends.append(end)

    def surely_without(self, number: int) -> bool:
        """Return whether no hook was in force when a node got its number; False if not known."""
        if number < self._known_from:
            return False
        if self._known_until is not None and number >= self._known_until:
            return False
        place = bisect_right(self._begins, number) - 1
        return place < 0 or (place < len(self._ends) and number >= self._ends[place])


def surely_without(node: Node) -> bool:
    """Return whether no hook was in force when a node was made; False if not known."""
    watch = PackHookWatch.latest
    return watch is not None and watch.surely_without(autograd.sequence_number(node))
