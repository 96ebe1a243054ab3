"""Tables that grow while a body runs."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import numpy as np
import pytest

from pytest_torchmem.record.devices import _private_bytes
from pytest_torchmem.record.profiled import growing_tables
from pytest_torchmem.record.tables import Rows, Tables
from pytest_torchmem.values.packed import PackedTable
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


def session(count: int) -> Tables:
    """A session of so many operators, one behind the other, of which each frees what it makes."""
    events = np.zeros(2 * count, EVENT)
    rows = np.arange(2 * count)
    events["kind"] = rows % 2
    events["parent"] = np.where(rows % 2, rows - 1, -1)
    events["end"] = np.where(rows % 2, rows + 1, rows + 2)
    events["start_ns"] = 10**18 + 700 * rows
    allocations = np.zeros(count, ALLOCATION)
    allocations["event"] = rows[1::2]
    allocations["ptr"] = 94 * 10**12 + 64 * (rows[:count] % 7)
    return Tables(
        events,
        np.zeros(0, TENSOR),
        allocations,
        np.zeros(0, MODULE_CALL),
        np.zeros(0, OVERLOAD),
    )


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_memory_of_a_dropped_table_goes_back_to_the_system() -> None:
    # Once a larger piece was freed, the C library keeps smaller ones.
    np.ones(2**20)
    before = _private_bytes()
    sessions, between = [], []
    for _ in range(100):
        sessions.append(session(20_000).packed())
        # What stays behind a table keeps the C library from giving the table's memory back.
        between.append(np.ones(5_000))
    held = _private_bytes() - before
    size = sum(part.size_bytes for part in sessions)
    assert held > size
    sessions.clear()
    assert _private_bytes() - before < held - 0.9 * size


def test_packed_tables_are_as_they_were_and_take_a_fifth() -> None:
    plain = session(20_000)
    packed = plain.packed()
    assert packed.size_bytes < plain.size_bytes / 5
    for name in ("events", "allocations"):
        assert isinstance(getattr(packed, name), PackedTable)
        assert np.array_equal(np.asarray(getattr(packed, name)), getattr(plain, name))


def test_sessions_are_joined_to_the_same_whether_packed_or_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = [session(2_000), session(3_000)]
    parts[0].late_lines.append((np.array([0, 4], np.int32), np.array([11, 12], np.int32)))
    plain = growing_tables.joined(parts)
    monkeypatch.setattr(growing_tables, "_MUCH_BYTES", 2**16)
    packed = growing_tables.joined([part.packed() for part in parts], last=True)
    assert isinstance(packed.events, PackedTable)
    assert isinstance(plain.events, np.ndarray)
    for name in ("events", "tensors", "allocations", "module_calls", "overloads", "details"):
        assert np.array_equal(np.asarray(getattr(packed, name)), getattr(plain, name))
    assert plain.events["line"][:5].tolist() == [11, 0, 0, 0, 12]
    assert plain.allocations["event"][2_000] == 4_001


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
    alive, moved = list[bool](), growing_tables._moved

    def moving(*arguments: Any) -> Any:
        alive.extend(table() is not None for table in events)
        return moved(*arguments)

    monkeypatch.setattr(growing_tables, "_moved", moving)
    assert len(growing_tables.joined(parts, last=True).events) == 6
    assert alive
    assert not any(alive)
