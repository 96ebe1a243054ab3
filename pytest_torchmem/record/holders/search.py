"""Finds the holders of what a body left behind, by Python's garbage collector.

Three things can become of a tensor. It is freed at once when its last reference goes; then nothing
of it is left to be asked about. It is in a cycle that nobody refers to, and stays until the garbage
collector comes by. Or something still refers to it, and the way there has a name.
"""

from __future__ import annotations

import gc
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from pytest_torchmem.record.holders.cycles import Garbage, collected_garbage
from pytest_torchmem.record.holders.paths import Searcher
from pytest_torchmem.record.owners.autograd_graph import GraphReader
from pytest_torchmem.record.owners.live_objects import is_a
from pytest_torchmem.record.owners.live_tensors import find_holding
from pytest_torchmem.record.owners.places import places_of, storages_of
from pytest_torchmem.record.torch_api import memory, profiler
from pytest_torchmem.record.tree.kineto import device_name

Place = tuple[str, int]

#: Each search walks the whole heap at least once; a reader looks at the largest first.
SEARCHES: Final = 16

#: Holds what is alive and what no tensor holds: a node of a graph, a compiled module.
NO_TENSOR: Final = "something of torch's that is no tensor"


@dataclass(frozen=True, slots=True)
class Kept:
    """Why a storage is alive: by the way to it, which in garbage begins with what closes a cycle.

    ``by`` is ``""`` where that was not found, and None where it was not looked for.
    """

    place: Place
    in_garbage: bool
    by: str | None


def find_holders(sizes: Mapping[Place, int]) -> list[Kept]:
    """Return why storages are alive, given by device and pointer with their bytes, largest first.

    Collects garbage.
    """
    wanted = dict(sorted(sizes.items(), key=lambda item: -item[1]))
    cycles = _in_garbage(wanted)
    freed = _freed_by_a_collection()
    holding = _Holding(wanted)

    def kept(place: Place) -> Kept:
        if place in holding:
            return Kept(place, False, holding.path(place))
        if freed is None or place in freed or place in cycles:
            return Kept(place, True, cycles.get(place, ""))
        return Kept(place, False, NO_TENSOR)

    return [kept(place) for place in wanted]


def _freed_by_a_collection() -> set[Place] | None:
    """Collect garbage; return what that freed of what was recorded, or None if nobody can tell."""
    if profiler.profiler_is_active():
        gc.collect()
        return None
    session = profiler.Profiler()
    session.start()
    try:
        gc.collect()
    finally:
        result = session.stop()
    changes = profiler.allocations_in(result)
    return {(device_name(change.device), change.ptr) for change in changes if change.alloc_size < 0}


def _in_garbage(wanted: Mapping[Place, int]) -> dict[Place, str]:
    """The storages among ``wanted`` that garbage holds, each with what closes the cycle.

    When this returns, nothing keeps the garbage from being collected.
    """
    return ways_in_garbage(collected_garbage(), wanted)


def ways_in_garbage(
    things: Sequence[object], wanted: Container[Place] | None = None
) -> dict[Place, str]:
    """Return how what closes a cycle leads to the storages that garbage holds, by place.

    ``wanted`` are those that are asked for; None stands for all.
    """
    garbage = Garbage(things)
    ways: dict[Place, str] = {}
    for thing in things:
        if is_a(thing, memory.HOLDING):
            for place, how in _held_by(thing, GraphReader()):
                if place not in ways and (wanted is None or place in wanted):
                    way = garbage.way_to(thing)
                    ways[place] = f"{way}{how}" if way else ""
    return ways


def _held_by(
    tensor: torch.Tensor | torch.UntypedStorage, graphs: GraphReader
) -> Iterator[tuple[Place, str]]:
    """The storages that live as long as a tensor does, and how it holds them; or a storage."""
    if isinstance(tensor, torch.UntypedStorage):
        yield from (((device, ptr), "") for device, ptr, _ in storages_of(tensor))
        return
    for place in places_of(tensor):
        yield place, ""
    if tensor.is_leaf:
        for place in places_of(tensor.grad):
            yield place, ".grad"
    if tensor.grad_fn is not None:
        holdings = graphs.holdings([tensor])
        for held in (*holdings.saved, *holdings.leaves):
            for place in places_of(held):
                yield place, ", in its autograd graph"


def _is_storage(holder: object) -> bool:
    return is_a(holder, torch.UntypedStorage)


class _Holding:
    """The live tensors and storages that hold each of some storages."""

    def __init__(self, wanted: Mapping[Place, int]) -> None:
        self._tensors: dict[Place, list[tuple[object, str]]] = {}
        self._found: dict[int, str] = {}
        self._searcher = Searcher()
        graphs = GraphReader()
        # A storage may have a Python object that nobody holds: it counts where no tensor does.
        for tensor in find_holding():
            for place, how in _held_by(tensor, graphs):
                if place in wanted and not (_is_storage(tensor) and place in self._tensors):
                    self._tensors.setdefault(place, []).append((tensor, how))

    def __contains__(self, place: Place) -> bool:
        return place in self._tensors

    def path(self, place: Place) -> str | None:
        """The way to what holds a storage; ``""`` if none is found, None if not all was tried."""
        tensors = self._tensors[place]
        paths = [(self._search(tensor), how) for tensor, how in tensors[:SEARCHES]]
        not_found = "" if all(id(tensor) in self._found for tensor, _ in tensors) else None
        return next((path + how for path, how in paths if path), not_found)

    def _search(self, tensor: object) -> str:
        if id(tensor) not in self._found:
            if len(self._found) >= SEARCHES:
                return self._searcher.path_nearby(tensor)
            lists = self._tensors.values()
            ignored = {
                id(self._tensors),
                *map(id, lists),
                *(id(pair) for held in lists for pair in held),
            }
            self._found[id(tensor)] = self._searcher.path_to(tensor, ignored)
        return self._found[id(tensor)]
