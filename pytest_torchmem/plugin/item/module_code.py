"""The statements of a module: the names that each makes as it is imported, and those it uses."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import resolve_name
from pathlib import Path
from typing import Final

_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
# What pytest and Python look for by its name.
_LOOKED_FOR: Final = ("pytest", "setup", "teardown", "__")
_DEFINITIONS: Final = (*_FUNCTIONS, ast.ClassDef)


@dataclass(frozen=True, slots=True)
class ModuleStatement:
    """A statement of a module.

    Attributes:
        first: Its first line, that of a decorator too.
        makes: The names of the module that it makes or changes.
        uses: The names that it needs as the module is imported.
        has_effect: It makes no name that other code has to use: a call, a setting of torch's.
    """

    first: int
    last: int
    makes: frozenset[str]
    uses: frozenset[str]
    has_effect: bool


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of an imported name; ``name`` is ``""`` for a module itself, ``*`` for all."""

    module: str
    name: str


@dataclass(frozen=True)
class ModuleCode:
    """A module as its file has it.

    Attributes:
        package: The package that its relative imports begin at.
    """

    tree: ast.Module = field(default_factory=lambda: ast.Module([], []))
    lines: tuple[str, ...] = ()
    package: str = ""

    @classmethod
    def read(cls, path: Path, package: str) -> ModuleCode:
        """Read a file; without statements where that is no Python."""
        try:
            text = path.read_bytes()
            lines = text.decode("utf-8", "replace").splitlines()
            return cls(ast.parse(text), tuple(lines), package)
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            return cls()

    @cached_property
    def statements(self) -> tuple[ModuleStatement, ...]:
        imported = frozenset(name for name, _ in self._imported)
        return tuple(_statement(node, imported) for node in self.tree.body)

    def at(self, line: int) -> ModuleStatement | None:
        return next((s for s in self.statements if s.first <= line <= s.last), None)

    def makers(self, name: str) -> Iterator[ModuleStatement]:
        """Yield the statements that make or change what a name stands for."""
        yield from (s for s in self.statements if name in s.makes)

    def is_in_function(self, line: int) -> bool:
        """True where a line runs only as its function is called."""
        return any(first <= line <= last for first, last in self._bodies)

    def origins(self, name: str) -> Iterator[Origin]:
        """Yield where a name may have been imported from."""
        imported = self.imports.get(name)
        if imported:
            yield imported
        elif not any(self.makers(name)):
            stars = (origin for _, origin in self._imported if origin.name == "*")
            yield from (Origin(star.module, name) for star in stars)

    @cached_property
    def imports(self) -> Mapping[str, Origin]:
        return {name: origin for name, origin in self._imported if origin.name != "*"}

    @cached_property
    def imported_modules(self) -> frozenset[str]:
        """The names of all modules that it imports as it is imported."""
        return frozenset(origin.module for _, origin in self._imported)

    @cached_property
    def _bodies(self) -> tuple[tuple[int, int], ...]:
        return tuple(
            (node.body[0].lineno, node.end_lineno or node.lineno)
            for node in ast.walk(self.tree)
            if isinstance(node, _FUNCTIONS)
        )

    @cached_property
    def _imported(self) -> tuple[tuple[str, Origin], ...]:
        origins: list[tuple[str, Origin]] = []
        for node in _at_import(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    bound = alias.asname or alias.name.partition(".")[0]
                    origins.append((bound, Origin(alias.name if alias.asname else bound, "")))
                    origins.append((alias.name, Origin(alias.name, "")))
            elif isinstance(node, ast.ImportFrom):
                module = self._absolute(node)
                origins += ((a.asname or a.name, Origin(module, a.name)) for a in node.names)
        return tuple(origins)

    def _absolute(self, node: ast.ImportFrom) -> str:
        name = f"{'.' * node.level}{node.module or ''}"
        try:
            return resolve_name(name, self.package)
        except (ImportError, ValueError):
            return ""


def _statement(node: ast.stmt, imported: frozenset[str]) -> ModuleStatement:
    decorators = [d.lineno for d in getattr(node, "decorator_list", ())]
    first = min([node.lineno, *decorators])
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        bound = frozenset((a.asname or a.name).partition(".")[0] for a in node.names)
        return ModuleStatement(first, node.end_lineno or first, bound, frozenset(), False)
    # What it changes of another module is a setting of that.
    makes = _bound(node) - imported
    parts = list(_at_import(node))
    uses = {n.id for n in parts if isinstance(n, ast.Name)}
    uses |= {n.attr for n in parts if isinstance(n, ast.Attribute)}
    is_script = isinstance(node, ast.If) and "__name__" in {
        n.id for n in ast.walk(node.test) if isinstance(n, ast.Name)
    }
    has_effect = not is_script and (not makes or any(m.startswith(_LOOKED_FOR) for m in makes))
    return ModuleStatement(
        first, node.end_lineno or first, makes, frozenset(uses - makes), has_effect
    )


def _bound(node: ast.stmt) -> frozenset[str]:
    """Return the names that a statement makes or changes: ``a``, ``a.b = c``, ``a["b"] = c``."""
    if isinstance(node, _DEFINITIONS):
        return frozenset({node.name})
    names: set[str] = set()
    for part in _at_import(node):
        if isinstance(part, _DEFINITIONS):
            names.add(part.name)
        elif isinstance(part, (ast.Name, ast.Attribute, ast.Subscript)):
            names.add("" if isinstance(part.ctx, ast.Load) else _base(part))
    return frozenset(names - {""})


def _base(target: ast.expr) -> str:
    while isinstance(target, (ast.Attribute, ast.Subscript)):
        target = target.value
    return target.id if isinstance(target, ast.Name) else ""


def _at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and those below it that run as the module is imported."""
    yield node
    if isinstance(node, _FUNCTIONS):
        children: list[ast.AST] = [*node.decorator_list, *node.args.defaults]
        children += filter(None, node.args.kw_defaults)
    else:
        children = list(ast.iter_child_nodes(node))
    for child in children:
        yield from _at_import(child)
