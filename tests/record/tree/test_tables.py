"""Tables that grow while a body runs."""

from __future__ import annotations

import gc
import mmap
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytest_torchmem.record.tree import tables
from pytest_torchmem.record.tree.tables import Rows, Tables, in_own_memory
from pytest_torchmem.values.trace import ALLOCATION, EVENT, MODULE_CALL, OVERLOAD, TENSOR

DTYPE = np.dtype([("kind", "u1"), ("place", "u8"), ("number", "i4")])


def test_a_table_has_the_rows_that_were_added() -> None:
    rows = Rows(DTYPE)
    rows.append((1, 1 << 46, -1))
    rows.append((255, 2, 3))
    assert list(rows) == [(1, 1 << 46, -1), (255, 2, 3)]
    table = rows.table()
    assert table.dtype == DTYPE
    assert table.tolist() == [(1, 1 << 46, -1), (255, 2, 3)]
    assert len(rows) == 2


def test_a_table_without_rows_has_its_fields() -> None:
    assert Rows(DTYPE).table().dtype == DTYPE
    assert len(Rows(DTYPE).table()) == len(Rows(DTYPE)) == 0


def objects_made_by(rows: Rows | list[tuple[int, ...]]) -> int:
    gc.collect()
    before = gc.get_count()[0]
    for number in range(300):
        rows.append((1, 2, number))
    return gc.get_count()[0] - before


def test_rows_do_not_bring_a_collection_nearer() -> None:
    assert objects_made_by(Rows(DTYPE)) < 10
    assert objects_made_by([]) > 250


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_memory_of_a_dropped_table_goes_back_to_the_system() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    # Once a larger piece was freed, the C library keeps smaller ones.
    np.ones(2**20)
    before = resident_bytes()
    tables, between = [], []
    for _ in range(100):
        tables.append(in_own_memory(np.ones(10_000, EVENT)))
        # What stays behind a table keeps the C library from giving the table's memory back.
        between.append(np.ones(5_000))
    held = resident_bytes() - before
    size = sum(table.nbytes for table in tables)
    assert held > size
    tables.clear()
    assert resident_bytes() - before < held - 0.9 * size


def test_a_table_in_memory_of_its_own_is_as_it_was() -> None:
    table = np.zeros(10_000, EVENT)
    table["start_ns"] = np.arange(10_000)
    own = in_own_memory(table)
    assert np.array_equal(own, table)
    own["line"][3] = 5  # a later session may know the line of an operator
    assert table["line"][3] == 0


def test_the_tables_of_a_session_are_given_back_while_the_sessions_are_joined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = [
        Tables(
            np.zeros(2, EVENT),
            np.zeros(1, TENSOR),
            np.zeros(1, ALLOCATION),
            np.zeros(0, MODULE_CALL),
            np.zeros(0, OVERLOAD),
        )
        for _ in range(3)
    ]
    events = [weakref.ref(part.events) for part in parts]
    alive, moved = list[bool](), tables._moved

    def moving(*arguments: Any) -> Any:
        alive.extend(table() is not None for table in events)
        return moved(*arguments)

    monkeypatch.setattr(tables, "_moved", moving)
    assert len(tables.joined(parts, last=True).events) == 6
    assert alive
    assert not any(alive)
