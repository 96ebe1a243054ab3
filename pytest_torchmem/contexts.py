"""Context managers without a generator: the one switch of Python's garbage collector, and others.

A recording has each call that Python makes: a generator would add its own to a small test's.
"""

from __future__ import annotations

import pathlib
import sys
from collections import ChainMap
from collections.abc import Callable
from contextlib import AbstractContextManager
from gc import disable, enable, isenabled
from itertools import chain
from operator import is_not
from types import ModuleType
from typing import Final, Generic, TypeAlias, TypeVar

_T = TypeVar("_T")


class Around(AbstractContextManager[_T], Generic[_T]):
    """Calls ``begin`` before the block, which gets what that returns, and ``end`` with it after."""

    def __init__(self, begin: Callable[[], _T], end: Callable[[_T], None]) -> None:
        self._begin, self._end = begin, end

    def __enter__(self) -> _T:
        self._value = self._begin()
        return self._value

    def __exit__(self, *raised: object) -> None:
        self._end(self._value)


def gc_paused() -> Around[bool]:
    """Keep the garbage collector from running on its own in the block.

    What is in a cycle when the body ends must still be there when somebody asks what holds it.
    """
    return Around(pause_gc, resume_gc)


def pause_gc() -> bool:
    """Begin what `gc_paused` does; return what `resume_gc` needs."""
    was_enabled = isenabled()
    disable()
    return was_enabled


def resume_gc(was_enabled: bool) -> None:
    """End it."""
    if was_enabled:
        enable()


_MISSING: Final = object()
# Its modules as they were when it was first needed.
_numpy: Final[dict[str, ModuleType]] = {}


def numpy_in_place() -> Around[dict[str, object]]:
    """Have numpy in ``sys.modules`` in the block, and what a test has put there again after it.

    A test may take it out, or put None in its place, to see what happens where numpy is not
    installed. Numpy imports parts of itself when they are first called, and cannot be loaded twice.
    """
    return Around(_put_numpy_back, _leave_modules)


def _put_numpy_back() -> dict[str, object]:
    now = sys.modules.get("numpy")
    if not _numpy and now is not None:
        names = [name for name in list(sys.modules) if name.partition(".")[0] == "numpy"]
        _numpy.update((name, sys.modules[name]) for name in names)
    if now is _numpy.get("numpy"):
        return {}
    left = {name: sys.modules.get(name, _MISSING) for name in _numpy}
    sys.modules.update(_numpy)
    return left


def _leave_modules(left: dict[str, object]) -> None:
    for name, module in left.items():
        if module is _MISSING:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = module  # type: ignore[assignment]


_BORROWED: Final = (
    *("builtins", "gc", "inspect", "io", "json", "linecache", "numpy", "os", "os.path"),
    *("pathlib", "platform", "subprocess", "tempfile", "threading", "time", "weakref", "zlib"),
)

# Where each was, and what the test has put there.
_Replaced: TypeAlias = list[tuple[ModuleType | type, str, object]]


class Originals:
    """The functions of other libraries, as they are between two tests.

    A test replaces some for its body, such as ``os.path.exists``, ``open`` or ``time.monotonic``,
    and its fixtures put them back when the body has been judged. What we do meanwhile must not
    call the test's.
    """

    def __init__(self) -> None:
        self._functions: dict[ModuleType | type, dict[str, object]] = {}
        self._lookups: list[Callable[[str, object], object]] = []
        self._values: list[object] = []
        self._are_back = False

    def note(self) -> None:
        """Note the functions of libraries that were imported since the last time."""
        modules = (sys.modules[name] for name in _BORROWED if name in sys.modules)
        owners: tuple[ModuleType | type, ...] = (*modules, pathlib.PurePath, pathlib.Path)
        for owner in owners:
            if owner not in self._functions:
                # What a class inherits is replaced in the class itself.
                places = owner.__mro__[:-1] if isinstance(owner, type) else (owner,)
                self._functions[owner] = {
                    name: value
                    for name, value in ChainMap(*(dict(vars(place)) for place in places)).items()
                    if (callable(value) or isinstance(value, classmethod | staticmethod | property))
                }
                self._lookups.append(owner.__dict__.get)
                self._values += self._functions[owner].values()

    def back(self) -> Around[_Replaced | None]:
        """Have them in their places in the block, and what took these places again after it.

        Within such a block nothing is done: no code of the test's runs there.
        """
        return Around(self._put_back, self._replace_again)

    def _put_back(self) -> _Replaced | None:
        if self._are_back:
            return None
        replaced = self._replaced()
        for owner, name, _ in replaced:
            setattr(owner, name, self._functions[owner][name])
        self._are_back = True
        return replaced

    def _replace_again(self, replaced: _Replaced | None) -> None:
        if replaced is not None:
            self._are_back = False
            for owner, name, value in replaced:
                setattr(owner, name, value)

    def _replaced(self) -> _Replaced:
        # At a body's end the profiler still runs. It records each call that Python makes, and none
        # that C makes: one for each function would be more than a small test has.
        noted = self._functions.values()
        now = chain.from_iterable(map(map, self._lookups, noted, map(dict.values, noted)))
        if not any(map(is_not, now, self._values)):
            return []
        return [
            (owner, name, value)
            for owner, functions in self._functions.items()
            for name, function in functions.items()
            if (value := owner.__dict__.get(name, function)) is not function
        ]


#: The originals of this process.
ORIGINALS: Final = Originals()


class OwnModules:
    """The modules of this package that were imported so far.

    A test may take them out of ``sys.modules``: one that isolates its imports with
    ``mock.patch.dict(sys.modules)`` takes out what was imported meanwhile. A second copy of them
    would know nothing of what the first has noted.
    """

    def __init__(self) -> None:
        self._modules: dict[str, ModuleType] = {}
        self._count = 0

    def put_back(self) -> None:
        """Have each in ``sys.modules`` again, and note those that are new there."""
        sys.modules.update(self._modules)
        if len(sys.modules) != self._count:
            package = __name__.partition(".")[0]
            names = [name for name in list(sys.modules) if name.partition(".")[0] == package]
            self._modules.update((name, sys.modules[name]) for name in names)
            self._count = len(sys.modules)
