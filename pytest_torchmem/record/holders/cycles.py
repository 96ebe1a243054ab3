"""Cycles that only the garbage collector frees, and what closes them."""

from __future__ import annotations

import gc
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from pytest_torchmem.record.owners.live_objects import is_a

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


def cycle_of(start: object, garbage: Sequence[object]) -> str:
    """Name what closes the cycle that keeps ``start`` alive: a class, or a function.

    ``garbage`` is everything that cycles hold. ``""`` if none of it leads to ``start``.
    """
    by_id = {id(thing): thing for thing in garbage}
    holders: dict[int, list[int]] = {number: [] for number in by_id}
    for number, thing in by_id.items():
        for held in gc.get_referents(thing):
            if id(held) in holders:
                holders[id(held)].append(number)
    above = _reachable([id(start)], holders)
    return _most_telling([by_id[n] for n in above if n in _reachable(holders[n], holders)])


def _reachable(starts: Iterable[int], edges: Mapping[int, Sequence[int]]) -> dict[int, None]:
    """Return all that ``starts`` lead to, themselves included, nearest first."""
    order = dict.fromkeys(starts)
    waiting = list(order)
    for number in waiting:
        for following in edges.get(number, ()):
            if following not in order:
                order[following] = None
                waiting.append(following)
    return order


def _most_telling(things: Sequence[object]) -> str:
    """The name of an instance's class, else of a function, else of whatever there is."""
    for thing in things:
        if not is_a(thing, (*_PLUMBING, types.FunctionType)):
            return _name(type(thing))
    for thing in things:
        if is_a(thing, types.FunctionType):
            return _name(thing)
    return _name(type(things[0])) if things else ""


def _name(named: type | types.FunctionType) -> str:
    module = getattr(named, "__module__", "")
    return named.__qualname__ if module in ("builtins", "") else f"{module}.{named.__qualname__}"
