"""The tensors that local variables of the running program lead to.

A function's variables are gone when the test is judged, and with them the way to a tensor that a
region left behind. So we note the way to each tensor where a test has the region checked, as plain
text, which keeps nothing alive. We walk the objects from the variables down, which is cheap; the
garbage collector would need far longer to find who refers to them.
"""

from __future__ import annotations

import _thread
import inspect
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final, TypeAlias

import torch

from pytest_torchmem.record.holders.paths import is_machinery, key_text, tidy
from pytest_torchmem.record.owners.autograd_graph import GraphReader
from pytest_torchmem.record.owners.live_objects import is_a
from pytest_torchmem.record.owners.ownership_log import quiet
from pytest_torchmem.record.owners.places import places_of

Place: TypeAlias = tuple[str, int]

OBJECTS: Final = 4000
"""So many are looked at; a large model's parameters are no news."""

_GRAPHS: Final = 16
_FRAMES: Final = 8
_OPAQUE: Final = (types.ModuleType, types.FunctionType, type, str, bytes, int, float)
_FUNCTION: Final = inspect.CO_OPTIMIZED | inspect.CO_NEWLOCALS


def places_in_local_variables() -> dict[Place, str]:
    """Return how one gets to storages from the variables of the functions that run, by place.

    It is empty where they cannot be looked at: nobody's test fails for that.
    """
    frames = list(_frames())
    found: list[dict[Place, str]] = []
    done = _thread.allocate_lock()
    done.acquire()

    def look() -> None:
        try:
            found.append(_places(frames))
        except Exception:
            found.append({})
        finally:
            done.release()

    # The Python tracer would make each of the many small calls four times as slow. It does not
    # follow into a thread that begins under it. `threading`, which our own watch of threads listens
    # to, is not told of it.
    try:
        _thread.start_new_thread(look, ())
    except RuntimeError:  # the system has no thread to spare
        return {}
    done.acquire()
    return found[0]


@quiet
def _places(frames: Iterable[types.FrameType]) -> dict[Place, str]:
    found: dict[Place, str] = {}
    graphs: list[tuple[torch.Tensor, str]] = []
    for frame in frames:
        function = frame.f_code.co_name
        for tensor, way in _tensors(_variables(frame)):
            by = f"{tidy(way)} in {function}"
            for place in places_of(tensor):
                found.setdefault(place, by)
            if tensor.is_leaf:
                for place in places_of(tensor.grad):
                    found.setdefault(place, f"{tidy(way)}.grad in {function}")
            elif len(graphs) < _GRAPHS:
                graphs.append((tensor, f"{by}, in its autograd graph"))
    reader = GraphReader()
    for tensor, by in graphs:
        holdings = reader.holdings([tensor])
        for held in (*holdings.saved, *holdings.leaves):
            for place in places_of(held):
                found.setdefault(place, by)
    return found


def _frames() -> Iterator[types.FrameType]:
    """The functions of the program, innermost first, up to the one that pytest called."""
    frame: types.FrameType | None = sys._getframe(1)
    count = 0
    while frame is not None and count < _FRAMES:
        module = frame.f_globals.get("__name__", "")
        if is_machinery(module):
            if count:
                return
        elif module != "contextlib" and frame.f_code.co_flags & _FUNCTION == _FUNCTION:
            count += 1
            yield frame
        frame = frame.f_back


def _variables(frame: types.FrameType) -> dict[str, object]:
    names = frame.f_locals
    # What pytest's assert statements put aside has names that nobody can type.
    variables = {name: value for name, value in names.items() if name.isidentifier()}
    # Before Python 3.13 a frame keeps the dict that it handed out, and with it what the function
    # has long deleted. Nobody but the frame, the name here and the call below may refer to it.
    if isinstance(names, dict) and sys.getrefcount(names) <= 3:
        names.clear()
    return variables


def _tensors(variables: dict[str, object]) -> Iterator[tuple[torch.Tensor, str]]:
    """Every tensor below some variables with the way to it, the shortest ways first."""
    waiting: deque[tuple[object, str]] = deque((value, name) for name, value in variables.items())
    seen: set[int] = set()
    while waiting and len(seen) < OBJECTS:
        thing, way = waiting.popleft()
        if id(thing) in seen or is_a(thing, _OPAQUE):
            continue
        seen.add(id(thing))
        if is_a(thing, torch.Tensor):
            yield thing, way
        elif not is_machinery(type(thing).__module__):
            waiting.extend((part, way + step) for part, step in _parts(thing))


def _parts(thing: object) -> Iterator[tuple[object, str]]:
    if is_a(thing, dict):
        yield from ((value, f"[{key_text(key)}]") for key, value in dict.items(thing))
    elif is_a(thing, (list, tuple)):
        yield from ((item, f"[{place}]") for place, item in enumerate(thing))
    else:
        try:
            attributes = object.__getattribute__(thing, "__dict__")
        except (AttributeError, TypeError):
            return
        if is_a(attributes, dict):
            yield from ((value, f".{name}") for name, value in dict.items(attributes))
