"""Each string once: tables refer to names by number."""

from __future__ import annotations

from collections.abc import Callable


class _Numbering(dict[str, int]):
    def __missing__(self, text: str) -> int:
        return self.setdefault(text, len(self))


class StringTable:
    """Hands out one number for each distinct string, in the order they come.

    Attributes:
        number: Returns the number of a string. No Python function: while a body runs the profiler
            records each call of one, ours included.
    """

    def __init__(self) -> None:
        self._index = _Numbering()
        self.number: Callable[[str], int] = self._index.__getitem__

    def values(self) -> tuple[str, ...]:
        return tuple(self._index)
