"""It adds up: footprint, peak and retained bytes against sums worked out another way."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_torchmem.analysis.pipeline import MemoryProfile, analyze_trace
from pytest_torchmem.analysis.storages.timeline import Timeline, find_peak
from pytest_torchmem.store.traces import load_trace
from pytest_torchmem.values.contributors import Category
from pytest_torchmem.values.trace import LOOP, MarkKind, Ownership
from tests.builders import Block, TraceBuilder

# --- by hand ----------------------------------------------------------------------------------


def test_the_peak_is_the_first_moment_of_the_largest_footprint():
    sizes = np.zeros((4, len(Category)), np.int64)
    sizes[:, Category.INPUT.column] = [1, 5, 2, 4]
    sizes[:, Category.TEMPORARY.column] = [0, 1, 3, 2]
    peak = find_peak(Timeline(np.arange(4, dtype=np.int64) * 10, sizes))
    assert (peak.total, peak.time_ns) == (6, 10)
    assert peak.at_peak[Category.TEMPORARY] == 1
    assert peak.temporary == 3


def test_an_empty_timeline_peaks_at_nothing():
    timeline = Timeline(np.empty(0, np.int64), np.empty((0, len(Category)), np.int64))
    assert find_peak(timeline).total == 0


def test_rubbish_from_before_is_not_in_the_footprint():
    b = TraceBuilder()
    b.existing(1000)
    rubbish = b.existing(500)
    weight = b.existing(100, Ownership.PARAMETER)
    b.read(weight)
    b.free(rubbish)
    b.alloc(10)
    profile = analyze_trace(b.build())
    assert profile.timeline.total.tolist() == [100, 110]


def test_a_graph_from_before_uses_nothing_and_one_of_the_body_what_it_keeps():
    b = TraceBuilder()
    kept_before, kept = b.existing(100, Ownership.SAVED), b.existing(10)
    b.alloc(1)
    b.mark(MarkKind.REGION_END)
    b.owner(kept_before, Ownership.SAVED)
    b.owner(kept, Ownership.SAVED)
    assert analyze_trace(b.build()).timeline.total.tolist() == [10, 11]


def test_a_region_counts_what_it_makes_and_what_it_touches():
    b = TraceBuilder()
    before = b.alloc(100)
    unused = b.alloc(1000)
    begin = b.mark(MarkKind.REGION_BEGIN)
    inside = b.alloc(10)
    b.read(before)
    b.free(before)
    end = b.mark(MarkKind.REGION_END)
    b.free(unused)
    b.free(inside)
    region = analyze_trace(b.build()).region(begin, end)
    assert region.timeline.total.tolist() == [100, 110, 10]
    assert region.retained.total == 10


def test_what_is_a_thousandth_of_the_largest_has_no_line_of_its_own():
    builder = TraceBuilder()
    for name, size_bytes in (("aten::mm", 1 << 20), ("aten::add", 1 << 10), ("aten::neg", 1023)):
        with builder.op(name):
            builder.alloc(size_bytes)
    peak = analyze_trace(builder.build()).result().peak
    assert [c.operator for c in peak.live] == ["aten::mm", "aten::add"]
    assert peak.total == (1 << 20) + (1 << 10) + 1023


def test_steps_say_what_was_made_and_is_alive_at_the_end_of_each():
    b = TraceBuilder()
    first = b.alloc(10)
    b.mark(MarkKind.STEP)
    b.free(first)
    b.alloc(7)
    b.mark(MarkKind.STEP)
    b.alloc(7)
    b.mark(MarkKind.STEP)
    assert analyze_trace(b.build()).steps == (10, 7, 14)


# --- generated --------------------------------------------------------------------------------

SIZES = st.integers(1, 1 << 40)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("alloc"), SIZES, st.booleans()),
        st.tuples(st.just("elsewhere"), SIZES),
        st.tuples(st.just("free"), st.integers(0, 50)),
        st.tuples(st.just("read"), st.integers(0, 50)),
        st.tuples(st.just("own"), st.integers(0, 50), st.sampled_from(list(Ownership)[1:])),
        st.tuples(st.sampled_from(["backward", "optimizer", "node", "op"])),
        st.tuples(st.just("leave")),
    ),
    min_size=1,
    max_size=60,
)


@dataclass
class Program:
    """A trace in the making beside a log of it; the log is all that the expected sums look at.

    Each entry of the log: what happened (``alloc``, ``free``, ``use``) to which block.
    """

    builder: TraceBuilder = field(default_factory=lambda: TraceBuilder(("cpu", "cuda:0")))
    log: list[tuple[str, Block]] = field(default_factory=list)
    existing: list[Block] = field(default_factory=list)
    live: list[Block] = field(default_factory=list)
    dead: list[Block] = field(default_factory=list)
    open: list[object] = field(default_factory=list)

    def start(self, sizes: list[int]) -> None:
        self.existing = [self.builder.existing(size) for size in sizes]
        self.live = list(self.existing)

    def alloc(self, size: int, reuse: bool) -> None:
        at = self.dead.pop() if reuse and self.dead else None
        block = self.builder.alloc(size, at=at)
        self.live.append(block)
        self.log.append(("alloc", block))

    def elsewhere(self, size: int) -> None:
        self.builder.alloc(size, device=1)

    def free(self, choice: int) -> None:
        if self.live:
            block = self.live.pop(choice % len(self.live))
            self.dead.append(block)
            self.builder.free(block)
            self.log.append(("free", block))

    def read(self, choice: int) -> None:
        if self.live:
            block = self.live[choice % len(self.live)]
            self.builder.read(block)
            self.log.append(("use", block))

    def own(self, choice: int, kind: Ownership) -> None:
        if self.live:
            block = self.live[choice % len(self.live)]
            self.builder.mark(MarkKind.BACKWARD_BEGIN)
            self.builder.owner(block, kind)
            self.builder.mark(MarkKind.BACKWARD_END)
            uses = (Ownership.SAVED, Ownership.LEAF, Ownership.USED, Ownership.WRITTEN)
            if kind in uses:
                self.log.append(("use", block))

    def enter(self, what: str) -> None:
        contexts = {
            "backward": self.builder.backward,
            "optimizer": self.builder.optimizer_step,
            "node": lambda: self.builder.node("MulBackward0"),
            "op": lambda: self.builder.op("aten::mul", sequence=1),
        }
        context = contexts[what]()
        context.__enter__()
        self.open.append(context)

    def leave(self) -> None:
        if self.open:
            self.open.pop().__exit__(None, None, None)  # type: ignore[attr-defined]

    def run(self, actions: list[tuple]) -> None:
        for name, *arguments in actions:
            method = getattr(self, name, None)
            if method is None:
                self.enter(name)
            else:
                method(*arguments)

    def finish(self) -> MemoryProfile:
        while self.open:
            self.leave()
        return analyze_trace(self.builder.build())


def expected_levels(program: Program, begin: int, end: int) -> list[int]:
    """The footprint of a stretch of the log, at its beginning and after each change."""
    alive = list(program.existing)
    for what, block in program.log[:begin]:
        if what != "use":
            (alive.append if what == "alloc" else alive.remove)(block)
    inside = program.log[begin:end]
    made = [block for what, block in inside if what == "alloc"]
    counted = made + [b for what, b in inside if what == "use" and b in alive]
    levels = [sum(block.size_bytes for block in alive if block in counted)]
    for what, block in inside:
        if what != "use" and block in counted:
            change = block.size_bytes if what == "alloc" else -block.size_bytes
            levels.append(levels[-1] + change)
    return levels


def alive_at_the_end(program: Program, begin: int, end: int) -> int:
    made = {block: True for what, block in program.log[begin:end] if what == "alloc"}
    for what, block in program.log[begin:end]:
        if what == "free":
            made.pop(block, None)
    return sum(block.size_bytes for block in made)


@settings(deadline=None, max_examples=200)
@given(st.lists(SIZES, max_size=4), ACTIONS)
def test_the_categories_sum_to_the_footprint_at_every_event(existing, actions):
    program = Program()
    program.start(existing)
    program.run(actions)
    timeline = program.finish().timeline
    expected = expected_levels(program, 0, len(program.log))
    assert timeline.sizes.sum(axis=1).tolist() == expected
    assert (timeline.sizes >= 0).all()
    assert timeline.of(Category.UNKNOWN).max() <= expected[0]


@settings(deadline=None, max_examples=100)
@given(st.lists(SIZES, max_size=4), ACTIONS)
def test_the_peak_is_the_largest_running_sum_and_retained_is_what_is_alive(existing, actions):
    program = Program()
    program.start(existing)
    program.run(actions)
    profile = program.finish()
    expected = expected_levels(program, 0, len(program.log))
    assert profile.peak.total == max(expected) == profile.peak.at_peak.total
    assert sum(c.size_bytes for c in profile.peak.live) == max(expected)
    alive = alive_at_the_end(program, 0, len(program.log))
    assert profile.retained.total == alive == profile.retained.by_category.total
    for category, amount in profile.peak.by_category.items():
        assert profile.peak.at_peak[category] <= amount <= profile.peak.total


@settings(deadline=None, max_examples=100)
@given(st.lists(SIZES, max_size=4), ACTIONS, ACTIONS, ACTIONS)
def test_a_region_adds_up_like_the_whole(existing, before, inside, after):
    program = Program()
    program.start(existing)
    program.run(before)
    begin, first = program.builder.mark(MarkKind.REGION_BEGIN), len(program.log)
    program.run(inside)
    end, last = program.builder.mark(MarkKind.REGION_END), len(program.log)
    program.run(after)
    region = program.finish().region(begin, end)
    assert region.timeline.total.tolist() == expected_levels(program, first, last)
    assert region.retained.total == alive_at_the_end(program, first, last)


@settings(deadline=None, max_examples=50)
@given(existing=st.lists(SIZES, max_size=4), actions=ACTIONS)
def test_a_stored_trace_gives_the_same_profile(existing, actions, tmp_path_factory):
    program = Program()
    program.start(existing)
    program.run(actions)
    profile = program.finish()
    path = tmp_path_factory.mktemp("trace") / "body.npz"
    profile.tree.trace.save(path)
    assert analyze_trace(load_trace(path)).result().to_json() == profile.result().to_json()


def test_of_two_loops_the_one_whose_single_steps_leave_most_behind_is_the_growth():
    b = TraceBuilder()
    for loop, sizes in ((1, (1, 10)), (2, (1, 7, 7, 7, 7))):
        for size_bytes in sizes:
            b.alloc(size_bytes)
            b.mark(MarkKind.STEP, f"{LOOP}{loop}")
    assert analyze_trace(b.build()).steps == (1, 11)


def test_a_storage_of_one_byte_is_born_as_others_are():
    b = TraceBuilder()
    with b.op("aten::empty"):
        block = b.alloc(1)
    b.read(block)
    profile = analyze_trace(b.build())
    assert profile.storages.size_bytes.tolist() == [1]
    assert profile.timeline.total.tolist() == [0, 1]


def test_what_the_last_step_leaves_is_not_asked_what_most_steps_leave():
    b = TraceBuilder()
    for size_bytes in (1, 1, 5, 5):
        b.alloc(size_bytes)
        b.mark(MarkKind.STEP)
    # Steps 2 to 4 add 1, 5 and 5; what the last of them made may be replaced by the next.
    assert analyze_trace(b.build()).each_step == 1
