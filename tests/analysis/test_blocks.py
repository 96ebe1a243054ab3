"""Blocks and modules: bounded, and together with the rest the whole footprint."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_torchmem.analysis.sampling import FRAMES_DEEP, StorageLives, find_blocks
from pytest_torchmem.measuring.body_measurement import BodyMeasurement
from pytest_torchmem.values.contributors import Category, Contributor, Phase, Source
from pytest_torchmem.values.picture import Blocks

ROWS = 12


def who(module="", category=Category.ACTIVATION):
    return Contributor(category, 0, 0, "aten::mm", module, None, Phase.FORWARD)


def lives_of(storages, groups=()):
    """Storages as (begin, end, bytes), all of one origin if no groups are given."""
    table = np.array(storages, np.int64).reshape(-1, 3)
    groups = groups or [(who(), np.arange(len(table)))]
    return StorageLives(table[:, 0], table[:, 1], table[:, 2], groups)


def totals_of(storages):
    return [sum(s for b, e, s in storages if b <= row < e) for row in range(ROWS)]


def blocks_of(storages, limit=1000, stacks=(), groups=()):
    return find_blocks(
        lives_of(storages, groups),
        np.arange(ROWS),
        totals_of(storages),
        lambda place: stacks[place] if stacks else (),
        limit,
    )


storages = st.lists(
    st.tuples(st.integers(0, ROWS), st.integers(0, ROWS), st.integers(0, 9)), max_size=20
).map(lambda rows: [(min(b, e), max(b, e), size) for b, e, size in rows])


@given(storages, st.integers(0, 25))
def test_blocks_and_the_rest_are_the_footprint_at_each_moment(storages, limit):
    found = blocks_of(storages, limit)
    assert len(found.blocks) <= limit
    shown = totals_of([(b.begin, b.end, b.size_bytes) for b in found.blocks])
    assert [a + b for a, b in zip(shown, found.rest, strict=True)] == totals_of(storages)
    assert found.count == sum(1 for b, e, size in storages if e > b and size)


@given(storages, st.integers(0, 25))
def test_blocks_cross_as_plain_values(storages, limit):
    found = blocks_of(storages, limit)
    assert Blocks.from_json(json.loads(json.dumps(found.to_json())), ROWS) == found


def test_the_largest_have_a_block_and_of_equal_ones_those_that_live_longest():
    found = blocks_of([(0, 1, 4), (0, 9, 4), (2, 3, 7), (4, 5, 1)], limit=2)
    assert [(b.begin, b.end, b.size_bytes) for b in found.blocks] == [(0, 9, 4), (2, 3, 7)]
    assert found.rest == (4, 0, 0, 0, 1, *[0] * 7)
    assert found.count == 4


def test_half_of_the_room_is_for_what_is_live_at_the_peak():
    large = [(row, row + 1, 9) for row in range(4)]
    at_peak = [(6, 8, 3) for _ in range(20)]
    found = blocks_of([*large, *at_peak], limit=6)
    assert [b.size_bytes for b in found.blocks] == [9, 9, 9, 3, 3, 3]


def test_a_block_knows_its_origin_and_its_python_calls():
    outer, inner = Source("a.py", 3, "test"), Source("b.py", 7, "forward")
    groups = [(who("a"), np.array([0])), (who("b", Category.INPUT), np.array([1, 2]))]
    found = blocks_of(
        [(0, 3, 1), (1, 3, 2), (2, 3, 2)], stacks=[(), (inner, outer), (outer,)], groups=groups
    )
    assert [found.who[b.who].module for b in found.blocks] == ["a", "b", "b"]
    assert [list(found.stack(b)) for b in found.blocks] == [[], [inner, outer], [outer]]
    assert len(found.stacks) == 2  # what two stacks share is there once


def test_a_deep_recursion_keeps_its_innermost_calls():
    deep = tuple(Source("a.py", line, "again") for line in range(5000))
    found = blocks_of([(0, 3, 1)], stacks=[deep])
    assert list(found.stack(found.blocks[0])) == list(deep[:FRAMES_DEEP])


def test_a_storage_of_no_group_is_no_block():
    found = blocks_of([(0, 3, 5), (0, 3, 6)], groups=[(who(), np.array([1]))])
    assert [b.size_bytes for b in found.blocks] == [6]


@pytest.mark.parametrize("count", [100_000])
def test_many_storages_become_a_picture_of_bounded_size(count):
    rng = np.random.default_rng(0)
    begins = rng.integers(0, 2 * count, count)
    ends = begins + rng.integers(1, 1000, count)
    sizes = rng.integers(1, 1 << 30, count)
    lives = StorageLives(begins, ends, sizes, [(who(), np.arange(count))])
    rows = np.arange(0, 2 * count, 500)
    found = find_blocks(lives, rows, [0] * len(rows), lambda place: ())
    assert len(json.dumps(found.to_json())) < 60_000
    assert found.count == count


def test_a_recorded_block_has_its_calls_from_the_user_s_outermost_function_on():
    import torch

    def inner(x):
        return x.neg()

    def outer(x):
        return inner(x)

    measurement = BodyMeasurement("cpu")
    measurement.start()
    kept = outer(torch.ones(1000))
    measurement.stop()
    blocks = measurement.picture().blocks
    (neg,) = (b for b in blocks.blocks if blocks.who[b.who].operator == "aten::neg")
    calls = list(blocks.stack(neg))
    assert [call.function for call in calls][:2] == ["inner", "outer"]
    assert [call.line - inner.__code__.co_firstlineno for call in calls][:2] == [1, 4]
    assert calls[2].function.startswith("test_a_recorded_block")
    libraries = tuple(measurement.profile_so_far().tree.trace.meta["library_paths"])
    assert not calls[-1].file.startswith(("<", *libraries))
    assert neg.size_bytes == 4000
    del kept
