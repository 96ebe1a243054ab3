"""The tables of a long recording are packed, and say the same."""

from __future__ import annotations

import pytest
import torch

from pytest_torchmem.values import packed
from pytest_torchmem.values.packed import PackedTable
from tests.measured import measured, profile_of


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
