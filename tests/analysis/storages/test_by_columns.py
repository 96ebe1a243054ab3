"""Work that is done on whole columns, held against the same work done one row at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from pytest_torchmem.analysis.pipeline import MemoryProfile, analyze_trace
from pytest_torchmem.analysis.storages.categories import Step, made_from_data
from pytest_torchmem.analysis.storages.measured_facts import forward_steps
from pytest_torchmem.analysis.storages.storages import BEFORE, NEVER
from pytest_torchmem.values.contributors import Category
from pytest_torchmem.values.trace import Ownership
from tests.builders import Block, TraceBuilder

# Each word does something to one of a few blocks, some of which share a pointer.
WORDS = st.lists(
    st.tuples(
        st.sampled_from(
            ("alloc", "free", "read", "write", "make", "in a module", "number", "owner")
        ),
        st.integers(0, 5),
        st.integers(0, 5),
    ),
    max_size=30,
)


def told(words: Sequence[tuple[str, int, int]]) -> MemoryProfile:
    """Return the analysis of what the words say, on two devices with places in common."""
    b = TraceBuilder(devices=("cpu", "cuda:0"))
    blocks = [b.existing(8 * n + 8, device=n % 2) for n in range(3)]
    blocks += [b.unheard_of(8), b.unheard_of(32), b.unheard_of(1000)]
    for word, first, second in words:
        one, other = blocks[first], blocks[second]
        if word == "alloc":
            blocks[first] = b.alloc(64 + second, at=one, device=one.device)
        elif word == "free":
            b.free(one)
        elif word == "read":
            b.read(one, other)
        elif word == "write":
            with b.op("aten::mul_", reads=[one], writes=[other]):
                pass
        elif word == "make":
            with b.op("aten::mul", reads=[one]):
                blocks[second] = b.alloc(128, at=other, device=other.device)
        elif word == "in a module":
            with b.module(1), b.op("aten::mm", reads=[one, other]):
                blocks[second] = b.alloc(256, at=other, device=other.device)
        elif word == "number":
            number: Block = b.alloc(8)
            with b.op("aten::div", reads=[one, number]):
                blocks[second] = b.alloc(32, at=other, device=other.device)
        else:
            with b.optimizer_step():
                b.owner(one, Ownership.PARAMETER)
    return analyze_trace(b.build())


@given(WORDS)
def test_lifetimes_are_those_that_one_finds_event_by_event(
    words: Sequence[tuple[str, int, int]],
) -> None:
    profile = told(words)
    storages, tree = profile.storages, profile.tree
    table = tree.trace.allocations
    alive: dict[tuple[int, int], tuple[float, int]] = {}
    lives: list[tuple[int, int, float, float]] = []
    for row in np.argsort(tree.rank[table["event"]]).tolist():
        place = int(table["device"][row]), int(table["ptr"][row])
        rank, size = float(tree.rank[table["event"][row]]), int(table["size_bytes"][row])
        if place in alive:
            lives.append((*place, alive.pop(place)[0], rank))
        if size > 0:
            alive[place] = rank, size
    lives += [(*place, born, NEVER) for place, (born, _) in alive.items()]
    columns = (storages.device, storages.ptr, storages.born, storages.died)
    found = list(zip(*(column.tolist() for column in columns), strict=True))
    assert sorted(life for life in found if life[2] != BEFORE) == sorted(lives)
    # At most one storage at a place was there before, and it ends where the first other one begins.
    early = [life for life in found if life[2] == BEFORE]
    assert len({life[:2] for life in early}) == len(early)
    for device, ptr, _, died in early:
        later = [born for d, p, born, _ in lives if (d, p) == (device, ptr)]
        assert died <= min(later, default=NEVER)


def every_step(profile: MemoryProfile) -> list[Step]:
    """Return each leaf operator of the forward pass as a step, with nothing left out."""
    evidence, tree = profile.recording, profile.tree
    event, storage, written = evidence.operands
    numbers = evidence.made & (evidence.birth_leaf < 0) & (evidence.storages.size_bytes <= 16)
    leaves = {int(tree.leaf[row]) for row in event.tolist()} | set(evidence.birth_leaf.tolist())
    steps = []
    for leaf in sorted(leaves - {-1}, key=lambda leaf: int(tree.rank[leaf])):
        mine = tree.leaf[event] == leaf
        reads = {s for s in storage[mine].tolist() if s < 0 or not numbers[s]}
        writes = set(storage[mine & written].tolist())
        makes = np.flatnonzero(evidence.made & (evidence.birth_leaf == leaf)).tolist()
        steps.append(Step(bool(evidence.module_call[leaf] >= 0), reads, writes, makes))
    return steps


@given(WORDS)
@example([("read", 0, 0), ("make", 0, 2), ("in a module", 2, 4)])
@example([("make", 0, 2), ("write", 0, 2), ("write", 4, 2), ("in a module", 2, 4)])
@example([("read", 0, 0), ("in a module", 0, 0), ("read", 0, 0)])
def test_steps_that_are_left_out_change_nothing(words: Sequence[tuple[str, int, int]]) -> None:
    profile = told(words)
    whole, left = every_step(profile), list(forward_steps(profile.recording))
    early = np.flatnonzero(profile.storages.born == BEFORE).tolist()
    for has_modules in (False, True):
        for inputs in (set[int](), set(early), set(early[::2]), set(early[:1])):
            for gradients in (set[int](), set(early[::3]), set(range(0, len(profile.storages), 2))):
                expected = made_from_data(whole, inputs, has_modules, gradients)
                assert made_from_data(left, inputs, has_modules, gradients) == expected


def test_a_loop_that_does_the_same_is_one_step() -> None:
    b = TraceBuilder()
    x = b.existing(16)
    for _ in range(5):
        with b.op("aten::add", reads=[x]):
            y = b.alloc(16)
        b.free(y)
    assert len(list(forward_steps(analyze_trace(b.build()).recording))) == 1


@given(WORDS)
def test_levels_are_those_of_the_storages_alive(words: Sequence[tuple[str, int, int]]) -> None:
    profile = told(words)
    storages, counted = profile.storages, profile.evidence.counted
    for row, rank in enumerate(profile.ranks.tolist()):
        alive = counted & (storages.born <= rank) & (storages.died > rank)
        for category in Category:
            mine = alive & (profile.labels == category.column)
            assert profile.timeline.of(category)[row] == storages.size_bytes[mine].sum()


def test_what_meets_a_gradient_outside_the_model_is_not_read_by_it_and_is_data_no_more():
    noise, buffer, gradient, rate = 0, 1, 2, 3
    steps = [
        Step(False, set(), set(), [noise]),
        Step(False, set(), set(), [buffer]),
        Step(False, set(), set(), [rate]),
        Step(False, {gradient, noise}, {gradient}, []),
        Step(False, {buffer, gradient}, {buffer}, []),
        Step(True, {buffer, rate}, set(), []),
    ]
    assert made_from_data(steps, set(), True, {gradient}) == {rate}
    assert made_from_data(steps, set(), True) == {noise, rate}
