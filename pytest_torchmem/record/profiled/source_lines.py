"""Lines of operators that were written as Python operators.

A call leaves an event that says on which line it stands. ``x + y`` calls nothing that the Python
tracer sees, so such an operator is known only to lie between the calls before and after it. The
source of the function then says on which of these lines an operator of that kind stands.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

_BINARY: Final[dict[type[ast.operator], tuple[str, ...]]] = {
    ast.Add: ("add",),
    ast.Sub: ("sub", "rsub"),
    ast.Mult: ("mul",),
    ast.MatMult: ("matmul",),
    ast.Div: ("div", "true_divide", "reciprocal"),
    ast.FloorDiv: ("floor_divide",),
    ast.Mod: ("remainder",),
    ast.Pow: ("pow",),
    ast.BitAnd: ("bitwise_and", "__and__"),
    ast.BitOr: ("bitwise_or", "__or__"),
    ast.BitXor: ("bitwise_xor", "__xor__"),
}
_COMPARED: Final[dict[type[ast.cmpop], str]] = {
    ast.Eq: "eq",
    ast.NotEq: "ne",
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
}
_UNARY: Final[dict[type[ast.unaryop], str]] = {ast.USub: "neg", ast.Invert: "bitwise_not"}
_COMPREHENSIONS: Final = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
# Python 3.12 runs the others in the frame of their function.
_OWN_FRAMES: Final = _COMPREHENSIONS if sys.version_info < (3, 12) else (ast.GeneratorExp,)
_SUBSCRIPT: Final = ("select", "slice", "index", "index_put_", "copy_", "fill_", "unsqueeze")


@dataclass(frozen=True, slots=True)
class OperatorLine:
    """A Python operator in a function: its line, and the operators of torch it may become."""

    line: int
    operators: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FunctionLines:
    """A function's Python operators in the order of its source, and the lines of its loops."""

    operators: tuple[OperatorLine, ...] = ()
    loops: tuple[tuple[int, int], ...] = ()


def operator_lines(
    function: FunctionLines, operators: Sequence[str], after: int, before: int
) -> list[int]:
    """Lines of ``operators`` (``aten::add``, in the order they ran) within one function.

    ``after`` and ``before`` are the lines of the calls around, 0 where there is none. An operator
    that the source does not explain gets the line of the call before it.
    """
    ahead = _between(function, after, before)
    lines = []
    line = after
    names = [{short, short.rstrip("_")} for short in (o.rpartition("::")[2] for o in operators)]
    for number in range(len(names)):
        # A loop turns where that explains more of what comes next than going on does. An operator
        # that is not found, as that of ``x.T``, leaves all candidates to those after it.
        ways = [(c, _run(c, names, number)) for c in (ahead, *_turns(function, line, before))]
        candidates, places = max(ways, key=lambda way: len(way[1]))
        if places:
            line, ahead = candidates[places[0]].line, candidates[places[0] + 1 :]
        lines.append(line)
    return lines


def _run(candidates: Sequence[OperatorLine], names: Sequence[set[str]], number: int) -> list[int]:
    """Return the places of the operators that run from ``number`` on, up to one not among them."""
    places: list[int] = []
    remaining = enumerate(candidates)
    for following in range(number, len(names)):
        place = next(
            (p for p, c in remaining if not names[following].isdisjoint(c.operators)), None
        )
        if place is None:
            break
        places.append(place)
    return places


def _turns(function: FunctionLines, line: int, before: int) -> Iterator[list[OperatorLine]]:
    """The operators from the head of each loop around a line, the innermost first."""
    last = before or max((c.line for c in function.operators), default=0)
    for begin, end in sorted(function.loops, reverse=True):
        if begin <= line <= end:
            yield [c for c in function.operators if begin <= c.line <= max(end, last)]


def _between(function: FunctionLines, after: int, before: int) -> list[OperatorLine]:
    """The operators that can run between two calls, in the order they would.

    Where both calls stand in one loop, it may have turned between them: then the rest of the loop
    comes first, and its beginning up to the second call after that.
    """
    operators = function.operators
    straight = [c for c in operators if after <= c.line <= (before or c.line)]
    around = [(b, e) for b, e in function.loops if b <= before <= e and b <= after <= e]
    if not around or before > after:
        return straight
    begin, end = max(around)
    rest = [c for c in operators if after <= c.line <= end and c not in straight]
    return straight + rest + [c for c in operators if begin <= c.line <= before]


def functions_of(path: str) -> dict[int, FunctionLines]:
    """Return the functions of a source, as it is now, by the line that their code begins on."""
    if path.startswith("<"):
        # Code that was generated and never written to a file is known to linecache.
        return _parsed(path, "".join(linecache.getlines(path)))
    try:
        return _parsed(path, Path(path).stat().st_mtime_ns)
    except OSError:
        return {}


@lru_cache(maxsize=64)
def _parsed(path: str, version: str | int) -> dict[int, FunctionLines]:
    """Parse a source; ``version`` is its text, or the time at which its file was written last."""
    try:
        tree = ast.parse(version if isinstance(version, str) else Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        # Moved since, or no Python; the lines of the calls around have to do.
        return {}
    functions: dict[int, FunctionLines] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            functions[first] = FunctionLines(
                tuple(o for child in node.body for o in _operators(child)), tuple(_loops(node))
            )
        elif isinstance(node, (ast.Lambda, *_COMPREHENSIONS)):
            # Several may begin on one line, and Python names them by it alone.
            lines = functions.get(node.lineno, FunctionLines())
            parts = [node.body] if isinstance(node, ast.Lambda) else ast.iter_child_nodes(node)
            operators = (o for part in parts for o in _operators(part))
            functions[node.lineno] = FunctionLines(
                (*lines.operators, *operators), (*lines.loops, *_loops(node))
            )
    return functions


def _loops(function: ast.AST) -> Iterator[tuple[int, int]]:
    for node in ast.walk(function):
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While, *_COMPREHENSIONS)):
            yield node.lineno, node.end_lineno or node.lineno


def _operators(node: ast.AST) -> Iterator[OperatorLine]:
    """The operators below a node in the order they run: operands first."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
        return
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, _OWN_FRAMES):
        # The function itself works out what the first loop goes over, and nothing else.
        children = [node.generators[0].iter]
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) and node.value is not None:
        # What is assigned is worked out before the place it goes to.
        children = [node.value, *(c for c in children if c is not node.value)]
    for child in children:
        yield from _operators(child)
    if isinstance(node, (ast.BinOp, ast.AugAssign)):
        yield OperatorLine(node.lineno, _BINARY.get(type(node.op), ()))
    elif isinstance(node, ast.UnaryOp):
        yield OperatorLine(node.lineno, (_UNARY.get(type(node.op), ""),))
    elif isinstance(node, ast.Compare):
        yield OperatorLine(node.lineno, tuple(_COMPARED.get(type(o), "") for o in node.ops))
    elif isinstance(node, ast.Subscript):
        yield OperatorLine(node.lineno, _SUBSCRIPT)
