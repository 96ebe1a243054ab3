"""The way from a name that a reader knows to an object that is still alive."""

from __future__ import annotations

import contextvars
import gc
import re
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Any, Final

from pytest_torchmem.record import heap

_DEPTH: Final = 20
# From a frame over its tracebacks and the exception to a name is not far.
_DEPTH_ABOVE_FRAME: Final = 10
_WIDTH: Final = 300
# `path_nearby` walks down from known containers: so many steps, and so many objects at most.
_DEPTH_BELOW: Final = 10
_LOOKED_AT: Final = 100_000
_KEY_LENGTH: Final = 40
# Marks where the function of a variable begins and ends in a way, until `tidy` moves it.
_IN: Final = "\0"
_AFTER_VARIABLE: Final = re.compile(r"(?=, (?:frame of|its variable) )")
_SHORT_MODULE = re.compile(r"\._(?:parameters|buffers|modules)\['([^'\]]+)'\]")
_FIRST_INDEX = re.compile(r"\[(\d+)\]")
_FIRST_KEY = re.compile(r"\['(\w+)'\]")
# A `threading.local` has a dictionary of its attributes for each thread.
_OF_A_THREAD = re.compile(r"\[(?:ReferenceType|_localdummy)\]\['(\w+)'\]")
# Code that can stop in the middle, and the attribute with the frame that has its variables.
_FRAME_OF: Final[dict[type, Callable[[Any], types.FrameType | None]]] = {
    types.GeneratorType: attrgetter("gi_frame"),
    types.CoroutineType: attrgetter("cr_frame"),
    types.AsyncGeneratorType: attrgetter("ag_frame"),
}
_CODE: Final = (
    types.FunctionType,
    types.MethodType,
    types.FrameType,
    types.TracebackType,
    types.CellType,
    *_FRAME_OF,
)
_LOG: Final = "the log that pytest captures: "
# These packages refer to an object only because the program does.
_MACHINERY: Final = ("pytest_torchmem", "_pytest", "pytest", "pluggy")


class Searcher:
    """Finds the ways to objects, and remembers the containers on each way for the next search."""

    def __init__(self) -> None:
        self._known_ways: dict[int, str] = {}
        self._keepers: dict[int, str] = {}
        # The first container after the name on each way, by id().
        self._containers: dict[int, object] = {}
        self._nearby: dict[int, str] | None = None
        self._frozen = heap.frozen_objects()

    def path_to(self, target: object, ignored: Collection[int] = ()) -> str:
        """Return how to get to ``target``: ``models.CACHE['last'][0]``; ``""`` if no name does.

        Breadth first, so the shortest way is found. ``ignored`` are the ``id()`` of objects that
        refer to the target for the caller's own sake.
        """
        path, kind = self._search(target, ignored, _DEPTH)
        return path or kind

    def path_nearby(self, target: object) -> str:
        """Return the way to ``target`` from where earlier ways led through; ``""`` if it has none.

        All such ways are found in one pass over these containers, which is done at the first call.
        """
        if self._nearby is None:
            self._nearby = self._ways_down()
        return tidy(self._nearby.get(id(target), ""))

    def unreferred(self, targets: Sequence[object], ignored: Collection[int]) -> set[int]:
        """Return the ``id()`` of those of ``targets`` that no object refers to; see `path_to`."""
        names, frames = _local_variables()
        objects = gc.get_objects()  # no list display: it would be in itself
        objects += self._frozen
        above = heap.referrers_among(objects, targets)
        holders = (h for h in above if id(h) not in frames and id(h) not in ignored)
        referred = {
            id(held) for h in holders if not _holds_for_machinery(h) for held in heap.referents(h)
        }
        return {id(target) for target in targets} - referred - names.keys()

    def _ways_down(self) -> dict[int, str]:
        """The ways to what is in the containers, breadth first."""
        ways = {number: self._known_ways[number] for number in self._containers}
        front = list(self._containers.values())
        for _ in range(_DEPTH_BELOW):
            following = []
            for holder in front:
                for step, item in _items(holder):
                    if id(item) not in ways and _is_entered(item):
                        ways[id(item)] = ways[id(holder)] + step
                        following.append(item)
                if len(ways) > _LOOKED_AT:
                    return ways
            front = following
        return ways

    def _search(
        self, target: object, ignored: Collection[int], depth: int, in_stopped: bool = True
    ) -> tuple[str, str]:
        """The way from a name; where there is none, that from the last object that was on one.

        ``in_stopped`` lets the way lead through variables of code that has stopped. The log that
        pytest captures holds what the program logs: it is named where nothing else holds it.
        """
        of_pytest: tuple[str, object] | None = None
        names, frames = _local_variables()
        ways: dict[int, str] = {id(target): ""}
        below: dict[int, object] = {}
        front: list[object] = [target]
        skipped = {*ignored, *frames}
        skipped |= {*map(id, (names, ways, below, front, self._frozen, self._containers))}
        kinds: list[str] = []
        for _ in range(depth):
            for thing in front:
                if name := names.get(id(thing)):
                    return self._way_from(name, thing, ways, below), ""
            above = [*gc.get_referrers(*front), *heap.referrers_among(self._frozen, front)]
            following: list[object] = []
            for holder in above:
                if (held := _led_to(holder, ways, skipped)) is None:
                    continue
                ways[id(holder)] = step_from(holder, held, ways[id(held)])
                below[id(holder)] = held
                root = self._known_ways.get(id(holder)) or _root(holder)
                if not root and _is_stopped_code(holder, held):
                    if not in_stopped:
                        continue
                    # Not through itself.
                    around = {*skipped, id(above), id(following), id(holder)}
                    root = self._of_stopped_code(holder, around)
                if root.startswith(_LOG):
                    of_pytest = of_pytest or (root, holder)
                    continue
                if root:
                    return self._way_from(root, holder, ways, below), ""
                following.append(holder)
                kinds += (tidy(f"{kind}{ways[id(holder)]}") for kind in _kind(holder))
            if not (front := following[:_WIDTH]):
                break
            skipped |= {id(above), id(following), id(front)}
        if of_pytest:
            return self._way_from(*of_pytest, ways, below), ""
        return "", kinds[-1] if kinds else ""

    def _of_stopped_code(self, holder: object, ignored: Collection[int]) -> str:
        """Name a frame or a generator after its keeper, if that has a name.

        An exception keeps all frames that it went through, and their variables may refer to what
        keeps the exception. So a keeper is looked for in variables of stopped code last.
        """
        if id(holder) not in self._keepers:
            keeper = ""
            # No generator: this search would find it, as code that has stopped.
            for in_stopped in (False, True):
                keeper = keeper or self._search(holder, ignored, _DEPTH_ABOVE_FRAME, in_stopped)[0]
            # The interpreter's own note of the last exception is nothing that a program keeps.
            self._keepers[id(holder)] = "" if keeper.startswith("sys.last_") else keeper
        keeper = self._keepers[id(holder)]
        if heap.is_a(holder, types.FrameType):
            what = f"frame of {place_of_frame(holder)}"
            return f"{keeper}, {what}: " if keeper else f"a {what} that a traceback keeps: "
        what = f"suspended {getattr(holder, '__qualname__', '')}"
        return f"{keeper}, {what}: " if keeper else f"the {what}: "

    def _way_from(
        self, root: str, top: object, ways: dict[int, str], below: dict[int, object]
    ) -> str:
        path = root + ways[id(top)]
        at, is_in_container = top, False
        while True:
            # Where a later step rewrote the way from here, the way to here is not known.
            if path.endswith(ways[id(at)]):
                self._known_ways[id(at)] = path.removesuffix(ways[id(at)])
                if not is_in_container and id(at) in below and _is_entered(at):
                    self._containers[id(at)] = at
                    is_in_container = True
            if id(at) not in below:
                return tidy(path)
            at = below[id(at)]


def _led_to(holder: object, ways: Mapping[int, str], skipped: set[int]) -> object:
    """Return what is on a way and ``holder`` refers to; None for a holder that leads nowhere."""
    if id(holder) in ways or id(holder) in skipped or _holds_for_machinery(holder):
        return None
    return next((held for held in heap.referents(holder) if id(held) in ways), None)


def step_from(holder: object, held: object, way: str) -> str:
    """Return the way from ``holder``, which refers to ``held``, from where ``way`` goes on."""
    if heap.is_a(holder, dict):
        key = _key(holder, held)
        return f".{key[1:-1]}{way}" if _root(holder) else f"[{key}]{way}"
    if heap.is_a(holder, (list, tuple)):
        place = next((n for n, item in enumerate(holder) if item is held), 0)
        return f"[{place}]{way}"
    if heap.is_a(holder, (types.CellType, types.TracebackType)):
        return way
    if type(holder).__name__.startswith("hamt_"):
        return _step_of_context(holder, held, way)
    if heap.is_a(holder, threading.local) and (match := _OF_A_THREAD.match(way)):
        return f".{match[1]}{way[match.end() :]}"
    names = _namespace(holder)
    if heap.is_a(holder, types.FrameType):
        if heap.is_a(held, types.FrameType):
            return way
        # Before Python 3.13 somebody may have asked for the variables: then a dict holds them, too.
        names = holder.f_locals
    if (held is names or heap.is_a(holder, type)) and (match := _FIRST_KEY.match(way)):
        # The key that led out of the namespace is the attribute's name.
        return f".{match[1]}{way[match.end() :]}"
    if heap.is_a(holder, types.FunctionType):
        return _step_of_function(holder, held, way)
    if heap.is_a(holder, types.FrameType):
        return _from_named(names, held, way)
    if (frame_of := _FRAME_OF.get(type(holder))) is not None:
        frame = frame_of(holder)
        return _from_named(heap.variables_of(frame), held, way) if frame else way
    return _from_named(attributes_of(holder), held, way)


def _step_of_function(function: types.FunctionType, held: object, way: str) -> str:
    match = _FIRST_INDEX.match(way)
    rest = way[match.end() :] if match else way
    if held is function.__closure__ and match:
        return f", its variable {function.__code__.co_freevars[int(match[1])]!r}{rest}"
    if held is function.__defaults__ or held is function.__kwdefaults__:
        return f", a default argument{rest}"
    return _from_named(vars(function), held, way)


def _step_of_context(node: object, held: object, way: str) -> str:
    """Return the way from a node of a context's tree, which tells each value before its key."""
    referents = heap.referents(node)
    key = next((key for value, key in pairwise(referents) if value is held), None)
    return f"{key.name!r}{way}" if isinstance(key, contextvars.ContextVar) else way


def _from_named(names: Mapping[str, object], held: object, way: str) -> str:
    name = next((name for name, value in names.items() if value is held), "")
    return f".{name}{way}" if name else way


def _namespace(holder: object) -> Any:
    try:
        return object.__getattribute__(holder, "__dict__")
    except (AttributeError, TypeError):
        return None


def attributes_of(holder: object) -> dict[str, object]:
    """Return an object's attributes, without waking any property."""
    names = dict(_namespace(holder) or {})
    for cls in type(holder).__mro__:
        for name, member in vars(cls).items():
            if isinstance(member, types.MemberDescriptorType):
                try:
                    names[name] = member.__get__(holder)
                except AttributeError:
                    continue
    return names


def _items(holder: object) -> Iterator[tuple[str, object]]:
    """Return the parts of an object that may hold more, each with the step to it."""
    if heap.is_a(holder, dict):
        steps = [(f"[{key_text(key)}]", item) for key, item in list(holder.items())]
    elif heap.is_a(holder, (list, tuple)):
        steps = [(f"[{number}]", item) for number, item in enumerate(holder)]
    elif heap.is_a(holder, (deque, set)):
        steps = [("", item) for item in list(holder)]
    else:
        steps = [(f".{name}", item) for name, item in attributes_of(holder).items()]
    return ((step, item) for step, item in steps if gc.is_tracked(item))


def _is_entered(thing: object) -> bool:
    """Return whether ``thing`` is the program's data: neither code, nor known by its own name."""
    return not (heap.is_a(thing, _CODE) or _root(thing) or _holds_for_machinery(thing))


def _root(holder: object) -> str:
    """The name of something that a reader can find by it; ``""`` for anything else."""
    if heap.is_a(holder, types.ModuleType):
        return str(holder.__name__)
    if heap.is_a(holder, dict):
        module = sys.modules.get(str(holder.get("__name__", "")))
        return module.__name__ if module is not None and vars(module) is holder else ""
    if heap.is_a(holder, type):
        return f"{holder.__module__}.{holder.__qualname__}"
    if heap.is_a(holder, types.FunctionType):
        module = sys.modules.get(holder.__module__ or "")
        is_module_s = getattr(module, holder.__name__, None) is holder
        return f"{holder.__module__}.{holder.__qualname__}" if is_module_s else ""
    if type(holder).__name__ == "FixtureDef":
        return f"the fixture {getattr(holder, 'argname', '')!r}: "
    if heap.is_a(holder, contextvars.Context):
        return "the context variable "
    if type(holder).__name__ == "LogCaptureHandler":
        return _LOG
    return ""


def _is_stopped_code(holder: object, held: object) -> bool:
    """Return whether ``holder`` is a frame or a generator, which refers to ``held`` by a variable.

    A frame also refers to the one that called it.
    """
    kinds = (types.FrameType, *_FRAME_OF)
    return heap.is_a(holder, kinds) and not heap.is_a(held, types.FrameType)


def _local_variables() -> tuple[dict[int, str], set[int]]:
    """Return the names of local variables by the ``id()`` of their objects.

    They are those of all frames that run the program; the other ids are those of all frames.
    """
    names: dict[int, str] = {}
    frames: set[int] = set()
    for frame in heap.running_frames():
        frames.add(id(frame))
        is_program = not is_machinery(frame.f_globals.get("__name__", ""))
        if is_program and frame.f_code.co_name != "<module>":
            for name, value in heap.variables_of(frame).items():
                names.setdefault(id(value), variable(name, place_of_frame(frame)))
    return names, frames


def place_of_frame(frame: types.FrameType) -> str:
    """Return ``check (losses.py:12)``."""
    file = frame.f_code.co_filename.replace("\\", "/").rsplit("/", 1)[-1]
    return f"{frame.f_code.co_name} ({file}:{frame.f_lineno})"


def _holds_for_machinery(holder: object) -> bool:
    if heap.is_a(holder, types.FrameType):
        return is_machinery(holder.f_globals.get("__name__", ""))
    return is_machinery(type(holder).__module__) and not _root(holder)


def is_machinery(module: object) -> bool:
    """Return whether a module is part of what runs the tests, and not of the program."""
    return str(module).partition(".")[0] in _MACHINERY


def _key(holder: dict[object, object], held: object) -> str:
    for key, value in holder.items():
        if value is held or key is held:
            return key_text(key)
    return "..."


def key_text(key: object) -> str:
    """Return a key as it is shown between brackets."""
    plain = isinstance(key, tuple) and all(isinstance(part, (str, int)) for part in key)
    shown = plain or isinstance(key, (str, int, bytes))
    text = repr(key) if shown else type(key).__name__
    return text if len(text) <= _KEY_LENGTH else f"{text[:_KEY_LENGTH]}..."


def _kind(holder: object) -> Sequence[str]:
    plain = heap.is_a(holder, (dict, list, tuple, set, types.CellType, types.MethodType))
    kind = f"{type(holder).__module__}.{type(holder).__qualname__}"
    return [] if plain else [f"an object of type {kind}: "]


def variable(name: str, function: str) -> str:
    """Return how a way begins that a variable leads to; `tidy` puts the function where it reads."""
    return f"{name}{_IN} in {function}{_IN}"


def tidy(path: str) -> str:
    """The way as one would type it: ``model.fc.weight``, ``cache['last'] in run (net.py:12)``."""
    path = _SHORT_MODULE.sub(r".\1", path).replace(": .", ": ")
    path = path.replace(": cached_result[0]", "")
    name, *rest = path.split(_IN)
    if not rest:
        return path
    function, way = rest
    steps, *others = _AFTER_VARIABLE.split(way, maxsplit=1)
    return "".join((name, steps, function, *others))
