"""Tables in the making: rows of integers, numbered strings, and the tables of a recording."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pytest_torchmem.values.packed import Table
from pytest_torchmem.values.trace import DETAIL


class Rows:
    """Rows of integers, with the fields of a numpy ``dtype``.

    Python's collector runs after so and so many new containers. In a list, each row would be one:
    what a body's own cycles hold would be freed sooner than without us, and its peak be lower.

    Attributes:
        append: Adds a row, in one step also where several threads do.
    """

    def __init__(self, dtype: np.dtype[np.void]) -> None:
        assert dtype.names is not None
        self._dtype, self._names = dtype, dtype.names
        self._values = array("q")
        # No function of ours around it: the profiler would record each call.
        self.append: Callable[[tuple[int, ...]], None] = self._values.extend

    def __len__(self) -> int:
        return len(self._values) // len(self._names)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return zip(*[iter(self._values)] * len(self._names), strict=True)

    def table(self) -> NDArray[np.void]:
        """Return the rows so far."""
        columns = np.array(self._values, np.int64).reshape(-1, len(self._names)).T
        table = np.empty(len(self), self._dtype)
        for name, column in zip(self._names, columns, strict=True):
            table[name] = column
        return table


class _Numbering(dict[str, int]):
    def __missing__(self, text: str) -> int:
        return self.setdefault(text, len(self))


class StringTable:
    """Hands out one number for each distinct string, in the order they come.

    Tables refer to strings by these numbers.

    Attributes:
        number: Returns the number of a string. No Python function: while a body runs the profiler
            records each call of one, ours included.
    """

    def __init__(self) -> None:
        self._index = _Numbering()
        self.number: Callable[[str], int] = self._index.__getitem__

    def values(self) -> tuple[str, ...]:
        return tuple(self._index)


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables about events: those of a recording, or of one session of torch's profiler."""

    events: Table
    tensors: Table
    allocations: Table
    module_calls: Table
    details: Table = field(default_factory=lambda: np.empty(0, DETAIL))
