"""The code that a test can reach: a change of any other code is no cause of what it needs.

It is looked for only when a failure names what has changed, and in what Python holds of the test:
its function, the names in that function's code, what these stand for, and so on. A class counts
with all its methods. A statement of a module counts where it makes a name that is reached, also
where another module imports that name; what it uses itself as the module is imported is reached,
too. A statement that makes no name may set anything: it counts where its module was imported. So
code counts that the test does not run; code that is found by a text, such as a plugin's entry
point, does not.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from pathlib import Path, PurePosixPath
from types import CodeType, FunctionType, ModuleType
from typing import Final

import pytest

from pytest_torchmem.plugin.item.module_code import ModuleCode
from pytest_torchmem.values.findings import CodeLines

_PARTS: Final = 200
"""So many things in a container are looked at."""

_MOST: Final = 20_000
"""So many things are looked at in all."""


def reached_by(
    item: pytest.Item, rootdir: Path, places: Sequence[CodeLines]
) -> Sequence[CodeLines]:
    """Return those of some places that a test can reach, in the order in which it does.

    A file of settings is reached where the text of lines that are reached names it. All places are
    returned for what is no function of Python, such as a doctest.
    """
    function = getattr(item, "function", None)
    if not places or function is None:
        return places
    reach = _Reach(rootdir)
    info = getattr(item, "_fixtureinfo", None)
    fixtures = chain.from_iterable(getattr(info, "name2fixturedefs", {}).values())
    reach.follow([function, getattr(item, "cls", None), *(fixture.func for fixture in fixtures)])
    for plugin in item.config.pluginmanager.get_plugins():
        path = Path(_file_of(plugin)) if isinstance(plugin, ModuleType) else Path()
        if path.name == "conftest.py" and item.path.is_relative_to(path.parent):
            reach.follow_hooks(plugin)
    reached_places = [(when, place) for place in places if (when := reach.when(place)) is not None]
    return tuple(place for _, place in sorted(reached_places, key=lambda pair: pair[0]))


@dataclass(frozen=True, slots=True, eq=False)
class _Uses:
    """Names that code of a module uses."""

    names: frozenset[str]
    scope: dict[str, object]


class _Reach:
    """The code below a folder that was reached, each with when."""

    def __init__(self, rootdir: Path) -> None:
        self._folder = str(rootdir.resolve()) + "/"
        self._seen_ids: set[int] = set()
        self._seen_things: list[object] = []
        self._codes: dict[str, list[tuple[int, int, int]]] = {}
        self._modules: dict[str, int] = {}
        self._statements: dict[tuple[str, int], int] = {}
        self._names: dict[int, set[str]] = {}
        self._code: dict[str, ModuleCode] = {}

    def follow(self, start: Sequence[object]) -> None:
        """Reach all that some things lead to, the nearest first."""
        queue = deque(start)
        while queue and len(self._seen_ids) < _MOST:
            thing = queue.popleft()
            if thing is None or id(thing) in self._seen_ids:
                continue
            self._seen_ids.add(id(thing))
            self._seen_things.append(thing)  # its id stays its own
            queue.extend(self._next(thing))

    def follow_hooks(self, module: ModuleType) -> None:
        """Reach what a module of pytest's does as it is imported, and in its hooks."""
        inside = vars(module)
        if file := self._own(_file_of(module)):
            self._note_module(file, inside)
            self.follow([inside[name] for name in inside if name.startswith("pytest_")])

    def when(self, place: CodeLines) -> int | None:
        """Return when a place was reached, as a number that later ones exceed; None if never."""
        if not place.file.endswith(".py"):
            return self._when_named(place.file)
        if place.file not in self._modules:
            return None
        around = [c for c in self._codes.get(place.file, ()) if c[0] <= place.first <= c[1]]
        if around:
            return max(around)[2]  # the innermost function
        code = self._code[place.file]
        if code.is_in_function(place.first):
            return None
        statement = code.at(place.first)
        # Lines that are gone may have been a statement of their own.
        if statement is None or statement.has_effect or place.last < place.first:
            return self._modules[place.file]
        return self._statements.get((place.file, statement.first))

    def _when_named(self, file: str) -> int | None:
        path = PurePosixPath(file)
        spellings = (path.name, f'{path.stem}"', f"{path.stem}'")
        for name, first, last, when in self._lines_by_when():
            lines = self._code[name].lines[first - 1 : last]
            if any(spelling in line for line in lines for spelling in spellings):
                return when
        return None

    def _lines_by_when(self) -> list[tuple[str, int, int, int]]:
        """Return the lines of functions and statements that were reached, the nearest first."""
        codes = [(file, *lines) for file, some in self._codes.items() for lines in some]
        for (file, first), when in self._statements.items():
            statement = self._code[file].at(first)
            codes.append((file, first, statement.last if statement else first, when))
        return sorted(codes, key=lambda lines: lines[3])

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
        elif isinstance(thing, _Uses):
            yield from self._used_things(thing)
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
        scope = function.__globals__
        self._note_module(file, scope)
        self._note(file, function.__code__)
        yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        statement = self._code[file].at(function.__code__.co_firstlineno)
        for name in statement.makes if statement else ():
            yield from self._makers(file, name, scope)
        yield _Uses(frozenset(_names(function.__code__)), scope)

    def _used_things(self, uses: _Uses) -> Iterator[object]:
        """Yield what names stand for, and what of modules is used by them."""
        for name in sorted(uses.names):
            # What is not there may be imported in the function.
            thing = uses.scope[name] if name in uses.scope else sys.modules.get(name)
            if name in uses.scope:
                yield from self._of_name(name, uses.scope)
            if isinstance(thing, ModuleType):
                yield from self._of_module(thing, uses.names)

    def _of_module(self, module: ModuleType, names: frozenset[str]) -> Iterator[object]:
        members = vars(module)
        file = self._own(_file_of(module))
        if not file:
            return
        self._note_module(file, members)
        names_asked = self._names.setdefault(id(module), set())
        new = names - names_asked
        names_asked |= names
        for name in sorted(new & members.keys()):
            thing = members[name]
            if isinstance(thing, ModuleType):
                yield from self._of_module(thing, names)
            else:
                yield from self._of_name(name, members)

    def _of_name(self, name: str, scope: dict[str, object]) -> Iterator[object]:
        """Yield what a name of a module stands for, and what the statements use that make it."""
        visited: set[tuple[str, str]] = set()
        while (file := self._own(str(scope.get("__file__") or ""))) and (file, name) not in visited:
            visited.add((file, name))
            self._note_module(file, scope)
            yield from self._makers(file, name, scope)
            for origin in self._code[file].origins(name):
                module = sys.modules.get(origin.module)
                if module and origin.name in vars(module):
                    name, scope = origin.name, vars(module)
                    break
        yield scope.get(name)

    def _makers(self, file: str, name: str, scope: dict[str, object]) -> Iterator[object]:
        for statement in self._code[file].makers(name):
            if (file, statement.first) not in self._statements:
                self._statements[file, statement.first] = len(self._seen_ids)
                yield _Uses(statement.uses, scope)

    def _of_class(self, cls: type) -> Iterator[object]:
        module = sys.modules.get(cls.__module__)
        file = self._own(_file_of(module)) if module else ""
        if module is None or not file:
            return
        self._note_module(file, vars(module))
        yield from self._makers(file, cls.__qualname__.partition(".")[0], vars(module))
        yield from cls.__mro__[1:]
        yield from vars(cls).values()

    def _note_module(self, file: str, scope: Mapping[str, object]) -> None:
        """Note that a module was imported, with all that it imports."""
        waiting = [(file, scope)]
        while waiting:
            file, scope = waiting.pop()
            if file in self._modules:
                continue
            self._modules[file] = len(self._seen_ids)
            package = str(scope.get("__package__") or "")
            code = self._code[file] = ModuleCode.read(Path(self._folder, file), package)
            names = (str(scope.get("__name__") or ""), *code.imported_modules)
            parts = {part for text in names for part in accumulate(text.split("."), "{}.{}".format)}
            modules = [module for part in parts if (module := sys.modules.get(part))]
            waiting += ((own, vars(m)) for m in modules if (own := self._own(_file_of(m))))

    def _note(self, file: str, code: CodeType) -> None:
        when = len(self._seen_ids)
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


def _file_of(module: ModuleType) -> str:
    return str(vars(module).get("__file__") or "")


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names in a function's code, and its texts that may be names, as for `getattr`."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            yield constant
