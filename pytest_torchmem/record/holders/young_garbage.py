"""Finds young garbage without a collection, which would free or age what a program made."""

from __future__ import annotations

import gc
import sys

from pytest_torchmem.record.owners.live_objects import HAS_GENERATIONS

# The list that holds a thing here, the variable of the loop and the argument of getrefcount.
_OWN_REFERENCES = 3


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
