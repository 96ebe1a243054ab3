"""Tables in less memory: each column by itself, in blocks of narrow numbers.

The rows of a large recording are alike. Its pointers lie in one heap, its times in one minute, and
most numbers of threads are the same. So each block of a column has its smallest number, and of each
row what that is larger by::

    ptr       [94_000_000_000_128, 94_000_000_000_064, 94_000_000_000_192]     8 bytes each
    smallest   94_000_000_000_064
    codes     [64, 0, 128]                                                     1 byte each

A column is unpacked when somebody asks for it. That takes no longer than to pick it out of rows of
fifty bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

#: The numbers of a column; their type is the one that the table has for it.
Column: TypeAlias = "NDArray[Any]"
#: The numbers of some rows, or which rows they are.
_RowKey: TypeAlias = "int | slice | Sequence[int] | NDArray[np.integer[Any]] | NDArray[np.bool_]"

_BLOCK_ROWS: Final = 2**14
# So many blocks are kept of a column that is looked at row by row.
_MOST_BLOCKS: Final = 64
_NARROW: Final = (np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.uint32))
# These grow with the row. The first row that is not below another is most often the next one.
_RELATIVE: Final = frozenset({"end"})


@dataclass(frozen=True, slots=True, eq=False)
class _PackedBlock:
    """Some rows of a column: ``smallest`` plus each of ``codes``, or no codes where all are alike.

    Numbers that no narrow code can tell apart are their own codes. Of two numbers one bit tells
    whether it is ``other``, the larger one.
    """

    smallest: np.generic
    codes: Column | None
    other: np.generic | None = None

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes if self.codes is not None else 0

    def unpack(self, column: Column) -> None:
        if self.codes is None:
            column[:] = self.smallest
        elif self.other is not None:
            is_other = np.unpackbits(self.codes, count=len(column)).view(np.bool_)
            column[:] = np.where(is_other, self.other, self.smallest)
        elif self.codes.dtype == column.dtype:
            column[:] = self.codes
        else:
            np.add(self.codes, self.smallest, out=column, casting="unsafe")


def _block(values: Column) -> _PackedBlock:
    low, high = values.min(), values.max()
    if low == high:
        return _PackedBlock(low, None)
    is_other = values == high
    if np.all(is_other | (values == low)):
        return _PackedBlock(low, np.packbits(is_other), high)
    for dtype in _NARROW:
        if dtype.itemsize >= values.dtype.itemsize:
            break
        if int(high) - int(low) <= np.iinfo(dtype).max:
            return _PackedBlock(low, np.subtract(values, low, dtype=values.dtype).astype(dtype))
    return _PackedBlock(low, values.copy())


class PackedTable:
    """A structured array in less memory. As in one, ``table["name"]`` is a column.

    A column that is taken out is a copy, which may be put back: ``table["name"] = column``.
    """

    def __init__(self, dtype: np.dtype[np.void], length: int) -> None:
        self.dtype = dtype
        self._length = length
        self._columns: dict[str, tuple[_PackedBlock, ...]] = {}

    @classmethod
    def of(cls, table: NDArray[np.void]) -> PackedTable:
        """Pack a table."""
        packed = cls(table.dtype, len(table))
        for name in table.dtype.names or ():
            packed[name] = table[name]
        return packed

    def __len__(self) -> int:
        return self._length

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for column in self._columns.values() for block in column)

    @overload
    def __getitem__(self, key: str) -> Column: ...
    @overload
    def __getitem__(self, key: _RowKey) -> NDArray[np.void]: ...
    def __getitem__(self, key: str | _RowKey) -> Column:
        if isinstance(key, str):
            return self._unpacked(key)
        rows = np.arange(self._length)[key]
        rows_read = np.empty(np.shape(rows), self.dtype)
        for name in self.dtype.names or ():
            rows_read[name] = self._unpacked(name)[rows]
        return rows_read

    def __setitem__(self, name: str, column: ArrayLike) -> None:
        values = np.ascontiguousarray(
            np.broadcast_to(np.asarray(column, self.dtype[name]), self._length)
        )
        if name in _RELATIVE:
            values = values - np.arange(self._length, dtype=values.dtype)
        self._columns[name] = tuple(map(_block, _blocks(values)))

    def __array__(self, dtype: None = None, copy: bool | None = None) -> NDArray[np.void]:
        table: NDArray[np.void] = np.empty(self._length, self.dtype)
        for name in self.dtype.names or ():
            table[name] = self._unpacked(name)
        return table

    def _unpacked(self, name: str) -> Column:
        column = np.empty(self._length, self.dtype[name])
        for block, part in zip(self._columns[name], _blocks(column), strict=True):
            block.unpack(part)
        if name in _RELATIVE:
            column += np.arange(self._length, dtype=column.dtype)
        return column

    def block(self, name: str, number: int) -> Column:
        """Return one of a column's blocks of rows."""
        begin = number * _BLOCK_ROWS
        block = np.empty(min(_BLOCK_ROWS, self._length - begin), self.dtype[name])
        self._columns[name][number].unpack(block)
        if name in _RELATIVE:
            block += np.arange(begin, begin + len(block), dtype=block.dtype)
        return block


class PackedColumn:
    """A column of which single rows are looked at: only the blocks around these are unpacked."""

    def __init__(self, table: PackedTable, name: str) -> None:
        self._table, self._name = table, name
        self._known: dict[int, Column] = {}

    def __getitem__(self, row: int) -> int:
        number, place = divmod(row, _BLOCK_ROWS)
        if number not in self._known:
            if len(self._known) == _MOST_BLOCKS:
                self._known.clear()
            self._known[number] = self._table.block(self._name, number)
        return int(self._known[number][place])


def by_row(table: Table, name: str) -> Column | PackedColumn:
    """Return a column of which single rows will be looked at."""
    return PackedColumn(table, name) if isinstance(table, PackedTable) else table[name]


#: The rows of a table of a recording, in either form.
Table: TypeAlias = "NDArray[np.void] | PackedTable"


# Smaller tables are looked at row by row just as well as by columns.
_LARGE_BYTES: Final = 2**24


def table_for(length: int, dtype: np.dtype[np.void]) -> Table:
    """Return a table, packed if it is a large one. Its columns are yet to be put in, each whole."""
    if length * dtype.itemsize < _LARGE_BYTES:
        return np.empty(length, dtype)
    return PackedTable(dtype, length)


def in_pieces(table: Table, *names: str) -> Iterator[tuple[slice, list[Column]]]:
    """Yield which rows come next, and what these columns have there.

    A column in one piece would take as much as all of the packed table.
    """
    for begin in range(0, len(table), _BLOCK_ROWS):
        rows = slice(begin, min(begin + _BLOCK_ROWS, len(table)))
        if isinstance(table, PackedTable):
            number = begin // _BLOCK_ROWS
            yield rows, [table.block(name, number) for name in names]
        else:
            yield rows, [table[name][rows] for name in names]


def _blocks(values: Column) -> Iterator[Column]:
    for start in range(0, len(values), _BLOCK_ROWS):
        yield values[start : start + _BLOCK_ROWS]
