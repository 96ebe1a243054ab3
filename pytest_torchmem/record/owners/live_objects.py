"""What is alive in this process, asked of Python's garbage collector.

A process with torch in it holds some hundred thousand objects, and looking at each of them takes
longer than a small test. So they are looked at in as few steps as Python allows.
"""

from __future__ import annotations

import gc
import sys
import sysconfig
import threading
import weakref
from collections.abc import Iterable, Sequence
from itertools import compress
from types import FrameType
from typing import Any, Final

from pytest_torchmem.record.owners.frozen_objects import frozen_objects

# An object is young, in one of two generations, until it has survived a collection of the elder of
# these. Later versions and builds without the lock have other generations, or none.
_HAS_GENERATIONS: Final = sys.version_info < (3, 14) and not sysconfig.get_config_var(
    "Py_GIL_DISABLED"
)


def instances_of(classes: Iterable[type[Any]]) -> list[Any]:
    """Return every living object of one of ``classes`` or of a class below one.

    Looks at the type and never at ``__class__``: a proxy among the objects must not be woken.
    """
    # A copy of so long a list would take as long as the look itself.
    objects = gc.get_objects()
    objects += frozen_objects()
    return _selected(objects, classes)


class Census:
    """Finds what `instances_of` does, and looks only at what is new where that can be known.

    What was made since the last time is young as long as there was no collection that made it old.
    A small test makes too little for one, and is spared a look at all that was imported. What
    ``gc.freeze`` took away is looked for again whenever it has become more or less.
    """

    def __init__(self, *classes: type[Any]) -> None:
        self._classes = classes
        self._known: list[weakref.ref[Any]] = []
        self._seen: tuple[int, ...] = ()
        self._freeze_count = 0
        self._since_freeze: list[weakref.ref[Any]] = []

    def find(self) -> list[Any]:
        """Return every living instance of the classes."""
        seen = _collections()
        if seen and seen == self._seen:
            found = self._known_and_young()
            # A collection may have run just now.
            if seen == _collections():
                return self._remember(found, seen)
            seen = _collections()
        return self._remember(self._look(), seen)

    def forget(self) -> None:
        """Refer to nothing any more. The next look is a look at everything."""
        self._known, self._since_freeze = [], []
        self._seen, self._freeze_count = (), 0

    def settle(self, *, collect: bool) -> None:
        """Leave the collector as after a collection, and go on knowing what is alive.

        Garbage goes only if asked to.
        """
        if not _HAS_GENERATIONS:
            gc.collect()
            return
        self.find()
        # That may have been a long look. What another thread makes after the next one becomes old
        # at once, and can no longer be told from what was imported.
        others = _where_others_stand()
        self.find()
        middle, old, frozen = self._seen
        if collect or frozen:
            gc.collect()
        else:
            _make_old()
        now = (middle, old + 1, frozen)
        undisturbed = _where_others_stand() == others and _collections() == now
        self._seen = now if undisturbed else ()

    def _remember(self, found: list[Any], seen: tuple[int, ...]) -> list[Any]:
        self._known = [weakref.ref(thing) for thing in found]
        self._seen = seen
        return found

    def _look(self) -> list[Any]:
        count = gc.get_freeze_count()
        if count and count == self._freeze_count:
            return _each_once(
                _alive(self._since_freeze), _selected(gc.get_objects(), self._classes)
            )
        found = instances_of(self._classes)
        self._freeze_count = count
        self._since_freeze = [weakref.ref(thing) for thing in found] if count else []
        return found

    def _known_and_young(self) -> list[Any]:
        """What was found the last time and still lives, and what is young."""
        young = [thing for g in (0, 1) for thing in _selected(gc.get_objects(g), self._classes)]
        return _each_once(_alive(self._known), young)


def _make_old() -> None:
    """Begin all counts of the collector anew, and look at nothing.

    What is frozen is not looked at by a collection, and is old when it is thawed. It must not be
    called where the user has frozen something: that would be thawed, too.
    """
    gc.freeze()
    try:
        gc.collect()
    finally:
        gc.unfreeze()


def _alive(references: Iterable[weakref.ref[Any]]) -> list[Any]:
    return [thing for reference in references if (thing := reference()) is not None]


def _each_once(*lists: list[Any]) -> list[Any]:
    return list({id(thing): thing for things in lists for thing in things}.values())


def _collections() -> tuple[int, ...]:
    """How often the second and third generation were collected, and how much is frozen.

    Empty where that says nothing.
    """
    if not _HAS_GENERATIONS:
        return ()
    return (*(s["collections"] for s in gc.get_stats()[1:]), gc.get_freeze_count())


def _where_others_stand() -> dict[int, tuple[FrameType, int]]:
    """Where each other thread is; one that stands where it stood has not run, as far as we know."""
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    return {thread: (frame, frame.f_lasti) for thread, frame in frames.items()}


def _selected(objects: Sequence[Any], classes: Iterable[type[Any]]) -> list[Any]:
    wanted = _with_subclasses(classes)
    # No step of this loop is in Python.
    return list(compress(objects, map(wanted.__contains__, map(type, objects))))


def _with_subclasses(classes: Iterable[type[Any]]) -> set[type[Any]]:
    found: set[type[Any]] = set()
    waiting = list(classes)
    while waiting:
        found.add(kind := waiting.pop())
        # Of the class itself: a metaclass may have a method of that name.
        waiting += set(type.__subclasses__(kind)) - found
    return found
