"""The tensors that local variables of the running program lead to.

A function's variables are gone when the test is judged, and with them the way to a tensor that a
region left behind. So we note the way to each tensor where a test has the region checked, as plain
text, which keeps nothing alive. We walk the objects from the variables down, which is cheap; the
garbage collector would need far longer to find who refers to them.
"""

from __future__ import annotations

import _thread
import functools
import inspect
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final, TypeAlias

import torch

from pytest_torchmem.record.heap import is_a, referents, running_frames, variables_of
from pytest_torchmem.record.holders import paths
from pytest_torchmem.record.holders.search import Place, ways_in_garbage, young_garbage
from pytest_torchmem.record.owners.autograd_graph import graph_holdings
from pytest_torchmem.record.owners.places import answers, places_of
from pytest_torchmem.record.patches.quiet import quiet
from pytest_torchmem.record.torch_api import autograd

Ways: TypeAlias = dict[Place, str]

OBJECTS: Final = 4000
"""So many are looked at; a large model's parameters are no news."""

_GRAPHS: Final = 16
_FRAMES: Final = 8
_OPAQUE: Final = (types.ModuleType, type, str, bytes, int, float)
_FUNCTION: Final = inspect.CO_OPTIMIZED | inspect.CO_NEWLOCALS


def places_held_now() -> tuple[Ways, Ways]:
    """Return the way to each storage, by its place: from the variables of running functions, and
    from what closes a cycle that nobody else refers to.

    Both are empty where the search raises an error: no test fails because of it.
    """
    frames = list(_frames())
    answers: list[tuple[Ways, Ways]] = []
    finished = _thread.allocate_lock()
    finished.acquire()

    def look() -> None:
        try:
            answers.append((_places(frames), _in_garbage()))
        except Exception:
            answers.append(({}, {}))
        finally:
            # The thread may end long after we have gone on. If it kept the frames, nobody would
            # see their variables die.
            frames.clear()
            finished.release()

    # On this thread the Python tracer would make each of many small calls four times as slow; it
    # does not follow into a new one. Our own watch of threads listens to `threading`, and does not
    # see a thread that `_thread` starts.
    try:
        _thread.start_new_thread(look, ())
    except RuntimeError:  # the system has no thread to spare
        return {}, {}
    finished.acquire()
    return answers[0]


@quiet
def _in_garbage() -> Ways:
    return ways_in_garbage(young_garbage())


@quiet
def _places(frames: Iterable[types.FrameType]) -> Ways:
    ways: Ways = {}
    graphs: list[tuple[torch.Tensor, str]] = []
    for frame in frames:
        for tensor, way in _tensors(_variables(frame), frame.f_code.co_name):
            by = paths.tidy(way)
            for place in places_of(tensor):
                ways.setdefault(place, by)
            if autograd.is_leaf(tensor):
                for place in places_of(autograd.gradient_of(tensor)):
                    ways.setdefault(place, paths.tidy(f"{way}.grad"))
            elif len(graphs) < _GRAPHS:
                graphs.append((tensor, f"{by}, in its autograd graph"))
    for tensor, by in graphs:
        holdings = graph_holdings([tensor])
        for held in (*holdings.saved, *holdings.leaves):
            for place in places_of(held):
                ways.setdefault(place, by)
    return ways


def _frames() -> Iterator[types.FrameType]:
    """The functions of the program, innermost first, up to the one that pytest called."""
    frame: types.FrameType | None = sys._getframe(1)
    count = 0
    while frame is not None and count < _FRAMES:
        module = frame.f_globals.get("__name__", "")
        if paths.is_machinery(module):
            if count:
                return
        elif module != "contextlib" and frame.f_code.co_flags & _FUNCTION == _FUNCTION:
            count += 1
            yield frame
        frame = frame.f_back


def _variables(frame: types.FrameType) -> dict[str, object]:
    # What pytest's assert statements put aside has names that nobody can type.
    return {name: value for name, value in variables_of(frame).items() if name.isidentifier()}


def _tensors(variables: dict[str, object], function: str) -> Iterator[tuple[torch.Tensor, str]]:
    """Every tensor below a function's variables with the way to it, the shortest ways first."""
    waiting: deque[tuple[object, str]] = deque(
        (value, paths.variable(name, function)) for name, value in variables.items()
    )
    seen_ids: set[int] = set()
    while waiting and len(seen_ids) < OBJECTS:
        thing, way = waiting.popleft()
        if id(thing) in seen_ids or is_a(thing, _OPAQUE):
            continue
        seen_ids.add(id(thing))
        if is_a(thing, torch.Tensor):
            if answers(thing):
                yield thing, way
        elif not paths.is_machinery(type(thing).__module__):
            waiting.extend((part, way + step) for part, step in _parts(thing))


def _parts(thing: object) -> Iterator[tuple[object, str]]:
    """Yield what an object holds, each with the step that leads there."""
    if is_a(thing, dict):
        yield from ((value, f"[{paths.key_text(key)}]") for key, value in dict.items(thing))
    elif is_a(thing, (list, tuple, deque)):
        yield from ((item, f"[{place}]") for place, item in enumerate(thing))
    elif is_a(thing, (set, frozenset)):
        yield from ((item, "") for item in list(thing))
    elif is_a(thing, types.FunctionType):
        cells = zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True)
        for name, cell in cells:
            # A cell that is empty yet refers to nothing.
            yield from ((value, f", its variable {name!r}") for value in referents(cell))
    elif is_a(thing, types.MethodType):
        yield from ((thing.__self__, ".__self__"), (thing.__func__, ""))
    elif is_a(thing, functools.partial):
        yield from ((thing.func, ".func"), (thing.args, ".args"), (thing.keywords, ".keywords"))
    else:
        if is_a(thing, BaseException):
            yield from _in_frames(thing)
        yield from ((value, f".{name}") for name, value in paths.attributes_of(thing).items())


def _in_frames(error: BaseException) -> Iterator[tuple[object, str]]:
    """The variables of the functions that an exception ended, and the exceptions before it."""
    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        # A frame that somebody runs has been looked at by itself.
        is_over = frame not in running_frames()
        if is_over and not paths.is_machinery(frame.f_globals.get("__name__", "")):
            way = f", frame of {paths.place_of_frame(frame)}: "
            yield from ((value, way + name) for name, value in _variables(frame).items())
        traceback = traceback.tb_next
    yield error.__cause__, ".__cause__"
    yield error.__context__, ".__context__"
