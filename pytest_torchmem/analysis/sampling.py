"""From a profile with its arrays to a `Picture` of bounded size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from pytest_torchmem.analysis.picture import OperatorUse, Picture, Span, Track
from pytest_torchmem.analysis.pipeline import MemoryProfile
from pytest_torchmem.analysis.results import Category, Contributor
from pytest_torchmem.analysis.timeline import Timeline
from pytest_torchmem.trace import EventKind, MarkKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOMENTS: Final = 400
"""About how many moments a picture has; more than a screen has room to tell apart."""

TRACKS: Final = 40
OPERATORS: Final = 50
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
    rows = _chosen(timeline, moments)
    holdings = _Holdings(profile, rows)
    picture = sketch_timeline(timeline, moments)
    return replace(
        picture,
        tracks=tuple(holdings.tracks(picture.totals)),
        operators=tuple(_operators(profile, holdings)),
        spans=tuple(find_spans(profile)),
    )


def sketch_timeline(timeline: Timeline, moments: int = MOMENTS) -> Picture:
    """Return the picture of a timeline alone."""
    rows = _chosen(timeline, moments)
    own = timeline.largest
    return Picture(
        times_ns=tuple(timeline.times_ns[rows].tolist()),
        rows=tuple(rows.tolist()),
        change_count=len(timeline.times_ns),
        levels={c: tuple(timeline.of(c)[rows].tolist()) for c in Category if own[c]},
        estimated=timeline.estimated,
    )


def _chosen(timeline: Timeline, moments: int) -> NDArray[np.int64]:
    """Return the rows to keep: of each stretch its highest and its lowest, and every peak."""
    count = len(timeline.times_ns)
    if count <= moments:
        return np.arange(count)
    total = timeline.total
    kept = {0, count - 1, timeline.peak_row}
    kept.update(int(np.argmax(timeline.of(category))) for category in Category)
    stretches = np.array_split(np.arange(count), max(1, moments // 2))
    for stretch in stretches:
        kept.add(int(stretch[np.argmax(total[stretch])]))
        kept.add(int(stretch[np.argmin(total[stretch])]))
    return np.array(sorted(kept), np.int64)


class _Holdings:
    """The storages of a footprint, by category and origin, over the chosen rows."""

    def __init__(self, profile: MemoryProfile, rows: NDArray[np.int64]) -> None:
        storages = profile.storages
        self.storages = np.flatnonzero(profile.evidence.counted)
        ranks = profile.ranks[rows]
        begin = np.maximum(storages.born[self.storages], profile.window.begin)
        #: The first chosen row that each storage is live at, and the first after its end.
        self.first = np.searchsorted(ranks, begin, side="left")
        self.after = np.searchsorted(ranks, storages.died[self.storages], side="left")
        self.sizes = storages.size_bytes[self.storages]
        self.row_count = len(rows)
        self.peak = int(np.searchsorted(rows, profile.timeline.peak_row))
        self.origins = []
        members = defaultdict(list)
        for place, (storage, label) in enumerate(
            zip(self.storages.tolist(), profile.labels[self.storages].tolist(), strict=True)
        ):
            category = _CATEGORIES[label]
            origin = profile.attribution.origin(storage, category)
            self.origins.append(origin)
            members[category, origin].append(place)
        self.groups = [(category, o, np.array(m)) for (category, o), m in members.items()]

    def tracks(self, totals: tuple[int, ...]) -> Iterator[Track]:
        """Yield the groups that are among the largest at any row, the largest first."""
        groups = sorted(self.groups, key=lambda g: -int(self.sizes[g[2]].sum()))[: 50 * TRACKS]
        levels = np.array([self._over_time(m, self.sizes[m]) for _, _, m in groups])
        if not len(levels):
            return
        depth = min(_NAMED_PER_MOMENT, len(levels))
        top = np.argpartition(-levels, depth - 1, axis=0)[:depth]
        named = np.unique(top[np.take_along_axis(levels, top, axis=0) > 0])
        named = named[np.argsort(-levels[named].max(axis=1), kind="stable")][:TRACKS]
        for index in named.tolist():
            category, o, members = groups[index]
            largest = int(np.argmax(levels[index]))
            count = int(self._over_time(members, np.ones(len(members), np.int64))[largest])
            size_bytes = int(levels[index][largest])
            who = Contributor(
                category, size_bytes, count, o.operator, o.module, o.source, o.phase, o.labels
            )
            yield Track(who, tuple(levels[index].tolist()))

    def _over_time(
        self, members: NDArray[np.int64], amounts: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        changes = np.zeros(self.row_count + 1, np.int64)
        np.add.at(changes, self.first[members], amounts)
        np.add.at(changes, self.after[members], -amounts)
        levels: NDArray[np.int64] = np.cumsum(changes)[:-1]
        return levels

    def at_peak(self) -> NDArray[np.bool_]:
        live: NDArray[np.bool_] = (self.first <= self.peak) & (self.after > self.peak)
        return live


def _operators(profile: MemoryProfile, holdings: _Holdings) -> list[OperatorUse]:
    """Return what each operator allocated within the window."""
    allocated: dict[str, int] = defaultdict(int)
    live: dict[str, int] = defaultdict(int)
    columns = (holdings.sizes.tolist(), holdings.at_peak().tolist(), holdings.origins)
    for size_bytes, at_peak, origin in zip(*columns, strict=True):
        if origin.operator:
            allocated[origin.operator] += size_bytes
            live[origin.operator] += size_bytes if at_peak else 0
    calls = _calls(profile)
    uses = [OperatorUse(o, calls.get(o, 0), allocated[o], live[o]) for o in allocated]
    uses.sort(key=lambda use: (-use.at_peak_bytes, -use.allocated_bytes, use.operator))
    return uses[:OPERATORS]


def _calls(profile: MemoryProfile) -> dict[str, int]:
    trace, window = profile.tree.trace, profile.window
    inside = (profile.tree.rank >= window.begin) & (profile.tree.rank <= window.end)
    inside &= trace.events["kind"] == EventKind.TORCH_OP
    names, counts = np.unique(trace.events["name"][inside], return_counts=True)
    return {trace.strings[n]: c for n, c in zip(names.tolist(), counts.tolist(), strict=True)}


def find_spans(profile: MemoryProfile) -> Iterator[Span]:
    """Yield what the marks within the window delimit; a pair closes the innermost open one."""
    trace = profile.tree.trace
    start_ns = int(trace.events["start_ns"].min()) if len(trace.events) else 0
    ranks = profile.tree.mark_ranks()
    inside = (ranks >= profile.window.begin) & (ranks <= profile.window.end)
    opened: dict[MarkKind, list[tuple[str, int]]] = defaultdict(list)
    closing = {end: (begin, kind) for begin, (kind, end) in _SPANS.items()}
    for mark in trace.marks[inside]:
        kind = MarkKind(int(mark["kind"]))
        time_ns = int(mark["time_ns"]) - start_ns
        if kind in _SPANS:
            name = trace.strings[mark["text"]] if kind is MarkKind.REGION_BEGIN else ""
            opened[kind].append((name, time_ns))
        elif kind in closing and opened[closing[kind][0]]:
            begin, word = closing[kind]
            name, begin_ns = opened[begin].pop()
            yield Span(word, name, begin_ns, time_ns)
        elif kind is MarkKind.STEP:
            yield Span("step", "", time_ns, time_ns)


_CATEGORIES: Final = tuple(Category)
