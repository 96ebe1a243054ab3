"""The code that a test can reach: a change of any other code is no cause of what it needs.

It is looked for only when a failure names what has changed, and in what Python holds of the test:
its function, the names in that function's code, what these stand for, and so on. A class counts
with all its methods, and a module's statements with whatever is used of it. So code counts that the
test does not run; code that is found by a text, such as a plugin's entry point, does not.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path, PurePosixPath
from types import CodeType, FunctionType, ModuleType
from typing import Final

import pytest

from pytest_torchmem.values.findings import CodeLines

_PARTS: Final = 200
"""So many things in a container are looked at."""

_MOST: Final = 20_000
"""So many things are looked at in all."""


def reached_by(
    item: pytest.Item, rootdir: Path, places: Sequence[CodeLines]
) -> Sequence[CodeLines]:
    """Return those of some places that a test can reach, in the order in which it does.

    A file of settings is reached where the text of code that is reached names it. All places are
    returned for what is no function of Python, such as a doctest.
    """
    function = getattr(item, "function", None)
    if not places or function is None:
        return places
    reach = _Reach(rootdir)
    reach.follow([function, getattr(item, "cls", None), *_fixtures(item)])
    found = [(when, place) for place in places if (when := reach.when(place)) is not None]
    return tuple(place for _, place in sorted(found, key=lambda pair: pair[0]))


def _fixtures(item: pytest.Item) -> Iterator[object]:
    info = getattr(item, "_fixtureinfo", None)
    for definitions in getattr(info, "name2fixturedefs", {}).values():
        yield from (definition.func for definition in definitions)


class _Reach:
    """The code below a folder that was reached, each with when."""

    def __init__(self, rootdir: Path) -> None:
        self._folder = str(rootdir.resolve()) + "/"
        self._seen: set[int] = set()
        self._kept: list[object] = []
        self._codes: dict[str, list[tuple[int, int, int]]] = {}
        self._modules: dict[str, int] = {}
        self._names: dict[int, set[str]] = {}

    def follow(self, start: Sequence[object]) -> None:
        """Reach all that some things lead to, the nearest first."""
        queue = deque(start)
        while queue and len(self._seen) < _MOST:
            thing = queue.popleft()
            if thing is None or id(thing) in self._seen:
                continue
            self._seen.add(id(thing))
            self._kept.append(thing)  # its id stays its own
            queue.extend(self._next(thing))

    def when(self, place: CodeLines) -> int | None:
        """Return when a place was reached, as a number that later ones exceed; None if never."""
        if not place.file.endswith(".py"):
            return self._when_named(place.file)
        if place.file not in self._modules:
            return None
        around = [c for c in self._codes.get(place.file, ()) if c[0] <= place.first <= c[1]]
        if around:
            return max(around)[2]  # the innermost function
        return None if self._is_unreached_function(place) else self._modules[place.file]

    def _when_named(self, file: str) -> int | None:
        path = PurePosixPath(file)
        spellings = (path.name, f'{path.stem}"', f"{path.stem}'")
        for name, when in self._modules.items():
            try:
                text = Path(self._folder, name).read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            if any(spelling in text for spelling in spellings):
                return when
        return None

    def _is_unreached_function(self, place: CodeLines) -> bool:
        """Return whether a place stands in a function of its file, which nothing leads to."""
        import ast

        try:
            tree = ast.parse(Path(self._folder, place.file).read_bytes())
        except (OSError, SyntaxError, ValueError):
            return False
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        return any(
            isinstance(node, functions) and node.lineno < place.first <= (node.end_lineno or 0)
            for node in ast.walk(tree)
        )

    def _next(self, thing: object) -> Iterator[object]:
        if isinstance(thing, (staticmethod, classmethod, functools.partial)):
            yield getattr(thing, "__func__", None) or getattr(thing, "func", None)
        elif isinstance(thing, property):
            yield from (thing.fget, thing.fset, thing.fdel)
        elif isinstance(thing, functools.cached_property):
            yield thing.func
        elif isinstance(thing, functools._lru_cache_wrapper):
            yield thing.__wrapped__
        elif inspect.ismethod(thing):
            yield from (thing.__func__, type(thing.__self__))
        elif isinstance(thing, FunctionType):
            yield from self._of_function(thing)
        elif isinstance(thing, type):
            yield from self._of_class(thing)
        elif isinstance(thing, dict):
            yield from islice(thing.values(), _PARTS)
        elif isinstance(thing, (list, tuple, set, frozenset)):
            yield from islice(thing, _PARTS)
        elif not isinstance(thing, (ModuleType, str, bytes, int, float, complex)):
            yield type(thing)

    def _of_function(self, function: FunctionType) -> Iterator[object]:
        yield function.__dict__.get("__wrapped__")
        for cell in function.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # not set yet
                continue
        file = self._own(function.__code__.co_filename)
        if not file:
            return
        self._note(file, function.__code__)
        names = set(_names(function.__code__))
        yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        yield from self._named(names, function.__globals__)

    def _named(self, names: set[str], scope: dict[str, object]) -> Iterator[object]:
        """Yield what names stand for, and what of modules is used by them."""
        for name in sorted(names):
            # What is not there may be imported in the function.
            thing = scope[name] if name in scope else sys.modules.get(name)
            if isinstance(thing, ModuleType):
                yield from self._of_module(thing, names)
            elif thing is not None:
                yield thing

    def _of_module(self, module: ModuleType, names: set[str]) -> Iterator[object]:
        file = self._own(vars(module).get("__file__") or "")
        if not file:
            return
        self._modules.setdefault(file, len(self._seen))
        asked = self._names.setdefault(id(module), set())
        new, inside = names - asked, vars(module)
        asked |= names
        for name in sorted(new & inside.keys()):
            thing = inside[name]
            if isinstance(thing, ModuleType):
                yield from self._of_module(thing, names)
            else:
                yield thing

    def _of_class(self, cls: type) -> Iterator[object]:
        module = sys.modules.get(cls.__module__)
        if module is None or not self._own(vars(module).get("__file__") or ""):
            return
        yield from cls.__mro__[1:]
        yield from vars(cls).values()

    def _note(self, file: str, code: CodeType) -> None:
        when = len(self._seen)
        self._modules.setdefault(file, when)
        lines = [line for _, _, line in code.co_lines() if line]
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                lines += [line for _, _, line in inner.co_lines() if line]
        last = max(lines, default=code.co_firstlineno)
        self._codes.setdefault(file, []).append((code.co_firstlineno, last, when))

    def _own(self, file: str) -> str:
        """Return a file of the project as places name it; ``""`` for any other."""
        if not file.startswith(self._folder) or "site-packages" in file:
            return ""
        return file[len(self._folder) :]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)
