"""A static graph becomes estimated memory: lifetimes, categories, the timeline, the peak.

The rules for graphs are those of ``torch/_inductor/fx_passes/memory_estimator.py`` (both of its
generations), for any device: a storage is allocated by the node that first returns it and released
after its last use, unless it belongs to the caller. `memory_profile` and `interactions` return
what torch's ``build_memory_profile`` and ``get_fwd_bwd_interactions`` return.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pytest_torchmem.analysis.estimated.static_facts import makers_of, settle_categories
from pytest_torchmem.analysis.events.op_tree import folded
from pytest_torchmem.analysis.storages.attribution import grouped
from pytest_torchmem.analysis.storages.timeline import Timeline, find_peak
from pytest_torchmem.values.contributors import Category, CategoryBytes, Contributor, Phase
from pytest_torchmem.values.results import Result, Retained
from pytest_torchmem.values.static_graph import (
    Lifetimes,
    NodeKind,
    StaticGraph,
    StaticNode,
    StaticRun,
)

Releasable = Callable[[StaticNode], bool]


def made_by_operator(node: StaticNode) -> bool:
    """Return whether the graph itself made the node's storages: inputs belong to the caller."""
    return node.kind is NodeKind.OPERATOR


def not_primal(node: StaticNode) -> bool:
    """The rule torch has for AOT graphs: everything but the primals may be released."""
    return not node.name.startswith("primals")


def lifetimes_by_last_use(
    graph: StaticGraph, releasable: Releasable = made_by_operator
) -> Lifetimes:
    """Return when each storage lives if it is released as early as the graph permits.

    A storage lives to the end if ``releasable`` says no to the node that made it, if the output
    node uses it, or if no node does. Two operators; the second one is the last to use storage 0::

        row          0   1   2   3   4
        operator       mm      exp
        storage 0        x   x   x         first 1, end 4
        storage 1                x   x     first 3, end 5: nobody uses it
    """
    first = np.zeros(len(graph.storages), dtype=np.int64)
    end = np.zeros(len(graph.storages), dtype=np.int64)
    operator, row_count = 0, graph.row_count
    released: dict[int, int] = {}
    for node in graph.nodes:
        is_operator = node.kind is NodeKind.OPERATOR
        for storage in node.makes:
            first[storage] = 2 * operator + 1 if is_operator else 0
            end[storage] = row_count
        if node.kind in (NodeKind.OPERATOR, NodeKind.OUTPUT):
            # The output node uses its storages at a row that is never reached.
            last_row = 2 * operator + 2 if is_operator else row_count
            released.update(dict.fromkeys(node.uses, last_row))
        operator += is_operator
    kept_storages = {s for node in graph.nodes if not releasable(node) for s in node.makes}
    for storage, row in released.items():
        if storage not in kept_storages and end[storage]:
            end[storage] = row
    return Lifetimes(first, end)


def memory_profile(
    graph: StaticGraph,
    releasable: Releasable = made_by_operator,
    on_device: Callable[[str], bool] = lambda _: True,
) -> list[int]:
    """Return the bytes live at each row, over the devices that ``on_device`` accepts.

    With ``on_device=lambda device: device != "cpu"`` this is torch's ``build_memory_profile``.
    """
    sizes = np.array([s.size_bytes * on_device(s.device) for s in graph.storages], dtype=np.int64)
    levels = lifetimes_by_last_use(graph, releasable).levels(sizes, graph.row_count)
    profile: list[int] = levels.tolist()
    return profile


def interactions(
    forward: StaticGraph, backward: StaticGraph, on_device: Callable[[str], bool] = lambda _: True
) -> tuple[int, set[str]]:
    """Return what a forward and its backward graph over one storage table have between them.

    The bytes of outputs that the backward does not take, which stay throughout, and the names of
    backward inputs whose storages the backward may not release: they look into primals, or the
    forward did not make them.
    """
    inputs = [node for node in forward.nodes if node.kind is NodeKind.INPUT]
    primals = {s for node in inputs if not not_primal(node) for s in node.makes}
    outputs = _output_storages(forward)
    taken: set[int] = set()
    pinned: set[str] = set()
    for node in backward.nodes:
        if node.kind is not NodeKind.INPUT:
            continue
        storages = {*node.makes, *node.uses}
        taken |= storages
        if storages & primals or not storages & outputs:
            pinned.add(node.name)
    held_storages = [forward.storages[s] for s in outputs - taken]
    return sum(s.size_bytes for s in held_storages if on_device(s.device)), pinned


def pair_peak_bytes(
    forward: StaticGraph, backward: StaticGraph, on_device: Callable[[str], bool] = lambda _: True
) -> int:
    """Return the peak of a pair as torch defines it in ``get_peak_memory``.

    torch leaves out the primals that the backward graph does not take; `join_pair` counts them.
    """
    held_bytes, pinned = interactions(forward, backward, on_device)

    def releasable(node: StaticNode) -> bool:
        return not_primal(node) and node.name not in pinned

    in_forward = max(memory_profile(forward, not_primal, on_device))
    return max(in_forward, held_bytes + max(memory_profile(backward, releasable, on_device)))


def join_pair(forward: StaticGraph, backward: StaticGraph, device: str) -> StaticRun:
    """Return a forward and its backward graph as one program with one clock.

    Saved storages live until their last use in backward. Primals and what the caller got out of
    the forward live to the end. Tangents are there once the forward is over.
    """
    _, pinned = interactions(forward, backward)
    tangents = [n for n in backward.nodes if n.kind is NodeKind.INPUT]
    made_storages = {s for node in forward.nodes for s in node.makes}
    arrival = StaticNode(
        "backward",
        NodeKind.OPERATOR,
        phase=Phase.BACKWARD,
        makes=tuple(s for node in tangents for s in node.makes if s not in made_storages),
    )
    ahead = tuple(n for n in forward.nodes if n.kind is not NodeKind.OUTPUT)
    after = tuple(n for n in backward.nodes if n.kind in (NodeKind.OPERATOR, NodeKind.OUTPUT))
    # Those that only the backward graph holds were there from the start.
    attributes = (
        replace(node, makes=tuple(s for s in node.makes if s not in made_storages))
        for node in backward.nodes
        if node.kind is NodeKind.ATTRIBUTE
    )
    joined = StaticGraph((*ahead, *attributes, arrival, *after), backward.storages)
    kept_storages = {
        s for node in tangents if node.name in pinned for s in (*node.makes, *node.uses)
    }
    # A tangent belongs to the engine, which drops it with its last use.
    kept_storages -= set(arrival.makes)
    taken = {s for node in tangents for s in (*node.makes, *node.uses)}
    kept_storages |= _output_storages(forward) - taken
    lifetimes = lifetimes_by_last_use(joined)
    end = lifetimes.end.copy()
    end[sorted(kept_storages)] = joined.row_count
    return StaticRun(joined, Lifetimes(lifetimes.first, end), device)


def _output_storages(graph: StaticGraph) -> set[int]:
    return {s for node in graph.nodes if node.kind is NodeKind.OUTPUT for s in node.uses}


def build_estimated_timeline(run: StaticRun) -> Timeline:
    """Return the bytes on the run's device: row by row, see `pytest_torchmem.values.static_graph`.

    ``times_ns`` counts operators: 0 before the first, k during and after the k-th.
    """
    rows = run.graph.row_count
    index = storages_here(run)
    sizes = np.array([s.size_bytes for s in run.graph.storages], dtype=np.int64)[index]
    columns = np.array([s.category.column for s in run.graph.storages], dtype=np.int64)[index]
    change = np.zeros((rows + 1, len(Category)), dtype=np.int64)
    np.add.at(change, (run.lifetimes.first[index], columns), sizes)
    np.add.at(change, (run.lifetimes.end[index], columns), -sizes)
    times = (np.arange(rows, dtype=np.int64) + 1) // 2
    return Timeline(times, np.cumsum(change[:-1], axis=0), estimated=True)


def allocation_events(run: StaticRun) -> NDArray[np.int64]:
    """Return every allocation and release on the run's device, in order.

    int64, shape (E, 2): a storage's index, and its bytes, negative for a release. Storages from
    before the first operator come first; a storage that is never released has no second entry. A
    simulated allocator replays them. An input of 10 bytes, and 20 bytes that the second operator
    uses last::

        lifetimes   first [0, 1]    end [5 (never), 4]
        events      [[0, +10], [1, +20], [1, -20]]
    """
    index = storages_here(run)
    first, end = run.lifetimes.first[index], run.lifetimes.end[index]
    sizes = np.array([s.size_bytes for s in run.graph.storages], dtype=np.int64)[index]
    over = end < run.graph.row_count
    rows = np.concatenate([first, end[over]])
    events = np.stack(
        [np.concatenate([index, index[over]]), np.concatenate([sizes, -sizes[over]])], axis=1
    )
    # A storage ends on a row after it began, so sorting by row alone keeps it in order.
    return events[np.argsort(rows, kind="stable")]


def storages_here(run: StaticRun, row: int | None = None) -> NDArray[np.int64]:
    """Indices of the storages that live on the run's device, at a row or at some row."""
    here = np.array([s.device == run.device for s in run.graph.storages], dtype=bool)
    first, end = run.lifetimes.first, run.lifetimes.end
    lives = end > first if row is None else (first <= row) & (end > row)
    return np.flatnonzero(here & lives)


def estimate_result(run: StaticRun, name: str = "") -> Result:
    """Return the run's peak and what it leaves behind, as an estimated `Result`."""
    run = settle_categories(run)

    def live_at(row: int, category: Category | None) -> tuple[Contributor, ...]:
        live = static_contributors(run, storages_here(run, row))
        return tuple(c for c in live if category in (None, c.category))

    peak = find_peak(build_estimated_timeline(run), live_at)
    storages = storages_here(run, run.graph.row_count - 1)
    left_live = static_contributors(run, storages[run.lifetimes.first[storages] > 0])
    amounts = Counter[Category]()
    for contributor in left_live:
        amounts[contributor.category] += contributor.size_bytes
    return Result(
        name=name,
        device=run.device,
        estimated=True,
        peak=peak,
        retained=Retained(amounts.total(), CategoryBytes.of(amounts), left_live),
        has_backward=any(node.phase is Phase.BACKWARD for node in run.graph.nodes),
    )


def static_contributors(run: StaticRun, storages: NDArray[np.int64]) -> tuple[Contributor, ...]:
    """Return who made the given storages, those of one origin together, largest first."""
    sizes = np.array([storage.size_bytes for storage in run.graph.storages], np.int64)
    unsorted = (
        who.holding(int(sizes[members].sum()), len(members))
        for who, members in by_origin(run, storages)
    )
    return tuple(sorted(unsorted, key=lambda c: (-c.size_bytes, c.identity)))


def by_origin(
    run: StaticRun, storages: NDArray[np.int64]
) -> Iterator[tuple[Contributor, NDArray[np.int64]]]:
    """Yield each origin, as a contributor of no bytes, and which of the storages are from there."""
    makers, table = makers_of(run.graph), run.graph.storages

    def origin_of(index: int) -> Contributor:
        node = makers[index]
        phase = node.phase if node.kind is NodeKind.OPERATOR else Phase.PREEXISTING
        where = (node.operator, folded(node.module), node.source, phase)
        return Contributor(table[index].category, 0, 0, *where)

    return grouped(storages.tolist(), origin_of)
