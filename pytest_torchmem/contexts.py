"""Context managers without a generator, and the one switch of Python's garbage collector.

`contextlib.contextmanager` calls ``next``, which is written in C. Torch before 2.8 loses count of a
program's calls where a session of the profiler begins or ends below a call of C.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Around(AbstractContextManager[_T], Generic[_T]):
    """Calls ``begin`` before the block, which gets what that returns, and ``end`` with it after."""

    def __init__(self, begin: Callable[[], _T], end: Callable[[_T], None]) -> None:
        self._begin, self._end = begin, end

    def __enter__(self) -> _T:
        self._value = self._begin()
        return self._value

    def __exit__(self, *raised: object) -> None:
        self._end(self._value)


def gc_paused() -> Around[bool]:
    """Keep the garbage collector from running on its own in the block.

    What is in a cycle when the body ends must still be there when somebody asks what holds it.
    """
    return Around(_pause_gc, _resume_gc)


class KeptCount:
    """Keeps what the block makes out of the count of new objects after which the collector runs.

    A program's own cycles are then freed when they are without us. It has a store of objects: to
    take some of them away lowers the count.
    """

    def __init__(self) -> None:
        # Of a kind that Python keeps no free ones of, which are not counted.
        self._store: list[set[object]] = []

    def fill(self, count: int = 3000) -> None:
        """Make the store; that itself is counted."""
        self._store += [set() for _ in range(count - len(self._store))]

    def empty(self) -> None:
        self._store.clear()

    def kept(self) -> Around[tuple[bool, int]]:
        """Leave the count in the block as it was, and run the collector not at all."""
        return Around(lambda: (_pause_gc(), gc.get_count()[0]), self._restore)

    def _restore(self, before: tuple[bool, int]) -> None:
        was_enabled, count = before
        more = gc.get_count()[0] - count
        if more > 0:
            del self._store[-more:]
        else:
            self._store += [set() for _ in range(-more)]
        _resume_gc(was_enabled)


def _pause_gc() -> bool:
    was_enabled = gc.isenabled()
    gc.disable()
    return was_enabled


def _resume_gc(was_enabled: bool) -> None:
    if was_enabled:
        gc.enable()
