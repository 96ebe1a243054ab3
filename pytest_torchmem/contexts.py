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


def _pause_gc() -> bool:
    was_enabled = gc.isenabled()
    gc.disable()
    return was_enabled


def _resume_gc(was_enabled: bool) -> None:
    if was_enabled:
        gc.enable()
