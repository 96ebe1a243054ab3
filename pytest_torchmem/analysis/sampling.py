"""A profile with its arrays becomes a `Picture` of bounded size.

A recording of 100,000 storages becomes a picture of the same size as one of 1,000: the largest
have a block, half of the room being for those that are live at the peak; of equal ones those that
live longest have it. All others are one level beside them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytest_torchmem.analysis.events.op_tree import self_times, start_ns
from pytest_torchmem.analysis.pipeline import MemoryProfile
from pytest_torchmem.analysis.storages.attribution import grouped
from pytest_torchmem.analysis.storages.timeline import Timeline
from pytest_torchmem.values.contributors import Category, Contributor, Source
from pytest_torchmem.values.picture import (
    Blocks,
    OperatorUse,
    Picture,
    Span,
    StorageBlock,
    Track,
)
from pytest_torchmem.values.trace import EventKind, MarkKind, summed_by_row

BLOCKS: Final = 1000
"""How many storages have a block of their own; a screen has no room to tell more apart."""

FRAMES_DEEP: Final = 60
"""A stack keeps its innermost calls; a recursion may be thousands deep."""


@dataclass(frozen=True, slots=True, eq=False)
class StorageLives:
    """The storages of a footprint over the rows of its timeline.

    Attributes:
        begins: The first row that each storage is live at: int64, shape (S,).
        ends: The first row after its end; the number of rows where it does not end.
        sizes: Its bytes.
        groups: Storages of one origin: a contributor without its numbers, and their places.
    """

    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    sizes: NDArray[np.int64]
    groups: Sequence[tuple[Contributor, NDArray[np.int64]]]

    def are_live(self, row: int) -> NDArray[np.bool_]:
        """Return which storages are live at a row: bool, shape (S,)."""
        return (self.begins <= row) & (self.ends > row)

    def contributors(self, members_wanted: NDArray[np.bool_]) -> Iterator[Contributor]:
        """Yield the origins of the storages in ``members_wanted``, with what these hold."""
        for who, members in self.groups:
            held = self.sizes[members[members_wanted[members]]]
            if len(held):
                yield who.holding(int(held.sum()), len(held))

    def levels(
        self, rows: NDArray[np.int64], places: NDArray[np.int64], *, count: bool = False
    ) -> NDArray[np.int64]:
        """Return the bytes, or the ``count``, of some storages at each of the rows: int64."""
        amounts = np.ones(len(places), np.int64) if count else self.sizes[places]
        first = np.searchsorted(rows, self.begins[places])
        return summed_by_row(first, np.searchsorted(rows, self.ends[places]), amounts, len(rows))


@dataclass(slots=True)
class _Stacks:
    """Stacks as a tree: each path from a call to the outermost one is there once."""

    nodes: dict[tuple[int, int], int] = field(default_factory=dict)
    frames: dict[Source, int] = field(default_factory=dict)

    def add(self, stack: Sequence[Source]) -> int:
        """Return the place of a stack, given innermost first; -1 for an empty one."""
        node = -1
        for source in reversed(stack[:FRAMES_DEEP]):
            frame = self.frames.setdefault(source, len(self.frames))
            node = self.nodes.setdefault((node, frame), len(self.nodes))
        return node


def find_blocks(
    lives: StorageLives,
    rows: NDArray[np.int64],
    totals: Sequence[int],
    stack_of: Callable[[int], Sequence[Source]],
    limit: int = BLOCKS,
) -> Blocks:
    """Return ``limit`` storages at most as blocks, and what the others hold at ``rows``.

    ``totals`` is the footprint at each of them, ``stack_of`` gives the Python calls around
    the storage at a place. Blocks and the rest together are the footprint, at each row.
    """
    makers = np.full(len(lives.sizes), -1, np.int64)
    for number, (_, members) in enumerate(lives.groups):
        makers[members] = number
    lived = np.flatnonzero((lives.ends > lives.begins) & (lives.sizes > 0) & (makers >= 0))
    largest = _largest(lives, lived, int(rows[int(np.argmax(totals))]), limit)
    kept_rows = largest[np.lexsort((largest, -lives.ends[largest], lives.begins[largest]))]
    numbers = {maker: n for n, maker in enumerate(dict.fromkeys(makers[kept_rows].tolist()))}
    held = lives.levels(rows, kept_rows)
    stacks = _Stacks()
    blocks = tuple(
        StorageBlock(
            int(lives.begins[place]),
            int(lives.ends[place]),
            int(lives.sizes[place]),
            numbers[int(makers[place])],
            stacks.add(stack_of(place)),
        )
        for place in kept_rows.tolist()
    )
    return Blocks(
        blocks=blocks,
        who=tuple(lives.groups[maker][0] for maker in numbers),
        stacks=tuple(stacks.nodes),
        frames=tuple(stacks.frames),
        rest=tuple((np.array(totals, np.int64) - held).tolist()),
        count=len(lived),
    )


def _largest(
    lives: StorageLives, lived: NDArray[np.int64], peak_row: int, limit: int
) -> NDArray[np.int64]:
    """Return the ``limit`` largest among ``lived``; half the room is for what is live at the peak.

    Of equal ones those that live longest come first.
    """
    lengths = lives.ends[lived] - lives.begins[lived]
    ranked = lived[np.lexsort((lived, -lengths, -lives.sizes[lived]))]
    at_peak = np.flatnonzero(lives.are_live(peak_row)[ranked])[: limit // 2]
    others = np.setdiff1d(np.arange(len(ranked)), at_peak)[: limit - len(at_peak)]
    rows: NDArray[np.int64] = ranked[np.concatenate([at_peak, others])]
    return rows


MOMENTS: Final = 400
"""About how many moments a picture has; more than a screen has room to tell apart."""

TRACKS: Final = 40
OPERATORS: Final = 50
_IDLE: Final = 50
_NAMED_PER_MOMENT: Final = 4
_SPANS: Final = {
    MarkKind.REGION_BEGIN: ("region", MarkKind.REGION_END),
    MarkKind.BACKWARD_BEGIN: ("backward", MarkKind.BACKWARD_END),
    MarkKind.OPTIMIZER_BEGIN: ("optimizer", MarkKind.OPTIMIZER_END),
}


def sketch(profile: MemoryProfile, moments: int = MOMENTS) -> Picture:
    """Return the picture of a profile: its timeline, who held what when, and its operators."""
    timeline = profile.timeline
    if not len(timeline.times_ns):
        return sketch_timeline(timeline)
    calls, times = _calls(profile)
    storages = np.flatnonzero(profile.evidence.counted).tolist()
    picture = with_holders(
        sketch_timeline(timeline, moments),
        _lives_in(profile),
        calls,
        (*find_spans(profile), *find_idle(profile)),
        lambda place: profile.attribution.stack(storages[place]),
    )
    timed = (replace(use, self_time_ns=times.get(use.operator, 0)) for use in picture.operators)
    return replace(picture, operators=tuple(timed), running=profile.running_at_peak)


def with_holders(
    picture: Picture,
    lives: StorageLives,
    calls: Mapping[str, int],
    spans: Iterable[Span],
    stack_of: Callable[[int], Sequence[Source]],
) -> Picture:
    """Return the picture of a timeline with the storages that its levels are made of."""
    rows, peak_row = np.array(picture.rows, np.int64), picture.rows[picture.peak]
    return replace(
        picture,
        tracks=tuple(find_tracks(lives, rows)),
        operators=tuple(_operators(lives, calls, peak_row)),
        spans=tuple(spans),
        blocks=find_blocks(lives, rows, picture.totals, stack_of),
    )


def sketch_timeline(timeline: Timeline, moments: int = MOMENTS) -> Picture:
    """Return the picture of a timeline alone."""
    rows = chosen_rows(timeline, moments)
    own = timeline.largest
    return Picture(
        times_ns=tuple(timeline.times_ns[rows].tolist()),
        rows=tuple(rows.tolist()),
        change_count=len(timeline.times_ns),
        levels={c: tuple(timeline.of(c)[rows].tolist()) for c in Category if own[c]},
        estimated=timeline.estimated,
    )


def chosen_rows(timeline: Timeline, moments: int) -> NDArray[np.int64]:
    """Return the rows to keep: of each stretch its highest and its lowest, and every peak.

    Six rows with the totals ``[1, 5, 3, 7, 2, 4]`` and two stretches of three: rows 0 and 1 of the
    first, 3 and 4 of the second; the last row is kept, too.
    """
    count = len(timeline.times_ns)
    if count <= moments:
        return np.arange(count)
    total = timeline.total
    kept_moments = {0, count - 1, timeline.peak_row}
    kept_moments.update(int(np.argmax(timeline.of(category))) for category in Category)
    stretches = np.array_split(np.arange(count), max(1, moments // 2))
    for stretch in stretches:
        kept_moments.add(int(stretch[np.argmax(total[stretch])]))
        kept_moments.add(int(stretch[np.argmin(total[stretch])]))
    return np.array(sorted(kept_moments), np.int64)


def find_tracks(lives: StorageLives, rows: NDArray[np.int64]) -> Iterator[Track]:
    """Yield the groups that are among the largest at any of the rows, the largest first.

    Three groups over two rows, if one name for each moment were enough::

        levels    [[8, 0],      top    [[0, 2]]        row of the largest at each moment
                   [5, 5],      named  [0, 2]          the second group is never the largest
                   [0, 9]]
    """
    groups = sorted(lives.groups, key=lambda group: -int(lives.sizes[group[1]].sum()))
    groups = groups[: 50 * TRACKS]
    if not groups:
        return
    levels = np.array([lives.levels(rows, members) for _, members in groups])
    depth = min(_NAMED_PER_MOMENT, len(levels))
    top = np.argpartition(-levels, depth - 1, axis=0)[:depth]
    tracks = np.unique(top[np.take_along_axis(levels, top, axis=0) > 0])
    tracks = tracks[np.argsort(-levels[tracks].max(axis=1), kind="stable")][:TRACKS]
    for index in tracks.tolist():
        who, members = groups[index]
        own = levels[index].tolist()
        size_bytes = max(own)
        count = int(lives.levels(rows, members, count=True)[own.index(size_bytes)])
        yield Track(who.holding(size_bytes, count), tuple(own))


def _operators(lives: StorageLives, calls: Mapping[str, int], peak_row: int) -> list[OperatorUse]:
    """Return what each operator allocated within the window, those of the peak first."""
    allocated, live = Counter[str](), Counter[str]()
    made = lives.begins > 0
    for found, wanted in ((allocated, made), (live, made & lives.are_live(peak_row))):
        for who in lives.contributors(wanted):
            found[who.operator] += who.size_bytes
    uses = [OperatorUse(o, calls.get(o, 0), allocated[o], live[o]) for o in allocated if o]
    uses.sort(key=lambda use: (-use.at_peak_bytes, -use.allocated_bytes, use.operator))
    return uses[:OPERATORS]


def _lives_in(profile: MemoryProfile) -> StorageLives:
    """Return the storages of a footprint, by category and origin."""
    found = np.flatnonzero(profile.evidence.counted)
    born, died = profile.storages.born[found], profile.storages.died[found]
    rows = found.tolist()

    def origin_of(place: int) -> Contributor:
        """A picture has no room for the reasons of a user's passes."""
        origin = profile.attribution.origin(rows[place])
        return replace(origin, claimed="") if origin.claimed else origin

    return StorageLives(
        begins=np.searchsorted(profile.ranks, np.maximum(born, profile.window.begin)),
        ends=np.searchsorted(profile.ranks, died),
        sizes=profile.storages.size_bytes[found],
        groups=tuple(grouped(range(len(found)), origin_of)),
    )


def _calls(profile: MemoryProfile) -> tuple[dict[str, int], dict[str, int]]:
    """Count the calls of each operator within the window, and sum up their own time.

    The time of an operator that another one called is that of the outermost, as its memory is.
    """
    trace = profile.tree.trace
    events = trace.events
    is_operator = (events["kind"] == EventKind.TORCH_OP) & events["is_operator"].astype(bool)
    is_inner = is_operator & (events["parent"] >= 0) & is_operator[events["parent"]]
    outer = np.where(is_inner, events["parent"], np.arange(len(events)))
    while not np.array_equal(further := outer[outer], outer):
        outer = further
    inside = profile.window.holds(profile.tree.rank)
    inside &= trace.events["kind"] == EventKind.TORCH_OP
    numbers, group, counts = np.unique(
        trace.events["name"][inside], return_inverse=True, return_counts=True
    )
    times = np.zeros(len(numbers), np.int64)
    times_ns = np.zeros(len(events), np.int64)
    # What ran on autograd's thread meanwhile may have taken longer than the call that waited.
    np.add.at(times_ns, outer, np.maximum(self_times(profile.tree), 0))
    np.add.at(times, group, times_ns[inside])
    names = [trace.strings[number] for number in numbers.tolist()]
    return (
        dict(zip(names, counts.tolist(), strict=True)),
        dict(zip(names, times.tolist(), strict=True)),
    )


def find_idle(profile: MemoryProfile) -> Iterator[Span]:
    """Yield the longest stretches in which the GPU's queue had run dry, where kernels are known."""
    if not len(profile.tree.trace.device_events):
        return
    idle, begin = profile.queue.idle, start_ns(profile.tree)
    longest = np.argsort(idle.begins_ns - idle.ends_ns, kind="stable")[:_IDLE]
    for place in np.sort(longest).tolist():
        at, until = int(idle.begins_ns[place]), int(idle.ends_ns[place])
        yield Span("idle", "", at - begin, until - begin)


def find_spans(profile: MemoryProfile) -> Iterator[Span]:
    """Yield the spans between the marks in the window; an end closes the innermost open span.

    Of the steps, only those are spans whose bytes `MemoryProfile.steps` has.
    """
    trace = profile.tree.trace
    began_ns = start_ns(profile.tree)
    ranks = profile.tree.mark_ranks
    inside = profile.window.holds(ranks)
    opened: dict[MarkKind, list[tuple[str, int]]] = defaultdict(list)
    closing = {end: (begin, kind) for begin, (kind, end) in _SPANS.items()}
    for mark, rank in zip(trace.marks[inside], ranks[inside].tolist(), strict=True):
        kind = MarkKind(int(mark["kind"]))
        time_ns = int(mark["time_ns"]) - began_ns
        if kind in _SPANS:
            name = trace.strings[mark["text"]] if kind is MarkKind.REGION_BEGIN else ""
            opened[kind].append((name, time_ns))
        elif kind in closing and opened[closing[kind][0]]:
            begin, word = closing[kind]
            name, begin_ns = opened[begin].pop()
            yield Span(word, name, begin_ns, time_ns)
        elif kind is MarkKind.STEP and rank in profile.step_ranks:
            yield Span("step", "", time_ns, time_ns)
