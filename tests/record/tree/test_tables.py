"""Tables that grow while a body runs."""

from __future__ import annotations

import gc

import numpy as np

from pytest_torchmem.record.tree.tables import Rows

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
