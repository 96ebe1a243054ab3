"""Finds the tensors, storages, modules and optimizers that are alive, and remembers them."""

from __future__ import annotations

import gc
import sys
import sysconfig
import weakref
from collections.abc import Callable, Sequence
from gc import get_objects, get_stats
from threading import get_ident
from types import FrameType
from typing import Any, Final, NamedTuple, TypeVar

import torch

from pytest_torchmem.record.heap import (
    frozen_count,
    instances_among,
    instances_of,
    is_a,
)
from pytest_torchmem.record.native.choice import Choice
from pytest_torchmem.record.native.library import Library
from pytest_torchmem.record.owners.places import answers
from pytest_torchmem.record.patches import Installed
from pytest_torchmem.record.torch_api import memory

_T = TypeVar("_T")

# An object is young, in one of two generations, until it has survived a collection of the elder of
# these. The first releases of Python 3.14 and builds without the lock have other ones, or none.
HAS_GENERATIONS: Final = not (
    (3, 14) <= sys.version_info < (3, 14, 5) or sysconfig.get_config_var("Py_GIL_DISABLED")
)


class CensusReference(weakref.ref[Any]):
    """A weak reference of ours, which `SwapWatch` tells from a program's."""

    __slots__ = ()


class Census:
    """Finds what `instances_of` does, and looks at everything only once where the library is there.

    What is made is young until a collection of the second or third generation makes it old. Before
    each of these the library refers weakly to what is young (`Library.collection_callback`). So
    whatever lives is either known or young. A look at everything follows where a collection was not
    seen whole, and after ``gc.freeze``.
    """

    def __init__(self, *classes: type[object]) -> None:
        self._classes = classes
        self._callback: Any = None
        # Both are the callback's: what it found, and a None for each collection that it saw.
        self._references: list[CensusReference] = []
        self._notes: list[None] = []
        # What `_unseen` said when all was known or young.
        self._complete: tuple[int, ...] = ()
        self._due = _DueCollection()

    def watch_by(self, library: Library) -> None:
        """Learn by a library what is about to be old, from now on."""
        if self._callback is None and HAS_GENERATIONS:
            arguments = (get_objects, CensusReference, self._classes, self._references, self._notes)
            callback = library.collection_callback((*arguments, gc.callbacks))
            self._callback = callback if callable(callback) else None
        # It comes last: after others, which are Python's, other threads may run.
        if self._callback and gc.callbacks[-1:] != [self._callback]:
            if self._callback in gc.callbacks:
                gc.callbacks.remove(self._callback)
            gc.callbacks.append(self._callback)

    def find(self) -> list[object]:
        """Return every living instance of the classes."""
        unseen = self._unseen()
        if unseen and unseen == self._complete:
            objects = _each_once(self._alive(), _young(self._classes))
            # A collection may have run just now.
            if unseen == self._unseen():
                return objects
        return self._look()

    def settle(self, must_collect: Callable[[], bool] = lambda: False) -> None:
        """Leave the collector as after a collection, and go on knowing what is alive.

        Garbage goes where Python itself would have looked for it by now, and where it must: this
        is asked once the young garbage is gone, which takes next to no time. What is
        young is looked at each time: what one test leaves there would make all else due sooner.
        """
        if not HAS_GENERATIONS:
            gc.collect()
            return
        others, complete = _where_others_stand(), self._complete
        self.find()
        if complete != self._complete:
            # That was a long look. What another thread makes after the next one becomes old at
            # once, and can no longer be told from what was imported.
            others = _where_others_stand()
        self._references += map(CensusReference, _young(self._classes))
        if self._due.collect_young() or frozen_count() or must_collect():
            self._due.collect()
        else:
            _make_old()
        self._complete = self._unseen() if others == _where_others_stand() else ()

    def _unseen(self) -> tuple[int, ...]:
        """Count the collections that made old what nobody saw, and the frozen objects.

        Empty where that says nothing.
        """
        if not HAS_GENERATIONS:
            return ()
        counts = sum(generation["collections"] for generation in get_stats()[1:])
        return counts - len(self._notes), frozen_count()

    def _alive(self) -> list[object]:
        """Return what is known and lives, and forget the rest."""
        alive = {id(thing): known for known in self._references if (thing := known()) is not None}
        self._references[:] = alive.values()
        return [thing for known in self._references if (thing := known()) is not None]

    def _look(self) -> list[object]:
        unseen = self._unseen()
        instances = instances_of(self._classes)
        self._references[:] = map(CensusReference, instances)
        self._complete = unseen
        return instances


# Python looks at everything once so large a part of it is new.
_NEW_PART: Final = 4


class _DueCollection:
    """Knows when a collection is due that would have run if nobody had made all objects old.

    Else the cycles of small tests would stay for as long as the process lives, and each look at
    what is alive would take longer than the last.
    """

    def __init__(self) -> None:
        self._old_count = 0
        self._new_count = 0

    def collect_young(self) -> bool:
        """Look for garbage in what is young, and count the rest, which is about to be old.

        Return whether enough is new. The collector does not look where it is switched off.
        """
        self._old_count = self._old_count or len(get_objects())
        self._new_count += sum(len(get_objects(generation)) for generation in (0, 1))
        if gc.isenabled():
            self._new_count -= gc.collect(1)
        return gc.isenabled() and self._new_count > self._old_count // _NEW_PART

    def collect(self) -> None:
        """Look for garbage in everything, and begin to count anew."""
        gc.collect()
        self._new_count, self._old_count = 0, len(get_objects())


def _make_old() -> None:
    """Begin all counts of the collector anew, and look at nothing.

    What is frozen is not looked at by a collection, and is old when it is thawed. It must not be
    called where the user has frozen something: that would be thawed, too, as what Python 3.12 has
    frozen is.
    """
    gc.freeze()
    try:
        gc.collect()
    finally:
        gc.unfreeze()


def _each_once(*lists: list[object]) -> list[object]:
    return list({id(thing): thing for things in lists for thing in things}.values())


def _young(classes: tuple[type[_T], ...]) -> list[_T]:
    return [thing for g in (0, 1) for thing in instances_among(classes, get_objects(g))]


def _where_others_stand() -> dict[int, tuple[FrameType, int]]:
    """Return each other thread's frame and instruction: if they are the same, it has not run."""
    frames = sys._current_frames()
    frames.pop(get_ident(), None)
    return {thread: (frame, frame.f_lasti) for thread, frame in frames.items()}


# One for the process: what was found in one test is known in the next.
_CENSUS = Census(
    *memory.HOLDING,
    torch.nn.Module,
    torch.optim.Optimizer,
)


class Live(NamedTuple):
    """All that is alive and has a Python object; a storage gets one when somebody asks for it."""

    tensors: list[torch.Tensor]
    storages: list[torch.UntypedStorage]
    modules: list[torch.nn.Module]
    optimizers: list[torch.optim.Optimizer]


def find_live() -> Live:
    """Return everything of torch's that is alive."""
    objects = _CENSUS.find()
    modules, optimizers = _of(torch.nn.Module, objects), _of(torch.optim.Optimizer, objects)
    return Live(_tensors(objects), _of(torch.UntypedStorage, objects), modules, optimizers)


def find_modules() -> list[torch.nn.Module]:
    """Return every module that is alive."""
    return _of(torch.nn.Module, _CENSUS.find())


def find_holding() -> list[torch.Tensor | torch.UntypedStorage]:
    """Return every tensor and then every storage that is alive and has a Python object."""
    live = find_live()
    return [*live.tensors, *live.storages]


def _tensors(objects: Sequence[object]) -> list[torch.Tensor]:
    return [tensor for tensor in _of(torch.Tensor, objects) if answers(tensor)]


def _of(kind: type[_T], objects: Sequence[object]) -> list[_T]:
    return [thing for thing in objects if is_a(thing, kind)]


def settle_collector(must_collect: Callable[[], bool]) -> None:
    """Leave Python's collector as after a collection, so that the next look is a short one.

    ``must_collect`` is asked whether garbage has to go that is not young. A collection takes 0.1 to
    0.2 s where much is imported.
    """
    if not _STAYS.names:
        _STAYS.replace("torch.utils.weakref", lambda _: SwapWatch())
    if library := Choice.of_process().library:
        _CENSUS.watch_by(library)
    _CENSUS.settle(must_collect)


# What stays when a body has ended.
_STAYS: Final = Installed()


class SwapWatch:
    """Lets ``torch.utils.swap_tensors`` swap what the census refers to, as it would without us.

    It refuses tensors that anybody refers to weakly, and asks ``weakref`` for that. Converting a
    module of tensor subclasses (quantised, distributed) swaps its tensors.
    """

    def __getattr__(self, name: str) -> object:
        return getattr(weakref, name)

    @staticmethod
    def getweakrefs(thing: object) -> list[weakref.ref[Any]]:
        return [
            reference
            for reference in weakref.getweakrefs(thing)
            if type(reference) is not CensusReference
        ]
