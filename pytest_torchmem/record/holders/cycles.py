"""Cycles that only the garbage collector frees, and what closes them.

Young ones are found without a collection, which would free or age what a program made.
"""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final

from pytest_torchmem.record.holders.paths import place_of_frame, step_from, tidy
from pytest_torchmem.record.owners.live_objects import HAS_GENERATIONS, is_a

# The list that holds a thing here, the variable of the loop and the argument of getrefcount.
_OWN_REFERENCES: Final = 3
# What a cycle always passes through, and what therefore says little about it.
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
    flags, known = gc.get_debug(), len(gc.garbage)
    gc.set_debug(flags | gc.DEBUG_SAVEALL)
    try:
        gc.collect()
    finally:
        gc.set_debug(flags)
    garbage = gc.garbage[known:]
    del gc.garbage[known:]
    return garbage


class Garbage:
    """All objects that only cycles keep, and who refers to whom among them."""

    def __init__(self, things: Sequence[object]) -> None:
        self._things = {id(thing): thing for thing in things}
        self._holders: dict[int, list[int]] = {number: [] for number in self._things}
        for number, thing in self._things.items():
            for held in gc.get_referents(thing):
                if id(held) in self._holders:
                    self._holders[id(held)].append(number)

    def way_to(self, start: object) -> str:
        """Return how what closes a cycle leads to ``start``: ``net.Model: losses[0]``.

        A class or a function closes it. An exception is in a cycle with the functions that it went
        through; then the way says who keeps the exception, too: ``ValueError, kept by errors[0] in
        run, frame of check (net.py:12): hidden``. ``""`` if no cycle leads there.
        """
        above = _reached_from(id(start), self._holders)
        named = self._most_telling(above)
        if named is None:
            return ""
        way = self._way(_chain(named, above))
        if is_a(self._things[named], BaseException):
            way = f"{self._keeper_of(named)}{way}"
        return tidy(_name_of(self._things[named]) + _after_name(way))

    def _most_telling(self, numbers: Iterable[int]) -> int | None:
        """The nearest instance that closes a cycle, else a function, else whatever there is."""
        kinds: tuple[list[int], list[int], list[int]] = ([], [], [])
        for number in numbers:
            thing = self._things[number]
            is_plain, is_function = is_a(thing, _PLUMBING), is_a(thing, types.FunctionType)
            kinds[2 if is_plain else 1 if is_function else 0].append(number)
        return next((n for kind in kinds for n in kind if self._closes_a_cycle(n)), None)

    def _closes_a_cycle(self, number: int) -> bool:
        return any(number in _reached_from(h, self._holders) for h in self._holders[number])

    def _keeper_of(self, exception: int) -> str:
        """The variable or the attribute that keeps an exception; ``""`` for neither."""
        above = _reached_from(exception, self._holders)
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


def _reached_from(start: int, edges: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """Return all that ``start`` leads to, nearest first, each with the one that led there."""
    reached = {start: start}
    waiting = [start]
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
    return _name(thing if is_a(thing, types.FunctionType) else type(thing))


def _name(named: type | types.FunctionType) -> str:
    module = getattr(named, "__module__", "")
    return named.__qualname__ if module in ("builtins", "") else f"{module}.{named.__qualname__}"


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
    counts = {}
    for thing in young:
        counts[id(thing)] = sys.getrefcount(thing) - _OWN_REFERENCES
    held = {id(thing): [t for t in gc.get_referents(thing) if id(t) in counts] for thing in young}
    for things in held.values():
        for thing in things:
            counts[id(thing)] -= 1
    alive = {number for number, count in counts.items() if count > 0}
    waiting = list(alive)
    for number in waiting:
        for thing in held[number]:
            if id(thing) not in alive:
                alive.add(id(thing))
                waiting.append(id(thing))
    return [thing for thing in young if id(thing) not in alive]
