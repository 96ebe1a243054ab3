"""The tables of a long recording, and of several threads."""

from __future__ import annotations

from threading import Thread

import numpy as np
import pytest
import torch

from pytest_torchmem.values import packed
from pytest_torchmem.values.packed import PackedTable
from tests.measured import measured, profile_of

pytestmark = pytest.mark.slow


def body() -> None:
    x = torch.ones(64, 64, requires_grad=True)
    for _ in range(3):
        (x * 2).relu().sum().backward()


def test_large_tables_are_packed_and_give_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    body()
    plain = measured(body)
    monkeypatch.setattr(packed, "_LARGE_BYTES", 1)
    tables = profile_of(body).tree.trace
    assert isinstance(tables.events, PackedTable)
    assert isinstance(tables.tensors, PackedTable)
    assert isinstance(tables.allocations, PackedTable)
    result = measured(body)
    assert result.peak.at_peak == plain.peak.at_peak
    assert result.retained.by_category == plain.retained.by_category
    assert [c.source for c in result.peak.live] == [c.source for c in plain.peak.live]


def test_rows_in_several_pieces_of_several_threads_are_where_they_belong() -> None:
    """A piece ends after 1,024, 2,048 and 4,096 rows of a thread."""
    counts = (700, 90, 1500)

    def work(count: int) -> None:
        x = torch.ones(count)
        for _ in range(count):
            torch.neg(x)

    def body() -> None:
        threads = [Thread(target=work, args=(count,)) for count in counts[1:]]
        for thread in threads:
            thread.start()
        work(counts[0])
        for thread in threads:
            thread.join()

    trace = profile_of(body).tree.trace
    events = np.asarray(trace.events)
    rows = np.arange(len(events))
    names = np.array(trace.strings)[events["name"]]
    negations = rows[names == "aten::neg"]
    threads = events["thread"][negations]
    assert np.all((events["parent"] < rows) & (rows < events["end"]))
    assert np.all(events["thread"][events["parent"][negations]] == threads)
    found = {int(thread): int(np.sum(threads == thread)) for thread in np.unique(threads)}
    assert sorted(found.values()) == sorted(counts)
    assert found[0] == counts[0]
    # What each takes has as many numbers as its thread calls it.
    tensors = np.asarray(trace.tensors)
    inputs = tensors[np.isin(tensors["event"], negations)]
    sizes = [found[thread] * 4 for thread in events["thread"][inputs["event"]].tolist()]
    assert inputs["size_bytes"].tolist() == sizes
    assert len(inputs) == sum(counts)
