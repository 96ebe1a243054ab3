"""Tables in less memory."""

from __future__ import annotations

import numpy as np
import pytest

from pytest_torchmem.values import packed
from pytest_torchmem.values.packed import PackedTable, by_row
from pytest_torchmem.values.trace import EVENT, Trace

ROWS = packed._BLOCK_ROWS


def table_of(dtype: str, count: int, span: int) -> np.ndarray:
    """Numbers that differ by ``span`` at most, as far as the type has them."""
    table = np.zeros(count, [("end", "i4"), ("other", dtype)])
    random = np.random.default_rng(count + span)
    if dtype == "?":
        table["other"] = random.integers(0, 2, count)
        return table
    limits = np.iinfo(dtype)
    low = max(limits.min, -span // 3)
    high = min(limits.max, low + span)
    table["other"] = random.integers(low, high, count, dtype, endpoint=True)
    if count > 2 and span > 2**62:
        table["other"][:2] = limits.min, limits.max
    return table


@pytest.mark.parametrize("dtype", ["?", "u1", "i2", "i4", "u8", "i8"])
@pytest.mark.parametrize("count", [0, 1, ROWS, 2 * ROWS + 5])
@pytest.mark.parametrize("span", [0, 1, 255, 256, 2**16, 2**32, 2**63 - 1])
def test_a_packed_table_is_as_it_was(dtype: str, count: int, span: int) -> None:
    table = table_of(dtype, count, span)
    found = PackedTable.of(table)
    assert len(found) == count
    assert found.dtype == table.dtype
    assert found["other"].dtype == table["other"].dtype
    assert np.array_equal(found["other"], table["other"])
    assert np.array_equal(np.asarray(found), table)


def test_numbers_that_are_close_take_less_memory() -> None:
    table = np.zeros(10 * ROWS, EVENT)
    assert PackedTable.of(table).nbytes <= len(table) * 4
    table["start_ns"] = 10**18 + 800 * np.arange(len(table))
    table["end"] = 3 + np.arange(len(table))
    assert PackedTable.of(table).nbytes <= len(table) * 4


@pytest.mark.parametrize("numbers", [(0, 1), (-1, 2**62), (-(2**63), 2**63 - 1)])
def test_a_column_of_two_numbers_takes_a_bit_for_each_row(numbers: tuple[int, int]) -> None:
    table = np.zeros(10 * ROWS, [("other", "i8")])
    table["other"] = np.random.default_rng(0).choice(np.array(numbers, np.int64), len(table))
    found = PackedTable.of(table)
    assert found.nbytes == len(table) // 8
    assert np.array_equal(found["other"], table["other"])


def test_rows_of_a_packed_table_are_those_of_the_table() -> None:
    table = np.zeros(3 * ROWS, EVENT)
    table["line"], table["end"] = np.arange(len(table)), 1
    found = PackedTable.of(table)
    for rows in (5, [5, 2 * ROWS], table["line"] % 7 == 0, slice(2, 9), np.arange(0)):
        assert np.array_equal(found[rows], table[rows])


def test_a_column_is_put_back() -> None:
    table = np.zeros(2 * ROWS, EVENT)
    found = PackedTable.of(table)
    found["line"][3] = 5
    assert not found["line"].any()
    column = found["line"]
    column[3] = 5
    found["line"] = column
    found["sequence"] = -1
    table["line"][3], table["sequence"] = 5, -1
    assert np.array_equal(np.asarray(found), table)


def test_a_trace_with_packed_tables_is_saved_as_one_without(tmp_path) -> None:
    table = np.zeros(100, EVENT)
    table["end"] = np.arange(100) + 1
    Trace(events=PackedTable.of(table)).save(tmp_path / "packed.npz")
    Trace(events=table).save(tmp_path / "plain.npz")
    assert (tmp_path / "packed.npz").read_bytes() == (tmp_path / "plain.npz").read_bytes()


def test_a_row_of_a_column_is_looked_up_without_the_others() -> None:
    table = np.zeros(2 * ROWS + 9, EVENT)
    table["line"], table["end"] = np.arange(len(table)) % 1000, np.arange(len(table)) + 2
    for name in ("line", "end", "parent"):
        found, plain = by_row(PackedTable.of(table), name), by_row(table, name)
        for row in (0, 5, ROWS - 1, ROWS, len(table) - 1):
            assert found[row] == plain[row] == table[name][row]
