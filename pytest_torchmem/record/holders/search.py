"""Finds the holders of what a body left behind, by Python's garbage collector.

Three things can become of a tensor. It is freed at once when its last reference goes; then nothing
of it is left to be asked about. It is in a cycle that nobody refers to, and stays until the garbage
collector comes by. Or something still refers to it, and the way there has a name. Young cycles are
found without a collection, which would free or age what a program made.
"""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Final

import torch

from pytest_torchmem.record.heap import is_a, referents, referents_of
from pytest_torchmem.record.holders.paths import Searcher, place_of_frame, step_from, tidy
from pytest_torchmem.record.observers import frees_during
from pytest_torchmem.record.owners.autograd_graph import graph_holdings
from pytest_torchmem.record.owners.live_objects import HAS_GENERATIONS, find_holding
from pytest_torchmem.record.owners.places import answers, places_of, storages_of
from pytest_torchmem.record.torch_api import autograd, memory

Place = tuple[str, int]

#: Each search walks the whole heap at least once; a reader looks at the largest first.
SEARCHES: Final = 16

#: The holder of a storage that is alive, and in no tensor: a node of a graph, a compiled module.
NO_TENSOR: Final = "something of torch's that is no tensor"

#: The holder of a storage whose tensors no Python object refers to. A graph that saved a view of
#: what its own node has written into keeps itself alive, and nothing can free it.
NO_OBJECT: Final = "no Python object: most likely by an autograd graph that holds itself"


@dataclass(frozen=True, slots=True)
class Kept:
    """The reason why a storage is alive: the way to it, or in garbage the cycle and the way there.

    ``by`` is ``""`` where the search found no way, and None where nobody searched.
    """

    place: Place
    in_garbage: bool
    by: str | None


def find_holders(sizes: Mapping[Place, int]) -> list[Kept]:
    """Return why storages are alive, given by device and pointer with their bytes, largest first.

    Collects garbage.
    """
    wanted = dict(sorted(sizes.items(), key=lambda item: -item[1]))
    # When this returns, nothing keeps the garbage from being collected.
    cycles = ways_in_garbage(collected_garbage(), wanted)
    places = frees_during(gc.collect)
    freed = None if places is None else set(places)  # None where nobody can tell
    holding = _Holding(wanted)

    def kept(place: Place) -> Kept:
        if place in holding:
            return Kept(place, False, holding.path(place))
        if freed is None or place in freed or place in cycles:
            return Kept(place, True, cycles.get(place, ""))
        return Kept(place, False, NO_TENSOR)

    return [kept(place) for place in wanted]


def ways_in_garbage(
    things: Sequence[object], wanted: Container[Place] | None = None
) -> dict[Place, str]:
    """Return the ways from what closes a cycle to the storages that garbage holds, by place.

    Only the storages in ``wanted`` are looked for; None stands for all.
    """
    garbage = Garbage(things)
    ways: dict[Place, str] = {}
    for thing in things:
        if is_a(thing, memory.HOLDING):
            for place, how in _held_by(thing):
                if place not in ways and (wanted is None or place in wanted):
                    way = garbage.way_to(thing)
                    ways[place] = f"{way}{how}" if way else ""
    return ways


def _held_by(tensor: torch.Tensor | torch.UntypedStorage) -> Iterator[tuple[Place, str]]:
    """Yield the storages that a tensor or a storage keeps alive, each with how it does."""
    if isinstance(tensor, torch.UntypedStorage):
        yield from (((device, ptr), "") for device, ptr, _ in storages_of(tensor))
        return
    if not answers(tensor):
        return
    for place in places_of(tensor):
        yield place, ""
    if autograd.is_leaf(tensor):
        for place in places_of(autograd.gradient_of(tensor)):
            yield place, ".grad"
    if autograd.has_graph(tensor):
        holdings = graph_holdings([tensor])
        for held in (*holdings.saved, *holdings.leaves):
            for place in places_of(held):
                yield place, ", in its autograd graph"


class _Holding:
    """The live tensors and storages that hold each of some storages."""

    def __init__(self, wanted: Mapping[Place, int]) -> None:
        self._tensors: dict[Place, list[tuple[object, str]]] = {}
        self._ways_by_id: dict[int, str] = {}
        self._searcher = Searcher()
        self._arrays: dict[int, tuple[object, str]] | None = None
        self._unreferred: set[int] | None = None
        # A storage may have a Python object that nobody holds: it counts where no tensor does.
        for tensor in find_holding():
            for place, how in _held_by(tensor):
                is_storage = is_a(tensor, torch.UntypedStorage)
                if place in wanted and not (is_storage and place in self._tensors):
                    self._tensors.setdefault(place, []).append((tensor, how))

    def __contains__(self, place: Place) -> bool:
        return place in self._tensors

    def path(self, place: Place) -> str | None:
        """The way to what holds a storage; ``""`` if none is found, None if not all was tried."""
        tensors = self._tensors[place]
        paths = [(self._search(tensor), how) for tensor, how in tensors[:SEARCHES]]
        not_found = "" if all(id(tensor) in self._ways_by_id for tensor, _ in tensors) else None
        way = next((path + how for path, how in paths if path), not_found)
        return way or (NO_OBJECT if self._is_unreferred(place) else way)

    def _is_unreferred(self, place: Place) -> bool:
        """True if no object of Python's refers to a tensor that holds a storage."""
        if self._unreferred is None:
            lists = [*self._tensors.values()]
            pairs = [*chain.from_iterable(lists)]
            tensors = [tensor for tensor, _ in pairs]
            own = {id(tensors), id(pairs), *map(id, lists), *map(id, pairs)}
            self._unreferred = self._searcher.unreferred(tensors, own)
        return all(id(tensor) in self._unreferred for tensor, _ in self._tensors[place])

    def _search(self, tensor: object) -> str:
        if id(tensor) not in self._ways_by_id:
            if len(self._ways_by_id) >= SEARCHES:
                return self._searcher.path_nearby(tensor)
            lists = self._tensors.values()
            ignored = {
                id(self._tensors),
                *map(id, lists),
                *(id(pair) for held in lists for pair in held),
            }
            way = self._searcher.path_to(tensor, ignored)
            self._ways_by_id[id(tensor)] = way or self._way_to_array_of(tensor)
        return self._ways_by_id[id(tensor)]

    def _way_to_array_of(self, tensor: object) -> str:
        """The way to an array of numpy's that has a tensor's memory; ``""`` if there is none."""
        if self._arrays is None:
            self._arrays = _shared_arrays()
        if id(tensor) not in self._arrays:
            return ""
        pair = self._arrays[id(tensor)]
        way = self._searcher.path_to(pair[0], (id(pair),))
        return tidy(way + pair[1]) if way else ""


def _shared_arrays() -> dict[int, tuple[object, str]]:
    """The arrays of numpy's, or what holds one and the step to it, by what has their memory.

    Python's collector knows neither what an array refers to nor a dictionary of arrays alone.
    """
    arrays: dict[int, tuple[object, str]] = {}
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return arrays
    for thing in referents_of(gc.get_objects()):
        is_unknown = is_a(thing, (dict, tuple)) and not gc.is_tracked(thing)
        for held in referents(thing) if is_unknown else [thing]:
            base = held
            while is_a(base, numpy.ndarray):
                base = base.base
            if base is not held:
                arrays[id(base)] = (thing, step_from(thing, held, "") if is_unknown else "")
    return arrays


# Each cycle passes through objects of these types, so they say little about it.
_PLUMBING: Final = (
    dict,
    list,
    tuple,
    set,
    type,
    types.CellType,
    types.FrameType,
    types.TracebackType,
    types.MethodType,
    types.BuiltinFunctionType,
)


def collected_garbage() -> list[object]:
    """Return all objects that only the garbage collector would free, still alive."""
    flags, garbage_count = gc.get_debug(), len(gc.garbage)
    gc.set_debug(flags | gc.DEBUG_SAVEALL)
    try:
        gc.collect()
    finally:
        gc.set_debug(flags)
    garbage = gc.garbage[garbage_count:]
    del gc.garbage[garbage_count:]
    return garbage


class Garbage:
    """All objects that only cycles keep, and who refers to whom among them."""

    def __init__(self, things: Sequence[object]) -> None:
        self._things = {id(thing): thing for thing in things}
        self._holders: dict[int, list[int]] = {number: [] for number in self._things}
        for number, thing in self._things.items():
            for held in referents(thing):
                if id(held) in self._holders:
                    self._holders[id(held)].append(number)

    def way_to(self, start: object) -> str:
        """Return the way from what closes a cycle to ``start``: ``net.Model: losses[0]``.

        A class or a function closes it. An exception is in a cycle with the functions that it went
        through; then the way says who keeps the exception, too: ``ValueError, kept by errors[0] in
        run, frame of check (net.py:12): hidden``. ``""`` if no cycle leads there.
        """
        above = _reached_from([id(start)], self._holders)
        telling = self._most_telling(above)
        if telling is None:
            return ""
        way = self._way(_chain(telling, above))
        if is_a(self._things[telling], BaseException):
            way = f"{self._keeper_of(telling)}{way}"
        return tidy(_name_of(self._things[telling]) + _after_name(way))

    def _most_telling(self, numbers: Iterable[int]) -> int | None:
        """The nearest instance that closes a cycle, else a function, else whatever there is."""
        kinds: tuple[list[int], list[int], list[int]] = ([], [], [])
        for number in numbers:
            thing = self._things[number]
            is_plain, is_function = is_a(thing, _PLUMBING), is_a(thing, types.FunctionType)
            kinds[2 if is_plain else 1 if is_function else 0].append(number)
        return next((n for kind in kinds for n in kind if self._closes_a_cycle(n)), None)

    def _closes_a_cycle(self, number: int) -> bool:
        return number in _reached_from(self._holders[number], self._holders)

    def _keeper_of(self, exception: int) -> str:
        """The variable or the attribute that keeps an exception; ``""`` for neither."""
        above = _reached_from([exception], self._holders)
        for number in list(above)[1:]:
            thing = self._things[number]
            chain = _chain(number, above)
            if is_a(thing, types.FrameType):
                *inner, _ = chain
                name = next(
                    (n for n, v in thing.f_locals.items() if v is self._things[inner[-1]]), ""
                )
                if name:
                    return f", kept by {name}{self._way(inner)} in {thing.f_code.co_name}"
            elif not is_a(thing, (*_PLUMBING, types.FunctionType)):
                return f", kept by {_name_of(thing)}{_after_name(self._way(chain))}"
        return ""

    def _way(self, chain: Sequence[int]) -> str:
        """The way down a chain of holders, which begins with what is held."""
        way = ""
        for held, holder in pairwise(self._things[number] for number in chain):
            way = step_from(holder, held, way)
            if is_a(holder, types.FrameType) and not is_a(held, types.FrameType):
                way = f", frame of {place_of_frame(holder)}: {way.removeprefix('.')}"
        return way


def _reached_from(starts: Iterable[int], edges: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """Return all that ``starts`` lead to, nearest first, each with the one that led there."""
    reached = {start: start for start in starts}
    waiting = list(reached)
    for number in waiting:
        for following in edges.get(number, ()):
            if following not in reached:
                reached[following] = number
                waiting.append(following)
    return reached


def _chain(number: int, reached: Mapping[int, int]) -> list[int]:
    """Return the numbers from where the search began to ``number``."""
    chain = [number]
    while reached[number] != number:
        number = reached[number]
        chain.append(number)
    return chain[::-1]


def _after_name(way: str) -> str:
    return f": {way}" if way.startswith((".", "[")) else way


def _name_of(thing: object) -> str:
    kind = thing if is_a(thing, types.FunctionType) else type(thing)
    module = getattr(kind, "__module__", "")
    return kind.__qualname__ if module in ("builtins", "") else f"{module}.{kind.__qualname__}"


def young_garbage() -> list[object]:
    """Return the young objects that only cycles keep; they stay as they are.

    It is found as Python's collector finds it. Of three objects that refer to each other and a list
    that refers to the third, and that a variable refers to::

        references           a 1    b 1    c 2    list 1
        less those by these  a 0    b 0    c 0    list 1
        a count is left      the list is alive, and so is what it leads to: c

    ``[]`` where this Python keeps no generations.
    """
    if not HAS_GENERATIONS:
        return []
    # A list that was there before would find itself, and all that it holds.
    young = gc.get_objects(generation=0)
    young += gc.get_objects(generation=1)
    # The list above holds a thing, too. So does the loop that counts, once or twice, by the release
    # of Python and by what else runs on the thread.
    own = _reference_counts([[]])[0]
    references = zip(young, _reference_counts(young), strict=True)
    counts = {id(thing): count - own for thing, count in references}
    held = {id(thing): [id(t) for t in referents(thing) if id(t) in counts] for thing in young}
    for number in chain.from_iterable(held.values()):
        counts[number] -= 1
    alive = _reached_from([number for number, count in counts.items() if count > 0], held)
    return [thing for thing in young if id(thing) not in alive]


def _reference_counts(things: list[object]) -> list[int]:
    return [sys.getrefcount(thing) for thing in things]
