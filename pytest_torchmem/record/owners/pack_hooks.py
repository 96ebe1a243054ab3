"""Which nodes of an autograd graph keep what a pack hook returned, for releases that do not say.

Before torch 2.10 what a node has saved can only be unpacked, and that calls the user's unpack hook:
a checkpoint would be computed again because we looked. So it is noted when hooks are in force, by
the numbers that a thread's nodes get one after the other.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from typing import Any, Final

from pytest_torchmem.record.torch_api import autograd


class _Thread(threading.local):
    """When hooks were in force on a thread, since somebody asked there first."""

    def __init__(self) -> None:
        self.known_from = autograd.next_sequence_number()
        self.depth = 0
        self.begins: list[int] = []
        self.ends: list[int] = []

    def push(self) -> None:
        if not self.depth:
            self.begins.append(autograd.next_sequence_number())
        self.depth += 1

    def pop(self) -> None:
        if not self.depth:  # in force since before anybody asked
            self.known_from = autograd.next_sequence_number()
            return
        self.depth -= 1
        if not self.depth:
            end = autograd.next_sequence_number()
            if end == self.begins[-1]:  # nothing was saved meanwhile
                self.begins.pop()
            else:
                self.ends.append(end)

    def hooked(self, number: int) -> bool:
        place = bisect_right(self.begins, number) - 1
        return place >= 0 and (place == len(self.ends) or number < self.ends[place])


_HERE: Final = _Thread()


def surely_without(node: Any) -> bool:
    """Whether no hook was in force when the calling thread made a node; False if not known."""
    number = autograd.sequence_number(node)
    return number >= _HERE.known_from and not _HERE.hooked(number)


if not autograd.READS_SAVED:
    autograd.watch_pack_hooks(_HERE.push, _HERE.pop)
