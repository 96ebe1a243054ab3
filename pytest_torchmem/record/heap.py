"""The objects of this process as Python's collector knows them: classes, frames, references.

A process with torch in it holds some hundred thousand objects, and looking at each of them takes
longer than a small test. So they are looked at in as few steps as Python allows.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from gc import get_freeze_count, get_objects, get_referents, is_tracked
from itertools import chain, compress
from types import FrameType
from typing import Any, Final, TypeGuard, TypeVar

_T = TypeVar("_T")

# So many objects are asked at a time: few steps in Python, and no list of all that they refer to.
_AT_A_TIME: Final = 4096


def is_a(thing: object, kinds: type[_T] | tuple[type[_T], ...]) -> TypeGuard[_T]:
    """Return what `isinstance` says of the type alone: a proxy among the objects is not woken."""
    return issubclass(type(thing), kinds)


def instances_of(classes: Iterable[type[_T]]) -> list[_T]:
    """Return every living object of one of ``classes`` or of a class below one.

    Looks at the type and never at ``__class__``: a proxy among the objects must not be woken.
    """
    # A copy of so long a list would take as long as the look itself.
    objects = get_objects()
    objects += frozen_objects()
    return _selected(objects, with_subclasses(classes))


def _selected(objects: Sequence[Any], kinds: set[type[_T]]) -> list[_T]:
    # No step of this loop is in Python.
    return list(compress(objects, map(kinds.__contains__, map(type, objects))))


def instances_among(classes: tuple[type[_T], ...], objects: Sequence[Any]) -> list[_T]:
    """Return the instances of some classes among a few objects.

    A few objects have few types. Below ``torch.nn.Module`` there are many classes, and finding them
    takes longer than looking at what a small test has made.
    """
    return _selected(
        objects, {kind for kind in set(map(type, objects)) if issubclass(kind, classes)}
    )


def with_subclasses(classes: Iterable[type[_T]]) -> set[type[_T]]:
    """Return some classes and all classes below them."""
    met_classes: set[type[_T]] = set()
    waiting = list(classes)
    while waiting:
        met_classes.add(kind := waiting.pop())
        # Of the class itself: a metaclass may have a method of that name.
        waiting += set(type.__subclasses__(kind)) - met_classes
    return met_classes


def running_frames() -> Iterator[FrameType]:
    """Return the frames of all threads, the innermost of each thread first."""
    for top in list(sys._current_frames().values()):
        frame: FrameType | None = top
        while frame is not None:
            yield frame
            frame = frame.f_back


def variables_of(frame: FrameType) -> dict[str, object]:
    """Return the variables of a frame, by name. A function's frame keeps none of them longer."""
    names = frame.f_locals
    variables = dict(names)
    # Before Python 3.13 a function's frame keeps the dict that it handed out, and with it what the
    # function has long deleted. Nobody but the frame, the name here and the call may refer to it.
    is_snapshot = frame.f_code.co_flags & inspect.CO_OPTIMIZED and isinstance(names, dict)
    if is_snapshot and sys.getrefcount(names) <= 3:
        names.clear()
    return variables


# ``gc.freeze()`` takes objects out of the collector's sight: ``gc.get_objects`` and
# ``gc.get_referrers`` leave them out, and ``gc.unfreeze`` could not be undone, as a freeze after it
# would take all that is alive. But each object still says what it refers to, so the way there is
# followed from what is in sight. Servers of language models freeze once they are up.


# Python 3.12 freezes some 400 objects of its own when it begins. A program that has imported torch
# has a hundred times as many to freeze.
_FROZEN_BY_PYTHON: Final = 4000


def frozen_count() -> int:
    """Return how many objects ``gc.freeze()`` took away; none where only Python itself did."""
    count = get_freeze_count()
    return count if count > _FROZEN_BY_PYTHON else 0


def frozen_objects() -> list[object]:
    """Return the frozen objects that modules, classes, frames or other objects lead to.

    That took 0.8 s where 370,000 objects were frozen. What only C refers to is not found.
    """
    if not frozen_count():
        return []
    # A list display would be among the objects that it is made of, and would keep them.
    front = get_objects()
    front += [*with_subclasses([object]), sys.modules, *sys.modules.values()]
    for frame in running_frames():
        # From Python 3.11 on a frame that runs does not say what its variables refer to. A list of
        # ours that comes to be in itself would keep all that is in it.
        if frame.f_code.co_filename != __file__:
            front += [frame, *variables_of(frame).values()]
    # Modules and classes may be frozen themselves.
    seen_ids, objects = set(map(id, get_objects())), []
    fresh = _by_id(front)
    while front:
        fresh |= _by_id(referents_of(front))
        front = [thing for number, thing in fresh.items() if number not in seen_ids]
        seen_ids |= fresh.keys()
        objects += front
        fresh.clear()
    return objects


def _by_id(objects: Iterable[object]) -> dict[int, object]:
    """Return those that may refer to others. No step of this is in Python."""
    tracked = list(filter(is_tracked, objects))
    return dict(zip(map(id, tracked), tracked, strict=True))


def referrers_among(objects: Sequence[object], targets: Sequence[object]) -> list[object]:
    """Return those of ``objects`` that refer to any of ``targets``."""
    target_ids = set(map(id, targets))
    return [
        thing
        for part in _parts(objects)
        if not target_ids.isdisjoint(map(id, referents(*part)))
        for thing in part
        if not target_ids.isdisjoint(map(id, referents(thing)))
    ]


# Up to 3.12.5, the ``_asyncio`` of Python 3.12 names objects that are dead. Each that is looked at
# dies a second time, and the next collection never ends.
_NAMES_THE_DEAD: Final = (3, 12) <= sys.version_info < (3, 12, 6)


def referents(*objects: object) -> list[object]:
    """Return what some objects refer to, each as often as they do."""
    if _NAMES_THE_DEAD:
        module = sys.modules.get("_asyncio")
        objects = tuple(thing for thing in objects if thing is not module)
    return get_referents(*objects)


def referents_of(objects: Sequence[object]) -> Iterator[object]:
    """Return what `referents` does, for objects that are too many for one call."""
    return chain.from_iterable(referents(*part) for part in _parts(objects))


def _parts(objects: Sequence[object]) -> Iterator[Sequence[object]]:
    return (objects[n : n + _AT_A_TIME] for n in range(0, len(objects), _AT_A_TIME))
