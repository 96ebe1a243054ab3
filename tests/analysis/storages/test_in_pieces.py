"""Work that is done in pieces, held against the same work on a whole recording."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pytest_torchmem.analysis.pipeline import MemoryProfile, analyze_trace
from pytest_torchmem.analysis.storages import measured_facts, timeline
from pytest_torchmem.values import packed
from tests.analysis.storages.test_by_columns import WORDS, told
from tests.builders import TraceBuilder


def everything(profile: MemoryProfile) -> list[object]:
    """Return all arrays and numbers of an analysis."""
    storages = [getattr(profile.storages, field.name) for field in fields(profile.storages)]
    drawn, decisions = profile.timeline, profile.decisions
    arrays = (*storages, profile.ranks, drawn.times_ns, drawn.sizes, decisions.claim)
    said = profile.reconciliation
    return [
        *((array.dtype, array.tolist()) for array in arrays),
        (drawn.columns, drawn.peak_row, profile.peak, decisions.grounds),
        (said.drift_bytes, said.elsewhere, [*said.sentences()], profile.retained, profile.steps),
    ]


@given(WORDS, st.integers(1, 5))
@example([("make", 0, 2), ("read", 2, 0), ("write", 0, 2), ("in a module", 2, 4)], 1)
@example([("alloc", 0, 0), ("free", 0, 0), ("alloc", 1, 1), ("free", 1, 0), ("read", 4, 0)], 2)
def test_pieces_of_any_size_give_what_one_piece_gives(
    words: Sequence[tuple[str, int, int]], rows: int
) -> None:
    whole = everything(told(words))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "_BLOCK_ROWS", rows)
        patch.setattr(measured_facts, "_MENTIONS_AT_ONCE", rows)
        patch.setattr(timeline, "_CHANGES_AT_ONCE", rows)
        assert everything(told(words)) == whole


@given(
    st.lists(st.tuples(st.integers(-9, 9), st.integers(0, 9)), max_size=20),
    st.booleans(),
    st.booleans(),
    st.integers(1, 5),
)
@example([(4, 4), (2, 9), (-2, 7)], False, False, 2)
@example([(4, 4), (2, 9), (-2, 7)], False, True, 1)
def test_the_drift_is_found_in_pieces(
    changes: Sequence[tuple[int, int]], is_elsewhere: bool, is_backwards: bool, rows: int
) -> None:
    b = TraceBuilder(devices=("cpu", "cuda:0"))
    for size, _ in changes:
        b.alloc(size)
    if is_elsewhere:
        b.alloc(1, device=1)
    trace = b.build()
    sizes = np.array([size for size, _ in changes] + [1] * is_elsewhere)
    totals = np.array([1000 + total for _, total in changes] + [1] * is_elsewhere)
    trace.allocations["size_bytes"], trace.allocations["total_allocated"] = sizes, totals
    sizes, totals = sizes[: len(changes)], totals[: len(changes)]
    if is_backwards:
        # As where the first of two threads begins after the other one.
        trace.events["start_ns"] = trace.events["start_ns"][::-1].copy()
        sizes, totals = sizes[::-1], totals[::-1]
    drift = totals - np.cumsum(sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "_BLOCK_ROWS", rows)
        found = analyze_trace(trace).reconciliation.drift_bytes
    assert found == (drift.max() - drift.min() if len(drift) else 0)


def test_a_free_that_leaves_nothing_allocated_counts_beside_another_device() -> None:
    b = TraceBuilder(devices=("cuda:0", "cuda:1"))
    first, second = b.alloc(100), b.alloc(50)
    b.alloc(1, device=1)
    b.free(first)
    b.free(second)
    trace = b.build()
    trace.allocations["total_allocated"] = [100, 150, 1, 50, 0]
    assert analyze_trace(trace).reconciliation.drift_bytes == 0
