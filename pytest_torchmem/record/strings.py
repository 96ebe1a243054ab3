"""Each string once: tables refer to names by number."""

from __future__ import annotations


class StringTable:
    """Hands out one number for each distinct string, in the order they come."""

    def __init__(self) -> None:
        self._index: dict[str, int] = {}

    def number(self, text: str) -> int:
        return self._index.setdefault(text, len(self._index))

    def values(self) -> tuple[str, ...]:
        return tuple(self._index)
