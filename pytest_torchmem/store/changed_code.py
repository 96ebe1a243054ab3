"""The statements of a Python file that are not as they were, and that can change what others do.

Docstrings, comments and the layout of the code do nothing. What is only defined anew, such as a
test or a function, does nothing until other code uses it, and that code has changed, too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Final, TypeAlias

Lines: TypeAlias = frozenset[int]

# Has statements of its own below it.
_BRANCHES: Final = (ast.stmt, ast.ExceptHandler, ast.match_case)
_DEFINITIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_WORD: Final = re.compile(r"\w+|[^\w\s]")
_ALIKE: Final = 0.75
"""The share of their code that two functions must have in common."""
# What pytest and Python look for by its name.
_LOOKED_FOR: Final = ("pytest", "setup", "teardown", "__")


@dataclass(frozen=True, slots=True)
class _Statement:
    """A statement, without those below it.

    Attributes:
        key: The names of what it stands in, and its code.
        lines: The lines that it has for itself.
        names: What the statement of the module that it is, or stands in, defines.
        only_defines: That one does nothing else.
    """

    key: tuple[str, str]
    lines: range
    names: frozenset[str]
    only_defines: bool


#: All statements of a file, and those that the other side does not have.
_Side: TypeAlias = "tuple[list[_Statement], list[_Statement]]"


def changed_statements(was: str, now: str) -> tuple[Lines, Lines] | None:
    """Return the lines of what is gone, in the old code, and of what came, in the new one.

    None where one of them is no Python.
    """
    if (sides := _differing(was, now)) is None:
        return None
    (before, gone), (after, came) = sides
    return _telling(gone, after), _telling(came, before)


def edited_lines(was: str, now: str) -> tuple[Lines, Lines] | None:
    """Return what `changed_statements` does, with the lines of what is only defined anew."""
    if (sides := _differing(was, now)) is None:
        return None
    (_, gone), (_, came) = sides
    return _lines_of(gone), _lines_of(came)


def _differing(was: str, now: str) -> tuple[_Side, _Side] | None:
    try:
        before, after = list(_statements(was)), list(_statements(now))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    keys = ([s.key for s in before], [s.key for s in after])
    gone: list[_Statement] = []
    came: list[_Statement] = []
    for tag, start, stop, now_start, now_stop in SequenceMatcher(None, *keys, False).get_opcodes():
        if tag != "equal":
            gone += before[start:stop]
            came += after[now_start:now_stop]
    return (before, gone), (after, came)


def renamed_functions(was: str, now: str) -> dict[str, str]:
    """Return the new names of functions by their old ones, with classes as ``TestNet::test_step``.

    One that is gone is taken for one that came where most of their code is the same, and neither is
    as near to another one.
    """
    try:
        before, after = (dict(_functions(ast.parse(code), "")) for code in (was, now))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    gone, came = before.keys() - after.keys(), after.keys() - before.keys()
    shares = {
        (old, new): SequenceMatcher(None, before[old], after[new], False).ratio()
        for old in gone
        for new in came
    }
    alike = {pair: share for pair, share in shares.items() if share >= _ALIKE}
    return {
        old: new
        for (old, new), share in alike.items()
        if [p for p, s in alike.items() if s >= share and (p[0] == old or p[1] == new)]
        == [(old, new)]
    }


def _functions(node: ast.AST, within: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the functions of a module and of its classes, with the words of each but its name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{within}{child.name}::")
        elif isinstance(child, _DEFINITIONS):
            words = _WORD.findall(ast.unparse(child).replace(child.name, "", 1))
            yield f"{within}{child.name}", words


def _telling(statements: Iterable[_Statement], others: Sequence[_Statement]) -> Lines:
    other_names = frozenset[str]().union(*(other.names for other in others))
    return _lines_of(s for s in statements if not s.only_defines or s.names & other_names)


def _lines_of(statements: Iterable[_Statement]) -> Lines:
    return frozenset(line for statement in statements for line in statement.lines)


def _statements(code: str) -> Iterator[_Statement]:
    module = ast.parse(code)
    names = {node.id for node in ast.walk(module) if isinstance(node, ast.Name)}
    for top in module.body:
        if isinstance(top, (ast.Import, ast.ImportFrom)):
            for name in top.names:
                bound = (name.asname or name.name).partition(".")[0]
                text = f"{ast.dump(name)} {getattr(top, 'module', '')}"
                # Nobody uses the name of a module that is imported for what it does.
                only_defines = bound in names if isinstance(top, ast.Import) else bound != "*"
                yield _Statement(("", text), _lines(top, ()), frozenset({bound}), only_defines)
        else:
            yield from _definitions_below(top, "", *_defined(top))


def _definitions_below(
    node: ast.AST, within: str, names: frozenset[str], only_defines: bool
) -> Iterator[_Statement]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    below = [child for child in ast.iter_child_nodes(node) if isinstance(child, _BRANCHES)]
    own = {
        name: [] if isinstance(value, list) and any(child in below for child in value) else value
        for name, value in ast.iter_fields(node)
    }
    key = (within, ast.dump(type(node)(**own)))
    yield _Statement(key, _lines(node, below), names, only_defines)
    if isinstance(node, _DEFINITIONS):
        within = f"{within}.{node.name}"
    for child in below:
        yield from _definitions_below(child, within, names, only_defines)


def _lines(node: ast.AST, below: Sequence[ast.AST]) -> range:
    first, last = _first(node), getattr(node, "end_lineno", None) or _first(node)
    if below:
        last = max(first, _first(below[0]) - 1)
    return range(first, last + 1)


def _first(node: ast.AST) -> int:
    if isinstance(node, ast.match_case):
        return node.pattern.lineno
    lines: list[int] = [d.lineno for d in getattr(node, "decorator_list", ())]
    return min([*lines, getattr(node, "lineno", 1)])


def _defined(top: ast.stmt) -> tuple[frozenset[str], bool]:
    """Return the names that a statement of a module defines, and whether it does nothing else."""
    if isinstance(top, _DEFINITIONS):
        is_test = top.name.lower().startswith("test")
        is_plain = (is_test or not top.decorator_list) and not top.name.startswith(_LOOKED_FOR)
        return frozenset({top.name}), is_plain
    targets = top.targets if isinstance(top, ast.Assign) else [getattr(top, "target", None)]
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    is_plain = isinstance(top, (ast.Assign, ast.AnnAssign)) and len(names) == len(targets)
    does_more = any(name.startswith(_LOOKED_FOR) for name in names) or any(
        isinstance(node, ast.Call) for node in ast.walk(top)
    )
    return frozenset(names), is_plain and not does_more
