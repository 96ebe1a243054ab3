"""Storages: one row for each lifetime of a piece of memory, found from pointers and time alone.

The profiler's own ids exist only for tensors that some operator took as an input. A pointer, a
device and the time between an allocation and its free name every storage, with or without an id.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytest_torchmem.analysis.events.op_tree import OpTree, ascends
from pytest_torchmem.values.packed import Column, Table, in_pieces
from pytest_torchmem.values.trace import MarkKind, Ownership, Role, Trace, are_among

#: ``born`` of a storage that was there before the recording, ``died`` of one that outlived it.
BEFORE: Final = -1.0
NEVER: Final = float("inf")


@dataclass(frozen=True, slots=True, eq=False)
class Storages:
    """One row per storage. All columns have shape (S,).

    Attributes:
        device: int16, index into the trace's devices.
        ptr: uint64, where it was; for lookups only.
        size_bytes: int64, what it asked for.
        born: float64, rank at which it was allocated, or `BEFORE`.
        died: float64, rank at which it was freed, or `NEVER`.
        event: int32, row of the allocation event, or -1.
        of_tensor: int32, shape (N,), the storage that each row of ``trace.tensors`` mentions.
        of_owner: int32, shape (O,), the storage that each row of ``trace.owners`` is about, or -1
            if that storage plays no part in the recording.
    """

    device: NDArray[np.int16]
    ptr: NDArray[np.uint64]
    size_bytes: NDArray[np.int64]
    born: NDArray[np.float64]
    died: NDArray[np.float64]
    event: NDArray[np.int32]
    of_tensor: NDArray[np.int32]
    of_owner: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.ptr)


def find_storages(tree: OpTree) -> Storages:
    """Return every storage that the recording allocated, freed or mentioned."""
    trace = tree.trace
    places = _places(trace.allocations, trace.tensors, trace.owners)
    tensor_place, owner_place = places.of[1:]
    owner_rank = tree.mark_ranks[trace.owners["mark"]]
    # Nobody needs the places of allocations after this: a long recording has no room for them.
    changes = _changes(tree, places.of.pop(0), tensor_place, owner_place)
    lives = _lifetimes(
        changes, _early(tree, changes, len(places), tensor_place, owner_place, owner_rank)
    )
    del changes
    of_tensor = np.empty(len(trace.tensors), np.int32)
    for rows, (event,) in in_pieces(trace.tensors, "event"):
        of_tensor[rows] = lives.at(tensor_place[rows], tree.rank[event])
    # A mark stands after the events that led to it, so it speaks of the last storage at the place.
    of_owner = lives.at(owner_place, owner_rank)
    return Storages(
        device=places.device[lives.place],
        ptr=places.ptr[lives.place],
        size_bytes=_sizes(tree, lives, of_tensor, of_owner),
        born=lives.born,
        died=lives.died,
        event=lives.event,
        of_tensor=of_tensor,
        of_owner=of_owner,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Changes:
    """Allocations and frees, sorted by place, then by rank: shape (C,).

    ``size`` and ``event`` are in another order, in which there is one entry for each change, too;
    ``order`` has the one of each row. A free has a negative size.
    """

    place: NDArray[np.int32]
    rank: NDArray[np.float64 | np.int32]
    order: NDArray[np.int32]
    size: NDArray[np.int64]
    event: NDArray[np.int32]


def _changes(
    tree: OpTree,
    allocation_place: NDArray[np.int32],
    tensor_place: NDArray[np.int32],
    owner_place: NDArray[np.int32],
) -> _Changes:
    """Return what the allocator did, and what was seen to be freed."""
    allocations, owners, marks = tree.trace.allocations, tree.trace.owners, tree.trace.marks
    place, event = allocation_place, allocations["event"]
    rank: NDArray[np.float64 | np.int32] = tree.rank[event]
    size = _asked_for(allocations)
    freed = np.flatnonzero(marks["kind"][owners["mark"]] == MarkKind.STORAGE_FREED)
    left_rows, left_rank = _left_by_operators(tree)
    if len(freed) or len(left_rows):
        gone_place = np.concatenate([owner_place[freed], tensor_place[left_rows]])
        gone_rank = np.concatenate([tree.mark_ranks[owners["mark"][freed]], left_rank])
        gone = np.concatenate(
            [owners["size_bytes"][freed], tree.trace.tensors["size_bytes"][left_rows]]
        )
        # Of a storage that was born in the recording the allocator itself reports the free. So
        # where one was born before, the storage from before had left its place unseen.
        stays = gone_rank < _first_births(place, rank, size, gone_place)
        place = np.concatenate([place, gone_place[stays]])
        rank = np.concatenate([rank, gone_rank[stays]])
        size = np.concatenate([size, -gone[stays]])
        event = np.concatenate([event, np.full(np.count_nonzero(stays), -1, np.int32)])
    order = _by_place(place, rank)
    return _Changes(place[order], rank[order], order, size, event)


# They may give the storage of their first argument another place.
_MOVING: Final = ("aten::resize_", "aten::resize_as_")


def _left_by_operators(tree: OpTree) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the mentions whose place an operator let its storage leave, and when: shape (L,).

    The profiler reports no free on the CPU of what was there before. ::

        aten::resize_    mentions place 7    rank 4
          [memory]       +256 at place 9     rank 5      7 is left at 5.5
    """
    trace = tree.trace
    names = [n for n, text in enumerate(trace.strings) if text in _MOVING]
    tensors, moved_rows = trace.tensors, np.empty(0, np.int64)
    if names:
        moving = np.isin(trace.events["name"], names)
        is_cpu = np.array([device == "cpu" for device in trace.devices], np.bool_)
        is_moved = moving[tensors["event"]] & (tensors["role"] == Role.OPERATOR_INPUT)
        # One that is empty has no place to leave.
        is_moved &= (tensors["argument"] == 0) & is_cpu[tensors["device"]] & (tensors["ptr"] > 0)
        moved_rows = np.flatnonzero(is_moved)
    allocations = trace.allocations
    births = allocations["event"][allocations["size_bytes"] > 0] if len(moved_rows) else moved_rows
    by = np.asarray(trace.events["parent"])[births]
    operators = tensors["event"][moved_rows]
    moved_rows = moved_rows[np.isin(operators, by)]
    rank_of = dict(zip(by.tolist(), tree.rank[births].tolist(), strict=True))
    ranks = [rank_of[operator] + 0.5 for operator in tensors["event"][moved_rows].tolist()]
    return moved_rows, np.array(ranks, np.float64)


def _first_births(
    place: NDArray[np.int32],
    rank: NDArray[np.float64 | np.int32],
    size: NDArray[np.int64],
    events: NDArray[np.int32],
) -> NDArray[np.float64]:
    """Return the rank of the first allocation at each place that is wanted, `NEVER` for none."""
    first = np.full(int(events.max()) + 1 if len(events) else 0, NEVER)
    births = np.flatnonzero((size > 0) & np.isin(place, events))
    np.minimum.at(first, place[births], rank[births])
    return first[events]


def _by_place(place: NDArray[np.int32], rank: NDArray[np.float64 | np.int32]) -> NDArray[np.int32]:
    """Return the rows sorted by place, then by rank.

    It is ``numpy.lexsort((rank, place))`` in half the memory: place and row in one number. ::

        place [7, 3, 7]  ->  [7 << 32 | 0, 3 << 32 | 1, 7 << 32 | 2]  ->  rows [1, 0, 2]
    """
    by_rank = None if ascends(rank) else np.argsort(rank, kind="stable")
    keys = (place if by_rank is None else place[by_rank]).astype(np.int64)
    keys <<= 32
    keys += np.arange(len(keys), dtype=np.int32)
    keys.sort()
    keys &= 2**32 - 1
    order = keys.astype(np.int32)
    return order if by_rank is None else by_rank[order].astype(np.int32)


def _early(
    tree: OpTree,
    changes: _Changes,
    place_count: int,
    tensor_place: NDArray[np.int32],
    owner_place: NDArray[np.int32],
    owner_rank: NDArray[np.float64],
) -> NDArray[np.int64]:
    """Return the places that were in use before the recording, ascending.

    A storage that was alive at the start counts only if an operator mentions it, or a module, an
    optimizer or a graph owns it.
    """
    trace = tree.trace
    first_birth = np.full(place_count, NEVER)
    births = np.flatnonzero((changes.size > 0)[changes.order])[::-1]
    first_birth[changes.place[births]] = changes.rank[births]
    del births
    is_early = np.zeros(place_count, np.bool_)
    for rows, (event,) in in_pieces(trace.tensors, "event"):
        place = tensor_place[rows]
        is_early[place[tree.rank[event] < first_birth[place]]] = True
    held = ~are_among(trace.owners["kind"], (Ownership.LIVE, Ownership.SURVIVOR))
    is_early[owner_place[held & (owner_rank < first_birth[owner_place])]] = True
    return np.flatnonzero(is_early)


@dataclass(frozen=True, slots=True, eq=False)
class _Places:
    """The distinct (device, pointer) pairs of several tables, in the order in which they come.

    ``device`` is int16 and ``ptr`` uint64, both of shape (P,). ``of`` has one array for each table:
    the place of each of its rows, int32.
    """

    device: NDArray[np.int16]
    ptr: NDArray[np.uint64]
    of: list[NDArray[np.int32]]

    def __len__(self) -> int:
        return len(self.ptr)


def _places(*tables: Table) -> _Places:
    """Number the places of the rows of tables.

    A row at pointer 70 of device 0, one at pointer 50 and one at pointer 70 again::

        distinct, sorted    [50, 70]    first met at rows [1, 0]    rows [1, 0, 1]
        by first meeting    [70, 50]                                rows [0, 1, 0]
    """
    pointers, devices = (
        _distinct(column for table in tables for _, (column,) in in_pieces(table, name))
        for name in ("ptr", "device")
    )

    def keys_in(table: Table) -> Iterator[tuple[slice, NDArray[np.int64]]]:
        """Yield numbers of pairs of a pointer and a device; nearly always there is one device."""
        for rows, (pointer, device) in in_pieces(table, "ptr", "device"):
            key = np.searchsorted(pointers, pointer)
            if len(devices) > 1:
                key = key * len(devices) + np.searchsorted(devices, device)
            yield rows, key

    keys = np.arange(len(pointers))
    if len(devices) > 1:
        keys = _distinct([key for table in tables for _, key in keys_in(table)])
    count = sum(map(len, tables))
    first, before = np.full(len(keys), count), 0
    of = [np.empty(len(table), np.int32) for table in tables]
    for table, at in zip(tables, of, strict=True):
        for rows, key in keys_in(table):
            at[rows] = places = np.searchsorted(keys, key) if len(devices) > 1 else key
            new = np.flatnonzero(first[places] == count)[::-1]
            first[places[new]] = before + rows.start + new
        before += len(table)
    order = np.argsort(first)
    number = np.empty(len(keys), np.int32)
    number[order] = np.arange(len(keys))
    for at in of:
        np.take(number, at, out=at, mode="clip")
    keys = keys[order]
    return _Places(devices[keys % max(1, len(devices))], pointers[keys // max(1, len(devices))], of)


def _distinct(pieces: Iterable[Column]) -> Column:
    """Return the distinct values of a column that is given in pieces, ascending."""
    pieces_once = [_each_once(piece) for piece in pieces]
    return _each_once(np.concatenate(pieces_once)) if pieces_once else np.empty(0, np.int64)


def _each_once(values: Column) -> Column:
    """Return what `numpy.unique` does, which imports numpy's masked arrays when first called."""
    ordered = np.sort(values)
    is_first = np.ones(len(ordered), np.bool_)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return ordered[is_first]


@dataclass(frozen=True, eq=False)
class _Lives:
    """Lifetimes sorted by place, then by birth."""

    place: NDArray[np.int32]
    born: NDArray[np.float64]
    died: NDArray[np.float64]
    size: NDArray[np.int64]
    event: NDArray[np.int32]

    def at(
        self, place: NDArray[np.int32], rank: NDArray[np.float64 | np.int32]
    ) -> NDArray[np.int32]:
        """Return the storage that was born last, at or before each rank, at each place; or -1.

        Place 0 holds two storages one after the other, born at ranks 3 and 8; place 1 holds one,
        born at 5. With a shift of 100 instead of 2**32::

            keys            [3, 8, 105]
            place 0, rank 6    6 -> behind 3: storage 0
            place 0, rank 9    9 -> behind 8: storage 1
            place 1, rank 4  104 -> behind 8, which is at place 0: -1
        """
        keys = place * 2.0**32
        keys += rank
        places = np.searchsorted(self._keys, keys, side="right").astype(np.int32)
        places -= 1
        right = places >= 0
        right[right] = self.place[places[right]] == place[right]
        places[~right] = -1
        return places

    @cached_property
    def _keys(self) -> NDArray[np.float64]:
        # Ranks are below 2**31, so place and rank pack into one sortable number.
        keys = self.place.astype(np.float64)
        keys *= 2.0**32
        keys += self.born
        return keys


def _lifetimes(changes: _Changes, early: NDArray[np.int64]) -> _Lives:
    """Pair allocations with frees. ``early`` are places that were in use before the recording.

    Three events at place 0, which is early, and what they say about it::

        rank 2   -16   the storage from before is freed: it had 16 bytes
        rank 4   +24   a second storage is born
        rank 7   +32   a third one in its place: the second one's free went unseen

    >>> columns = [0, 0, 0], [2.0, 4, 7], [0, 1, 2], [-16, 24, 32], [0, 1, 2]
    >>> lives = _lifetimes(_Changes(*map(np.array, columns)), np.array([0]))
    >>> lives.born.tolist(), lives.died.tolist(), lives.size.tolist()
    ([-1.0, 4.0, 7.0], [2.0, 7.0, inf], [16, 24, 32])

    So what is there at a place ends with the next event there, whichever that is. A storage was
    there before if the place is early, or if its first event is a free. A free after another one
    is the same, reported twice.
    """
    place, rank, order = changes.place, changes.rank, changes.order
    is_last = np.ones(len(place), np.bool_)
    np.not_equal(place[1:], place[:-1], out=is_last[:-1])
    is_born = (changes.size > 0)[order]
    born = np.flatnonzero(is_born).astype(np.int32)
    died = np.full(len(born), NEVER)
    goes_on = ~is_last[born]
    died[goes_on] = rank[born[goes_on] + 1]
    before = _from_before(changes, is_last, is_born, early)
    at = np.searchsorted(place[born], before.place)
    # One column after the other: all of them twice would be the most that an analysis takes.
    return _Lives(
        place=np.insert(place[born], at, before.place),
        born=np.insert(rank[born].astype(np.float64), at, before.born),
        died=np.insert(died, at, before.died),
        size=np.insert(changes.size[order[born]], at, before.size),
        event=np.insert(changes.event[order[born]], at, before.event),
    )


def _from_before(
    changes: _Changes,
    is_last: NDArray[np.bool_],
    is_born: NDArray[np.bool_],
    early: NDArray[np.int64],
) -> _Lives:
    """Return the storages from before: the first event at a place, if there is any, tells of them.

    ``is_last`` and ``is_born`` say which changes are the last at their places, and which births.
    """
    place = changes.place
    first = np.flatnonzero(np.append(True, is_last)[:-1])
    begun = first[~is_born[first] | np.isin(place[first], early)]
    unused = early[~np.isin(early, place[first])]
    places = np.concatenate([place[begun], unused])
    by_place = np.argsort(places)
    deaths = np.concatenate([changes.rank[begun], np.full(len(unused), NEVER)])
    freed = -changes.size[changes.order[begun]]
    sizes = np.concatenate([np.maximum(0, freed), np.zeros_like(unused)])
    count = len(places)
    return _Lives(
        places[by_place],
        np.full(count, BEFORE),
        deaths[by_place],
        sizes[by_place],
        np.full(count, -1, np.int32),
    )


def _asked_for(allocations: Table) -> NDArray[np.int64]:
    """Return the bytes that each allocation asked for, else its block's; negative for a free."""
    sizes = np.empty(len(allocations), np.int64)
    for rows, (requested, block) in in_pieces(allocations, "requested_bytes", "size_bytes"):
        sizes[rows] = np.where(requested > 0, requested, block)
    return sizes


def _sizes(
    tree: OpTree, lives: _Lives, of_tensor: NDArray[np.int32], of_owner: NDArray[np.int32]
) -> NDArray[np.int64]:
    """Return the bytes of each storage: from its allocation, its owner, or the widest mention."""
    trace = tree.trace
    mentioned = np.zeros(len(lives.place), np.int64)
    for rows, (size,) in in_pieces(trace.tensors, "size_bytes"):
        seen_rows = np.flatnonzero(of_tensor[rows] >= 0)
        seen_rows = seen_rows[lives.event[of_tensor[rows][seen_rows]] < 0]
        np.maximum.at(mentioned, of_tensor[rows][seen_rows], size[seen_rows])
    held = np.zeros(len(lives.place), np.int64)
    is_known = (of_owner >= 0) & (trace.owners["kind"] == Ownership.LIVE)
    np.maximum.at(held, of_owner[is_known], trace.owners["size_bytes"][is_known])
    sizes, before = lives.size, np.flatnonzero(lives.event < 0)
    widest = np.maximum(mentioned[before], sizes[before])
    sizes[before] = np.where(held[before] > 0, held[before], widest)
    return sizes


# The buckets in which DDP reduces gradients.
#
# No Python object holds them, so the recorder cannot list them at the start. They are known by the
# operators with which DDP copies gradients to them::
#
#     autograd::engine::evaluate_function: torch::autograd::AccumulateGrad
#       torch::distributed::reducer::mul_out    the part of the bucket for this gradient
#         aten::mul
#     c10d::allreduce_                          all of the bucket
#
# After the first backward pass DDP makes new buckets, in the order in which gradients came. The
# next forward pass begins with that, and the old ones are gone.

_COPIES: Final = ("torch::distributed::reducer::mul_out", "torch::distributed::reducer::copy_")


def bucket_mentions(trace: Trace) -> NDArray[np.int64]:
    """Rows of ``trace.tensors`` that are parts of buckets: int64, shape (B,)."""
    tensors = trace.tensors
    copied_to = trace.texts_are(trace.events["name"][tensors["event"]], _COPIES.__contains__)
    copied_to &= (tensors["role"] == Role.OPERATOR_INPUT) & (tensors["argument"] == 0)
    return np.flatnonzero(copied_to)


def without_old_buckets(tree: OpTree, storages: Storages) -> Storages:
    """Return the storages, with each old bucket ending where a forward pass makes new buckets.

    The profiler reports no free of a storage whose allocation it did not see. An old bucket that is
    used last at rank 5, and new ones that are born at 3 and 8::

        rebuilt     [3, 8, NEVER]
        the first one after its last use: 8, so it died at 8
    """
    rows = bucket_mentions(tree.trace)
    last_use = np.full(len(storages), -np.inf)
    used_at = tree.rank[tree.trace.tensors["event"][rows]]
    np.maximum.at(last_use, storages.of_tensor[rows], used_at)
    is_bucket = last_use > -np.inf
    is_made = is_bucket & (storages.event >= 0)
    # Another DDP is made outside of every call of a module.
    is_made[is_made] = tree.innermost_module_calls()[storages.event[is_made]] >= 0
    old = is_bucket & (storages.born == BEFORE)
    rebuilt = np.append(np.sort(storages.born[is_made]), NEVER)
    died = storages.died.copy()
    died[old] = np.minimum(died[old], rebuilt[np.searchsorted(rebuilt, last_use[old])])
    return replace(storages, died=died)
