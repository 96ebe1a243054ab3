"""Gives our calls room where the program has nearly reached Python's recursion limit.

A session that ends there and cannot begin again is lost, and one that begins and is not noted goes
on for the rest of the process.
"""

from __future__ import annotations

from sys import getrecursionlimit, setrecursionlimit
from typing import Final

#: How many calls deeper ours may go: 30 are enough for a cut, and C's stack has room for thousands.
_ROOM: Final = 300


class RecursionRoom:
    """Raises the recursion limit between `begin` and `end`, which are called at the same depth.

    The limit is the process's, and two threads would not put it back in order: it is for the main
    thread, where sessions are cut. One within another does nothing.
    """

    _is_open = False

    def __init__(self) -> None:
        self._before = 0

    def begin(self) -> None:
        """Raise it; raises `RecursionError`, and changes nothing, where no call is left at all."""
        if RecursionRoom._is_open:
            return
        before = getrecursionlimit()
        # Python refuses a limit that is reached already: it could not be put back.
        setrecursionlimit(before)
        try:
            self._before, RecursionRoom._is_open = before, True
            setrecursionlimit(before + _ROOM)
        except BaseException:
            # A signal's handler has raised.
            self.end()
            raise

    def end(self) -> None:
        """Put it back, unless somebody has set another one."""
        if self._before:
            if getrecursionlimit() == self._before + _ROOM:
                setrecursionlimit(self._before)
            self._before, RecursionRoom._is_open = 0, False
