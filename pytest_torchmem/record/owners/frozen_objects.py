"""What ``gc.freeze()`` took out of the collector's sight.

``gc.get_objects`` and ``gc.get_referrers`` leave it out, and ``gc.unfreeze`` could not be undone: a
freeze after it would take all that is alive. But each object still says what it refers to, so the
way there is followed from what is in sight. Servers of language models freeze once they are up.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Final

# So many objects are asked at a time: few steps in Python, and no list of all that they refer to.
_AT_A_TIME: Final = 4096


def frozen_objects() -> list[object]:
    """Return the frozen objects that modules, classes, frames or other objects lead to.

    That took 1 s where 290,000 objects were frozen. What only C refers to is not found.
    """
    if not gc.get_freeze_count():
        return []
    front = [*gc.get_objects(), *_classes(), *_frames(), sys.modules, *sys.modules.values()]
    # Modules and classes may be frozen themselves.
    seen, found = set(map(id, gc.get_objects())), []
    while front:
        fresh = {id(thing): thing for thing in front if id(thing) not in seen}
        for part in _parts(front):
            fresh |= {id(held): held for held in gc.get_referents(*part) if id(held) not in seen}
        seen |= fresh.keys()
        front = [thing for thing in fresh.values() if gc.is_tracked(thing)]
        found += front
    return found


def referrers_among(objects: Sequence[object], targets: Sequence[object]) -> list[object]:
    """Return those of ``objects`` that refer to any of ``targets``."""
    wanted = set(map(id, targets))
    return [
        thing
        for part in _parts(objects)
        if not wanted.isdisjoint(map(id, gc.get_referents(*part)))
        for thing in part
        if not wanted.isdisjoint(map(id, gc.get_referents(thing)))
    ]


def _parts(objects: Sequence[object]) -> Iterator[Sequence[object]]:
    return (objects[n : n + _AT_A_TIME] for n in range(0, len(objects), _AT_A_TIME))


def _classes() -> set[type[object]]:
    found: set[type[object]] = set()
    waiting: list[type[object]] = [object]
    while waiting:
        found.add(kind := waiting.pop())
        waiting += set(type.__subclasses__(kind)) - found
    return found


def _frames() -> Iterator[FrameType]:
    for top in list(sys._current_frames().values()):
        frame: FrameType | None = top
        while frame is not None:
            yield frame
            frame = frame.f_back
