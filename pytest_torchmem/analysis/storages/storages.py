"""Storages: one row for each lifetime of a piece of memory, found from pointers and time alone.

The profiler's own ids exist only for tensors that some operator took as an input. A pointer, a
device and the time between an allocation and its free name every storage, with or without an id.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from pytest_torchmem.analysis.events.op_tree import OpTree
from pytest_torchmem.values.packed import Table
from pytest_torchmem.values.trace import MarkKind, Ownership, Role, Trace, are_among

#: ``born`` of a storage that was there before the recording, ``died`` of one that outlived it.
BEFORE: Final = -1.0
NEVER: Final = float("inf")

_Number = TypeVar("_Number", np.int16, np.int64, np.uint64)


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
    allocation_place, tensor_place, owner_place = places.of
    tensor_rank = tree.rank[trace.tensors["event"]]
    owner_rank = tree.mark_ranks[trace.owners["mark"]]
    changes = _changes(tree, allocation_place, owner_place)

    first_birth = np.full(len(places), NEVER)
    births = changes.size > 0
    np.minimum.at(first_birth, changes.place[births], changes.rank[births])
    # A storage that was alive at the start counts only if an operator mentions it, or a module, an
    # optimizer or a graph owns it.
    held = ~are_among(trace.owners["kind"], (Ownership.LIVE, Ownership.SURVIVOR))
    owned = held & (owner_rank < first_birth[owner_place])
    mentioned = tensor_rank < first_birth[tensor_place]
    early = np.unique(np.concatenate([tensor_place[mentioned], owner_place[owned]]))
    lives = _lifetimes(changes, early)

    of_tensor = lives.at(tensor_place, tensor_rank)
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
    """Allocations and frees, sorted by place, then by rank. A free has a negative size."""

    place: NDArray[np.int32]
    rank: NDArray[np.float64]
    size: NDArray[np.int64]
    event: NDArray[np.int32]


def _changes(
    tree: OpTree, allocation_place: NDArray[np.int32], owner_place: NDArray[np.int32]
) -> _Changes:
    """Return what the allocator did, and what was seen to be freed."""
    allocations, owners, marks = tree.trace.allocations, tree.trace.owners, tree.trace.marks
    freed = marks["kind"][owners["mark"]] == MarkKind.STORAGE_FREED
    freed_at = tree.mark_ranks[owners["mark"]][freed]
    place = np.concatenate([allocation_place, owner_place[freed]])
    rank = np.concatenate([tree.rank[allocations["event"]], freed_at])
    order = np.lexsort((rank, place))
    place, rank = place[order], rank[order]
    size = np.concatenate([_asked_for(allocations), -owners["size_bytes"][freed]])[order]
    event = np.concatenate([allocations["event"], np.full(len(freed_at), -1, np.int32)])[order]
    return _Changes(place, rank, size, event)


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
    pointers, at = _distinct(np.concatenate([table["ptr"] for table in tables]))
    devices, on = _distinct(np.concatenate([table["device"] for table in tables]))
    # A place is a pointer and a device; nearly always there is one device.
    keys = np.arange(len(pointers))
    if len(devices) > 1:
        keys, at = _distinct(at * np.int64(len(devices)) + on)
    first = np.zeros(len(keys), np.int32)
    first[at[::-1]] = np.arange(len(at), dtype=np.int32)[::-1]
    order = np.argsort(first)
    number = np.empty(len(keys), np.int32)
    number[order] = np.arange(len(keys))
    split = np.cumsum([len(table) for table in tables])[:-1]
    keys = keys[order]
    return _Places(
        devices[keys % max(1, len(devices))],
        pointers[keys // max(1, len(devices))],
        np.split(number[at], split),
    )


def _distinct(values: NDArray[_Number]) -> tuple[NDArray[_Number], NDArray[np.int32]]:
    """Return the distinct values, ascending, and the place of each value among them."""
    distinct = np.unique(values)
    return distinct, np.searchsorted(distinct, values).astype(np.int32)


@dataclass(frozen=True, slots=True, eq=False)
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
        # Ranks are below 2**31, so place and rank pack into one sortable number.
        keys = self.place * 2.0**32 + self.born
        wanted = place * 2.0**32
        wanted += rank
        found = np.searchsorted(keys, wanted, side="right").astype(np.int32)
        found -= 1
        right = found >= 0
        right[right] = self.place[found[right]] == place[right]
        found[~right] = -1
        return found


def _lifetimes(changes: _Changes, early: NDArray[np.int32]) -> _Lives:
    """Pair allocations with frees. ``early`` are places that were in use before the recording.

    Three events at place 0, which is early, and what they say about it::

        rank 2   -16   the storage from before is freed: it had 16 bytes
        rank 4   +24   a second storage is born
        rank 7   +32   a third one in its place: the second one's free went unseen

    >>> columns = [0, 0, 0], [2.0, 4, 7], [-16, 24, 32], [0, 1, 2]
    >>> lives = _lifetimes(_Changes(*map(np.array, columns)), np.array([0]))
    >>> lives.born.tolist(), lives.died.tolist(), lives.size.tolist()
    ([-1.0, 4.0, 7.0], [2.0, 7.0, inf], [16, 24, 32])

    So what is there at a place ends with the next event there, whichever that is. A storage was
    there before if the place is early, or if its first event is a free. A free after another one
    is the same, reported twice.
    """
    place, rank, size, event = changes.place, changes.rank, changes.size, changes.event
    is_first = np.diff(place, prepend=-1) != 0
    next_rank = np.full(len(place), NEVER)
    next_rank[:-1][~is_first[1:]] = rank[1:][~is_first[1:]]
    born = size > 0
    freed = is_first & ~born
    unused = early[~np.isin(early, place)]
    begun = is_first & (freed | np.isin(place, early))
    count = np.count_nonzero(begun) + len(unused)
    places = np.concatenate([place[begun], unused, place[born]])
    births = np.concatenate([np.full(count, BEFORE), rank[born]])
    deaths = np.concatenate([rank[begun], np.full(len(unused), NEVER), next_rank[born]])
    sizes = np.concatenate([np.maximum(0, -size[begun]), np.zeros_like(unused), size[born]])
    events = np.concatenate([np.full(count, -1, np.int32), event[born]])
    by_place = np.lexsort((births, places))
    return _Lives(*(column[by_place] for column in (places, births, deaths, sizes, events)))


def _asked_for(allocations: Table) -> NDArray[np.int64]:
    """Return the bytes that each allocation asked for, else its block's; negative for a free."""
    requested, block = allocations["requested_bytes"], allocations["size_bytes"]
    sizes: NDArray[np.int64] = np.where(requested > 0, requested, block)
    return sizes


def _sizes(
    tree: OpTree, lives: _Lives, of_tensor: NDArray[np.int32], of_owner: NDArray[np.int32]
) -> NDArray[np.int64]:
    """Return the bytes of each storage: from its allocation, its owner, or the widest mention."""
    trace = tree.trace
    mentioned = np.zeros(len(lives.place), np.int64)
    seen = of_tensor >= 0
    np.maximum.at(mentioned, of_tensor[seen], trace.tensors["size_bytes"][seen])
    held = np.zeros(len(lives.place), np.int64)
    known = (of_owner >= 0) & (trace.owners["kind"] == Ownership.LIVE)
    np.maximum.at(held, of_owner[known], trace.owners["size_bytes"][known])
    sizes: NDArray[np.int64] = np.where(
        lives.event >= 0, lives.size, np.where(held > 0, held, np.maximum(mentioned, lives.size))
    )
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
    made = is_bucket & (storages.event >= 0)
    # Another DDP is made outside of every call of a module.
    made[made] = tree.innermost_module_calls()[storages.event[made]] >= 0
    old = is_bucket & (storages.born == BEFORE)
    rebuilt = np.append(np.sort(storages.born[made]), NEVER)
    died = storages.died.copy()
    died[old] = np.minimum(died[old], rebuilt[np.searchsorted(rebuilt, last_use[old])])
    return replace(storages, died=died)
