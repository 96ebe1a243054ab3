"""What a program does with values that it has read: it shows them, or it decides by them.

A number has no trace of where it came from. So the program's text is read: from the place where it
was read its uses are followed through names of the function, and through what functions return.

    total += loss.item()                     shown: nothing but sums
    print(total / steps)
    while (x - y).norm().item() > 1e-3:      decides how often the loop runs
    if loss.item() < best: best = ...        a record: no other memory follows
"""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import dropwhile, islice
from types import CodeType, UnionType
from typing import Final

#: A code that ran and the place of the instruction in it, as a frame has both.
Frame = tuple[CodeType, int]

_Def = ast.FunctionDef | ast.AsyncFunctionDef
_Function = _Def | ast.Lambda
_Simple = ast.Expr | ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Return

# Names of functions that show what they are given, or end the test.
_SHOWS: Final = re.compile(
    r"p?print|repr|str|format|(\w+_)?log(_\w+)?|warn(ing)?|info|debug|error|critical|exception|write"
    r"|add_scalars?|set_(postfix|description)(_str)?|record_property|exit|fail|skip"
)
_ADDS: Final = {"append", "add", "extend", "insert", "update", "appendleft"}
_CONVERTS: Final = {"int", "round", "ceil", "floor", "trunc"}
# The host reads by these: what they return is what was read.
_READS: Final = {
    *("item", "tolist", "cpu", "to", "numpy", "is_nonzero", "equal", "allclose"),
    *("print", "str", "repr", "format"),
}
# A result of these is one more value of the kind that they are given.
_COMPUTES: Final = {
    *(
        "float",
        "bool",
        "abs",
        "min",
        "max",
        "sum",
        "sorted",
        "list",
        "tuple",
        "set",
        "zip",
        "any",
        "all",
    ),
    *("enumerate", "reversed", "pow", "divmod", "complex", "iter", "next"),
}
_OF_NUMBERS: Final = {"math", "np", "numpy", "statistics"}
_MODULES: Final = {*_OF_NUMBERS, "torch"}
_FINITE: Final = {"isnan", "isinf", "isfinite"}
_OF_SIZES: Final = re.compile(r"zeros|ones|empty|full|rand\w*|arange|linspace|eye|range|islice")
_FILTERS: Final = {"nonzero", "flatnonzero", "argwhere", "where", "extract", "compress", "unique"}
_BACK: Final = {"tensor", "as_tensor", "from_numpy", "to", "cuda"}
# What is the same for whatever values.
_DESCRIBES: Final = {
    "shape",
    "dtype",
    "device",
    "ndim",
    "size",
    "numel",
    "dim",
    "requires_grad",
    "nbytes",
}


@dataclass(frozen=True, slots=True)
class _Value:
    """What is followed: values as they were read, and what was made of them since.

    Attributes:
        frame: The one whose text is looked at.
        is_count: It decides unless it is seen to be shown.
        comes_back: It is made a tensor again.
        is_filter: It says which elements are taken: how many is not known.
        calls: Functions of the same text that it was given to and that have not returned.
    """

    frame: int
    is_count: bool
    comes_back: bool = False
    is_filter: bool = False
    calls: tuple[ast.Call, ...] = ()

    def through(self, name: str) -> _Value:
        """Return what a function makes of it."""
        return replace(
            self,
            is_count=self.is_count or name in _CONVERTS,
            comes_back=self.comes_back or name in _BACK,
            is_filter=self.is_filter or name in _FILTERS,
        )


class _Text:
    """The tree of a file, and what stands around each of its nodes."""

    def __init__(self, tree: ast.AST) -> None:
        self.parents: dict[ast.AST, ast.AST] = {}
        self.functions: dict[str, _Def] = {}
        self.calls: list[ast.Call] = []
        self._placed: dict[tuple[int, int, int, int], ast.expr | ast.stmt] = {}
        for node in ast.walk(tree):  # an expression comes after the statement that is nothing else
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
            if isinstance(node, _Def):
                self.functions[node.name] = node
            elif isinstance(node, ast.Call):
                self.calls.append(node)
            if isinstance(node, ast.stmt | ast.expr):
                end = node.end_lineno or node.lineno, node.end_col_offset or 0
                place = (node.lineno, node.col_offset, *end)
                outer = self._placed.get(place)
                if not isinstance(outer, ast.expr):
                    self._placed[place] = node

    def statement(self, node: ast.AST) -> ast.stmt | None:
        """Return the statement that an expression is part of."""
        outer = self.scope(node, ast.stmt)
        return outer if isinstance(outer, ast.stmt) else None

    def scope(self, node: ast.AST, kind: type[ast.AST] | UnionType = _Function) -> ast.AST:
        """Return the function, or what else of this kind, that a node stands in, or the module."""
        while outer := self.parents.get(node):
            node = outer
            if isinstance(node, kind):
                break
        return node

    def read_at(self, code: CodeType, instruction: int) -> ast.expr | ast.stmt | None:
        """Return the expression that an instruction computes, or the statement that it is of."""
        lines = islice(code.co_positions(), instruction // 2, None)
        line, last, column, end = next(lines, (None,) * 4)
        if line is None or last is None or column is None or end is None:
            return None
        if found := self._placed.get((line, column, last, end)):
            return found
        around = {
            place: node
            for place, node in self._placed.items()
            if isinstance(node, ast.stmt)
            and place[:2] <= (line, column)
            and (last, end) <= place[2:]
        }
        return around[max(around)] if around else None


@lru_cache(maxsize=64)
def _text_of(file: str) -> _Text | None:
    try:
        return _Text(ast.parse("".join(linecache.getlines(file))))
    except (SyntaxError, ValueError):
        return None


def _name_of(function: ast.expr) -> tuple[str, str]:
    """Return what a dotted name begins with and how it ends; either is empty if it has none."""
    root: ast.expr = function
    while isinstance(root, ast.Attribute):
        root = root.value
    last = function.attr if isinstance(function, ast.Attribute) else ""
    first = root.id if isinstance(root, ast.Name) else ""
    return first, last or first


def _is_result(text: _Text, node: ast.expr) -> bool:
    """Whether an expression that has read values is these, or says whether they hold."""
    if isinstance(node, ast.Call):
        first, name = _name_of(node.func)
        if first in _OF_NUMBERS or name in _READS | _COMPUTES | _CONVERTS:
            return True
    outer = text.parents[node]
    is_test = isinstance(outer, ast.BoolOp) or getattr(outer, "test", None) is node
    negated = isinstance(outer, ast.UnaryOp) and isinstance(outer.op, ast.Not)
    filters = isinstance(outer, ast.comprehension) and node in outer.ifs
    shown = isinstance(node, ast.FormattedValue | ast.JoinedStr | ast.Compare | ast.UnaryOp)
    return is_test or negated or filters or shown


def _is_known(node: ast.Compare) -> bool:
    """Whether a comparison has one answer: a number is not None, and what is unknown is finite."""
    if all(isinstance(operation, ast.Is | ast.IsNot) for operation in node.ops):
        return True
    sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
    return len(set(sides)) == 1 or any(re.search(r"\binf\b|\bnan\b", side) for side in sides)


def _targets_of(outer: ast.AST, values: ast.Tuple, value: ast.AST) -> list[ast.expr]:
    """Return what one of several values is assigned to, each to a name of its own."""
    if not isinstance(outer, ast.Assign) or outer.value is not values:
        return []
    place = next(n for n, each in enumerate(values.elts) if each is value)
    targets = [t for t in outer.targets if isinstance(t, ast.Tuple)]
    apart = [t.elts[place] for t in targets if len(t.elts) == len(values.elts)]
    return apart if len(apart) == len(outer.targets) else []


def _works(operands: Sequence[ast.expr], decided_by: ast.AST) -> bool:
    """Whether something is called behind one of the operands that may need memory."""
    behind = list(dropwhile(lambda operand: operand is not decided_by, operands))[1:]
    calls = (n for each in behind for n in ast.walk(each) if isinstance(n, ast.Call))
    return any(_name_of(call.func)[1] not in _COMPUTES | _CONVERTS | _FINITE for call in calls)


def _is_of_host(text: _Text, node: ast.expr) -> bool:
    """Whether a name is given what the host has: an array, a list, a copy."""
    made = [
        assigned.value
        for assigned in ast.walk(text.scope(node))
        if isinstance(assigned, ast.Assign)
        and ast.unparse(assigned.targets[0]) == ast.unparse(node)
    ]
    return any(re.search(r"\b(np|numpy|tolist|cpu)\b", ast.unparse(each)) for each in [node, *made])


def _only_shows(statements: Sequence[ast.stmt]) -> bool:
    for statement in statements:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            if not _SHOWS.fullmatch(_name_of(statement.value.func)[1]):
                return False
        elif isinstance(statement, ast.If):
            if not _only_shows([*statement.body, *statement.orelse]):
                return False
        elif not isinstance(statement, ast.Raise | ast.Pass | ast.Assert):
            return False
    return True


def _keeps_record(branch: ast.If) -> bool:
    """Whether the branch replaces what the value is compared with: the best one so far."""
    compared = {
        ast.unparse(part)
        for test in ast.walk(branch.test)
        if isinstance(test, ast.Compare)
        for side in (test.left, *test.comparators)
        for part in ast.walk(side)
        if isinstance(part, ast.Name | ast.Attribute | ast.Subscript)
    }
    assigned = (s for s in branch.body if isinstance(s, ast.Assign | ast.AnnAssign))
    targets = [
        t for s in assigned for t in (s.targets if isinstance(s, ast.Assign) else [s.target])
    ]
    targets += [each for t in targets if isinstance(t, ast.Tuple) for each in t.elts]
    return any(ast.unparse(target) in compared for target in targets)


@dataclass
class _Following:
    frames: Sequence[Frame]
    seen: set[tuple[ast.AST, _Value]] = field(default_factory=set)

    def at_frame(self, frame: int, value: _Value) -> bool:
        """Whether what a frame's instruction has computed decides."""
        if frame >= len(self.frames):
            return value.is_count
        code, instruction = self.frames[frame]
        if "/_pytest/" in code.co_filename:
            return False  # it is what a test returns
        text = _text_of(code.co_filename)
        node = None if text is None else text.read_at(code, instruction)
        if text is None or node is None:
            return value.is_count
        if isinstance(node, ast.While | ast.If):  # its test's last instruction
            return self.of(text, node.test, replace(value, frame=frame))
        if isinstance(node, ast.stmt):
            return value.is_count and not isinstance(node, ast.Assert | ast.Raise)
        if not frame and not _is_result(text, node):  # a function has read it for itself
            sized = isinstance(node, ast.Call) and _OF_SIZES.fullmatch(_name_of(node.func)[1])
            return value.is_count or bool(sized)
        return self.of(text, node, replace(value, frame=frame))

    def of(self, text: _Text, node: ast.AST, value: _Value) -> bool:
        """Whether the value of a node decides."""
        if (node, value) in self.seen or isinstance(text.statement(node), ast.Assert):
            return False
        self.seen.add((node, value))
        parent = text.parents[node]
        match parent:
            case ast.Expr() | ast.Assert() | ast.FormattedValue() | ast.JoinedStr() | ast.Raise():
                return False
            case ast.While() | ast.Match() | ast.Slice():
                return True
            case ast.If():
                return not (_only_shows([*parent.body, *parent.orelse]) or _keeps_record(parent))
            case ast.IfExp() if node is parent.test:
                chosen = parent.body, parent.orelse
                plain = all(isinstance(c, ast.Constant | ast.Name | ast.Attribute) for c in chosen)
                return not plain or self.of(text, parent, value)
            case ast.comprehension() if node in parent.ifs:
                return True
            case ast.comprehension() | ast.For() | ast.AsyncFor():
                made = text.parents[parent] if isinstance(parent, ast.comprehension) else None
                return self.named(text, parent.target, value) or (
                    made is not None and self.of(text, made, value)
                )
            case ast.Return() | ast.Lambda():
                return self.returned(text, parent, value)
            case ast.Tuple() if targets := _targets_of(text.parents[parent], parent, node):
                return any(self.named(text, target, value) for target in targets)
            case ast.Assign():
                return any(self.named(text, target, value) for target in parent.targets)
            case ast.AnnAssign() | ast.AugAssign():
                return self.named(text, parent.target, value)
            case ast.NamedExpr():
                return self.named(text, parent.target, value) or self.of(text, parent, value)
            case ast.Compare():
                filtering = replace(value, is_filter=True)
                return not _is_known(parent) and self.of(text, parent, filtering)
            case ast.Attribute():
                return self.of_attribute(text, parent, value)
            case ast.Subscript() if node is parent.slice:
                length = value.is_filter and not value.calls and not _is_of_host(text, parent.value)
                decided = value.is_count or value.comes_back or length
                return decided or self.of(text, parent, value)
            case ast.Call():
                return self.given(text, node, parent, value)
            case ast.keyword():
                call = text.parents[parent]
                return isinstance(call, ast.Call) and self.given(text, parent, call, value)
            case ast.BoolOp() if _works(parent.values, node):
                # In a test it is part of that, and what is called there makes a number.
                return isinstance(text.statement(parent), _Simple) or self.of(text, parent, value)
            case ast.expr():
                return self.of(text, parent, value)
            case _:
                return value.is_count

    def of_attribute(self, text: _Text, node: ast.Attribute, value: _Value) -> bool:
        if node.attr in _DESCRIBES:
            return False
        outer = text.parents[node]
        if not (isinstance(outer, ast.Call) and outer.func is node):
            return self.of(text, node, value)
        return self.of(text, outer, value.through(node.attr))

    def given(self, text: _Text, node: ast.AST, call: ast.Call, value: _Value) -> bool:
        """Whether a value decides that is an argument of a call."""
        first, name = _name_of(call.func)
        if name in _FINITE:
            return False
        if first in _MODULES or name in _COMPUTES | _CONVERTS:
            if _OF_SIZES.fullmatch(name):
                return True
            return self.of(text, call, value.through(name))
        if _SHOWS.fullmatch(name):
            return False
        if _OF_SIZES.fullmatch(name):
            return True
        if name in _ADDS and isinstance(call.func, ast.Attribute):
            return self.named(text, call.func.value, value)
        if (function := text.functions.get(name)) and call not in value.calls:
            return self.passed(text, node, call, function, value)
        return value.is_count

    def passed(
        self, text: _Text, node: ast.AST, call: ast.Call, function: _Def, value: _Value
    ) -> bool:
        """Whether a value decides that a function of the same text is given."""
        names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
        if isinstance(call.func, ast.Attribute) and names[:1] in (["self"], ["cls"]):
            names = names[1:]
        within = replace(value, calls=(*value.calls, call))
        if isinstance(node, ast.keyword):
            name = node.arg or ""
        else:
            place = next((n for n, each in enumerate(call.args) if each is node), len(names))
            name = names[place] if place < len(names) else ""
        return self.uses(text, function, name, within) if name else value.is_count

    def uses(self, text: _Text, scope: ast.AST, name: str, value: _Value) -> bool:
        """Whether a value decides that has a name in a scope: a plain one, or an attribute's."""
        kind = ast.Attribute if "." in name else ast.Name
        uses = (n for n in ast.walk(scope) if isinstance(n, kind) and ast.unparse(n) == name)
        return any(
            self.of(text, use, value)
            for use in uses
            if isinstance(use, ast.Name | ast.Attribute) and isinstance(use.ctx, ast.Load)
        )

    def named(self, text: _Text, target: ast.AST, value: _Value) -> bool:
        """Whether a value decides that gets a name, by the uses of that name."""
        if isinstance(target, ast.Tuple | ast.List):
            return any(self.named(text, each, value) for each in target.elts)
        while isinstance(target, ast.Subscript | ast.Starred):
            target = target.value
        if isinstance(target, ast.Attribute):  # others may read it, too
            scope = text.scope(target, ast.ClassDef)
            return value.is_count or self.uses(text, scope, ast.unparse(target), value)
        if not isinstance(target, ast.Name):
            return value.is_count
        return self.uses(text, text.scope(target), target.id, value)

    def returned(self, text: _Text, node: ast.AST, value: _Value) -> bool:
        """Whether a value decides that a function returns, by what its caller does with it."""
        if value.calls:
            *calls, call = value.calls
            return self.of(text, call, replace(value, calls=tuple(calls)))
        function = node if isinstance(node, ast.Lambda) else text.scope(node)
        name = getattr(function, "name", "<lambda>")
        for number in range(value.frame, len(self.frames)):
            if self.frames[number][0].co_name == name:
                return self.at_frame(number + 1, value)
        named = (each for each in text.calls if _name_of(each.func)[1] == name)
        return value.is_count or any(self.of(text, each, value) for each in named)


def decides(frames: Sequence[Frame], *, is_count: bool) -> bool:
    """Whether a program decides by what it has read in the first of these frames.

    Each was called by the next one. A number decides if it is seen to, a count or the truth unless
    it is seen not to.
    """
    return _Following(frames).at_frame(0, _Value(0, is_count))
