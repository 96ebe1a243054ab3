"""Finds the tensors, storages, modules and optimizers that are alive, and remembers them."""

from __future__ import annotations

import gc
import sys
import sysconfig
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from functools import wraps
from gc import get_objects, get_referrers, get_stats
from threading import get_ident
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Final, NamedTuple, TypeVar

import torch

from pytest_torchmem.record.heap import (
    frozen_count,
    frozen_objects,
    instances_among,
    instances_in_sight,
    instances_of,
    is_a,
    referents_of,
    referrers_among,
    with_subclasses,
)
from pytest_torchmem.record.owners.places import answers
from pytest_torchmem.record.patches import Installed
from pytest_torchmem.record.torch_api import autograd, dispatcher, memory

_T = TypeVar("_T")

# An optimizer's state: its attributes, one of them, the state of one tensor, and that by its name.
_DEEPEST_HELD: Final = 4
# To ask who refers to some things takes as long as a look at everything, for each forty of them.
# For more than these, what all objects refer to is listed, which takes as long as two hundred.
_MOST_ASKED: Final = 128
# A project's tests may be parametrized with some hundred tensors.
_MOST_MISSING: Final = 4096
# A search for what holds them takes as long as three to ten looks at everything. A look is longer
# where the way to frozen objects has to be followed.
_LOOKS_BEFORE_A_SEARCH: Final = 8
_LONG_LOOKS_BEFORE_A_SEARCH: Final = 2
_CONTAINERS: Final = (dict, list, tuple, set, CellType)

# An object is young, in one of two generations, until it has survived a collection of the elder of
# these. The first releases of Python 3.14 and builds without the lock have other ones, or none.
HAS_GENERATIONS: Final = not (
    (3, 14) <= sys.version_info < (3, 14, 5) or sysconfig.get_config_var("Py_GIL_DISABLED")
)


class Census:
    """Finds what `instances_of` does, and looks only at what is new where that can be known.

    What was made since the last time is young as long as there was no collection that made it old.
    A small test makes too little for one, and is spared a look at all that was imported. What
    ``gc.freeze`` took away is looked for again whenever it has become more or less.

    After `let_go` nothing refers weakly to instances of the class ``released``. The next look finds
    them again in the other instances, and ``beside`` returns more that come with those. Each
    instance refers to its class: so the number of references to the class tells whether the look
    found all. If it did not, it looks in the variables of all modules, and remembers those that
    have any. If anything else changes that number, a look at everything follows. When such looks
    have taken as long as a search, it searches for the functions or objects that lead to what is
    missed time after time, if that is a few.
    """

    def __init__(
        self,
        *classes: type[object],
        released: type[object] | None = None,
        beside: Callable[[list[object]], list[object]] = lambda found: [],
    ) -> None:
        self._classes = classes
        self._released = () if released is None else (released,)
        self._beside = beside
        # Since `let_go`, what `_references` said then.
        self._references: dict[int, int] | None = None
        # How often in a row a look has missed the instance with that id.
        self._missed: dict[int, int] = {}
        # Of these, for which the holders were searched: a second search would find the same ones.
        self._searched: set[int] = set()
        self._holders: list[weakref.ref[object]] = []
        self._modules: list[weakref.ref[object]] = []
        self._known: list[weakref.ref[object]] = []
        self._seen: tuple[int, ...] = ()
        self._freeze_count = 0
        self._since_freeze: list[weakref.ref[object]] = []
        self._due = _DueCollection()

    def find(self) -> list[object]:
        """Return every living instance of the classes."""
        seen, found = collections_so_far(), None
        if seen and seen == self._seen:
            found = self._known_and_young()
            if not self._is_complete(found):
                self._modules = [weakref.ref(module) for module in _modules_with(self._released)]
                found = self._known_and_young()
            # A collection may have run just now.
            if self._is_complete(found) and seen == collections_so_far():
                return self._remember(found, seen)
            seen = collections_so_far()
        looked = self._look()
        if found is not None and self._references is not None:
            self._find_holders(set(map(id, looked)) - set(map(id, found)), looked)
        return self._remember(looked, seen)

    def find_kept(self) -> list[object]:
        """Return what `find` does, less the instances that `let_go` releases.

        These alone may be out of sight after it.
        """
        seen, found = collections_so_far(), None
        if seen and seen == self._seen:
            found = self._remembered_and_young()
        if found is None or seen != collections_so_far():
            found = self.find()
        return [thing for thing in found if not is_a(thing, self._released)]

    def _find_holders(self, missing: set[int], looked: list[object]) -> None:
        self._searched &= missing
        self._missed = {key: self._missed.get(key, 0) + 1 for key in missing}
        counts = {key: n for key, n in self._missed.items() if n > 1 and key not in self._searched}
        enough = _LONG_LOOKS_BEFORE_A_SEARCH if frozen_count() else _LOOKS_BEFORE_A_SEARCH
        if max(counts.values(), default=0) >= enough and len(counts) <= _MOST_MISSING:
            self._searched |= counts.keys()
            things = [thing for thing in looked if id(thing) in counts]
            holders = [h for h in _holders_of(things) if not is_a(h, self._classes)]
            fewest = _fewest(holders, counts.keys(), self._released)
            self._holders = [weakref.ref(h) for h in [*_alive(self._holders), *fewest]]

    def let_go(self) -> None:
        """Refer to none of the released instances any more, not even weakly."""
        seen = self._seen
        found = self._known_and_young() if seen else []
        if not seen or seen != collections_so_far() or not self._is_complete(found):
            self.forget()
            return
        self._since_freeze, self._freeze_count = [], 0
        references = _references(found, self._released)
        self._remember([thing for thing in found if not is_a(thing, self._released)], seen)
        self._references = references

    def forget(self) -> None:
        """Refer to nothing any more. The next look is a look at everything."""
        self._known, self._since_freeze = [], []
        self._seen, self._freeze_count = (), 0
        self._references = None

    def settle(self, *, collect: bool) -> None:
        """Leave the collector as after a collection, and go on knowing what is alive.

        Garbage goes if asked to, and where Python itself would have looked for it by now. What is
        young is looked at each time: what one test leaves there would make all else due sooner.
        """
        if not HAS_GENERATIONS:
            gc.collect()
            return
        others = _where_others_stand()
        self.find()
        if _where_others_stand() != others:
            # That was a long look. What another thread makes after the next one becomes old at
            # once, and can no longer be told from what was imported.
            others = _where_others_stand()
            self.find()
        middle, old, frozen = self._seen
        looks = gc.isenabled()
        if self._due.collect_young() or collect or frozen:
            self._due.collect()
        else:
            _make_old()
        now = (middle + looks, old + 1, frozen)
        undisturbed = _where_others_stand() == others and collections_so_far() == now
        self._seen = now if undisturbed else ()

    def _remember(self, found: list[object], seen: tuple[int, ...]) -> list[object]:
        self._known = [weakref.ref(thing) for thing in found]
        self._seen = seen
        self._references = None
        return found

    def _is_complete(self, found: list[object]) -> bool:
        """Return whether ``found`` has every living instance of those that were let go of."""
        references = self._references
        return references is None or references == _references(found, self._released)

    def _look(self) -> list[object]:
        count = frozen_count()
        if count and count == self._freeze_count:
            return _each_once(_alive(self._since_freeze), instances_in_sight(self._classes))
        found = instances_of(self._classes)
        self._freeze_count = count
        self._since_freeze = [weakref.ref(thing) for thing in found] if count else []
        return found

    def _known_and_young(self) -> list[object]:
        """Return the survivors of the last look, and what is young."""
        found = self._remembered_and_young()
        if self._references is None:
            return found
        holders = [*found, *_alive(self._holders), *_alive(self._modules)]
        found = _each_once(found, _held(holders, self._released))
        return _each_once(found, self._beside(found))

    def _remembered_and_young(self) -> list[object]:
        return _each_once(_alive(self._known), _young(self._classes))


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


def _alive(references: Iterable[weakref.ref[object]]) -> list[object]:
    return [thing for reference in references if (thing := reference()) is not None]


def _each_once(*lists: list[object]) -> list[object]:
    return list({id(thing): thing for things in lists for thing in things}.values())


def _held(holders: list[object], classes: tuple[type[object], ...]) -> list[object]:
    """Return what some objects hold in attributes and in containers there, of some classes."""
    found, seen, front = [], set(map(id, holders)), holders
    for _ in range(_DEEPEST_HELD):
        within = {id(thing): thing for thing in referents_of(front)}
        fresh = [thing for key, thing in within.items() if key not in seen]
        seen |= within.keys()
        found += instances_among(classes, fresh)
        front = instances_among(_CONTAINERS, fresh)
    return found


def _modules_with(classes: tuple[type[object], ...]) -> list[ModuleType]:
    """Return the modules that have instances of some classes as variables."""
    kinds = with_subclasses(classes)
    modules = [module for module in sys.modules.values() if is_a(module, ModuleType)]
    variables = (object.__getattribute__(module, "__dict__") for module in modules)
    return [
        module
        for module, names in zip(modules, variables, strict=True)
        if not kinds.isdisjoint(map(type, names.values()))
    ]


def _holders_of(things: list[object]) -> list[object]:
    """Return what can be referred to weakly and leads to some things, if by containers alone."""
    found: list[object] = []
    frozen = frozen_objects()
    seen, front = {id(things), id(frozen)}, things
    for _ in range(_DEEPEST_HELD):
        seen.add(id(front))
        inside = set(map(id, front))
        leading = [*_referrers(front), *referrers_among(frozen, front)]
        referrers = [thing for thing in leading if id(thing) not in seen]
        seen.update(map(id, referrers))
        # A function refers to all of its module, and does not lead there.
        found += [
            thing
            for thing in referrers
            if type(thing).__weakrefoffset__
            and not (is_a(thing, FunctionType) and id(thing.__globals__) in inside)
        ]
        front = [thing for thing in referrers if is_a(thing, _CONTAINERS)]
        if not 0 < len(front) <= _MOST_MISSING:
            break
    return found


def _referrers(things: list[object]) -> list[object]:
    if len(things) <= _MOST_ASKED:
        return get_referrers(*things)
    return referrers_among(get_objects(), things)


def _fewest(
    holders: list[object], wanted: Set[int], classes: tuple[type[object], ...]
) -> list[object]:
    """Return a few of ``holders`` that hold what all hold of ``wanted``, which are ids.

    Each of some hundred tests holds what it is parametrized with, and a mark holds it for all.
    """
    held = [wanted & set(map(id, _held([holder], classes))) for holder in holders]
    fewest, left = [], set(wanted)
    for number in sorted(range(len(holders)), key=lambda n: -len(held[n])):
        if not left.isdisjoint(held[number]):
            fewest.append(holders[number])
            left -= held[number]
    return fewest


def _references(found: list[object], classes: Iterable[type[object]]) -> dict[int, int]:
    """Count by its id the references to each class that are not those of instances in ``found``."""
    # No reference to a class but those of the set: they are the same in each count.
    instances = Counter(map(id, map(type, found)))
    kinds = with_subclasses(classes)
    return {id(kind): sys.getrefcount(kind) - instances[id(kind)] for kind in kinds}


def _young(classes: tuple[type[_T], ...]) -> list[_T]:
    return [thing for g in (0, 1) for thing in instances_among(classes, get_objects(g))]


def collections_so_far() -> tuple[int, ...]:
    """Count the collections of the second and third generation, and the frozen objects.

    Empty where that says nothing.
    """
    if not HAS_GENERATIONS:
        return ()
    return (*(s["collections"] for s in get_stats()[1:]), frozen_count())


def _where_others_stand() -> dict[int, tuple[FrameType, int]]:
    """Return each other thread's frame and instruction: if they are the same, it has not run."""
    frames = sys._current_frames()
    frames.pop(get_ident(), None)
    return {thread: (frame, frame.f_lasti) for thread, frame in frames.items()}


def _gradients(found: list[object]) -> list[object]:
    """Return what is in a ``.grad``, which may have no Python object until we ask."""
    with dispatcher.unseen_by_modes():
        leaves = filter(autograd.is_leaf, _tensors(found))
        return [g for g in map(autograd.gradient_of, leaves) if g is not None]


# One for the process: what was found in one test is known in the next.
_CENSUS = Census(
    *memory.HOLDING,
    torch.nn.Module,
    torch.optim.Optimizer,
    released=torch.Tensor,
    beside=_gradients,
)


class Live(NamedTuple):
    """All that is alive and has a Python object; a storage gets one when somebody asks for it."""

    tensors: list[torch.Tensor]
    storages: list[torch.UntypedStorage]
    modules: list[torch.nn.Module]
    optimizers: list[torch.optim.Optimizer]


def find_live() -> Live:
    """Return everything of torch's that is alive."""
    found = _CENSUS.find()
    modules, optimizers = _of(torch.nn.Module, found), _of(torch.optim.Optimizer, found)
    return Live(_tensors(found), _of(torch.UntypedStorage, found), modules, optimizers)


def find_modules() -> list[torch.nn.Module]:
    """Return every module that is alive."""
    return _of(torch.nn.Module, _CENSUS.find_kept())


def find_holding() -> list[torch.Tensor | torch.UntypedStorage]:
    """Return every tensor and then every storage, looking at all objects there are."""
    found = instances_of(memory.HOLDING)
    return [*_tensors(found), *_of(torch.UntypedStorage, found)]


def _tensors(found: Sequence[object]) -> list[torch.Tensor]:
    return [tensor for tensor in _of(torch.Tensor, found) if answers(tensor)]


def _of(kind: type[_T], found: Sequence[object]) -> list[_T]:
    return [thing for thing in found if is_a(thing, kind)]


def settle_collector(*, collect: bool) -> None:
    """Leave Python's collector as after a collection, so that the next look is a short one.

    ``collect`` says whether garbage has to go. A collection takes 0.1 to 0.2 s where much is
    imported.
    """
    _CENSUS.settle(collect=collect)


class SwapWatch:
    """Lets ``torch.utils.swap_tensors`` swap while a body is recorded, as it would without us.

    It refuses tensors that anybody refers to weakly. We do, to know what is alive. Converting a
    module of tensor subclasses (quantised, distributed) swaps its tensors.
    """

    def install(self, patches: Installed) -> None:
        patches.finally_do(_CENSUS.let_go)
        patches.replace("torch.utils.swap_tensors", self._forgetting)

    @staticmethod
    def _forgetting(
        swap: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> Callable[[torch.Tensor, torch.Tensor], None]:
        @wraps(swap)
        def watched(one: torch.Tensor, other: torch.Tensor) -> None:
            _CENSUS.forget()
            swap(one, other)

        return watched
