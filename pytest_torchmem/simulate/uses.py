"""Tell what a program does with values that it has read: it shows them, or it decides by them.

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
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import dropwhile, islice
from types import CodeType, FunctionType, ModuleType, UnionType
from typing import Final

#: A code that ran and the place of the instruction in it, as a frame has both.
Frame = tuple[CodeType, int]

_Def = ast.FunctionDef | ast.AsyncFunctionDef
_Function = _Def | ast.Lambda
_Simple = ast.Expr | ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Return

# Names of functions that show or save what they are given, or end the test.
_SHOWS: Final = re.compile(
    r"p?print|repr|str|format|(\w+_)?log(_\w+)?|warn(ing)?|info|debug|error|critical|exception|write"
    r"|add_scalars?|set_(postfix|description)(_str)?|record_property|exit|fail|skip"
    r"|save\w*|dump|copyfile|copy2|rename|unlink|remove|mkdir|makedirs"
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
    *("float", "bool", "abs", "min", "max", "sum", "sorted", "list", "tuple", "set", "zip"),
    *("any", "all", "enumerate", "reversed", "pow", "divmod", "complex", "iter", "next", "len"),
    *("filter", "map"),
}
_OF_NUMBERS: Final = {"math", "np", "numpy", "statistics"}
_MODULES: Final = {*_OF_NUMBERS, "itertools", "torch"}
_FINITE: Final = {"isnan", "isinf", "isfinite"}
_OF_SIZES: Final = re.compile(r"zeros|ones|empty|full|rand\w*|arange|linspace|eye|range|islice")
_FILTERS: Final = {
    *("nonzero", "flatnonzero", "argwhere", "where", "extract", "compress", "unique", "set"),
    *("filter", "takewhile", "dropwhile", "groupby"),
}
_PAIRS: Final = {"items", "enumerate"}
_BACK: Final = {"tensor", "as_tensor", "from_numpy", "to", "cuda"}
# What is the same for whatever values.
_DESCRIBES: Final = {
    *("shape", "dtype", "device", "ndim", "size", "numel", "dim", "requires_grad", "nbytes"),
    *("data_ptr", "element_size", "stride", "is_contiguous", "layout", "is_cuda", "is_pinned"),
}


@dataclass(frozen=True, slots=True)
class _Value:
    """Values as they were read, and what was made of them since: these are followed.

    Attributes:
        frame: The one whose text is looked at.
        is_count: It decides unless it is seen to be shown.
        comes_back: It is made a tensor again.
        is_mask: It says which elements are to be taken.
        is_filter: They have been taken: how many is not known.
        calls: Functions that it was given to and that have not returned.
    """

    frame: int
    is_count: bool
    comes_back: bool = False
    is_mask: bool = False
    is_filter: bool = False
    calls: tuple[tuple[_Text, ast.Call], ...] = ()

    def through(self, name: str) -> _Value:
        """Return what a function makes of it."""
        return replace(
            self,
            is_count=self.is_count or name in _CONVERTS or (name == "len" and self.is_filter),
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

    def function(self, call: ast.Call, code: CodeType) -> tuple[_Text, _Def] | None:
        """Return the function that is called by a name, and the text that it stands in."""
        first, name = _name_of(call.func)
        if found := self.functions.get(name):
            return self, found
        here = (m for m in tuple(sys.modules.values()) if _file_of(m) == code.co_filename)
        called = getattr(next(here, None), first, None)
        if isinstance(called, ModuleType):
            called = getattr(called, name, None)
        if not isinstance(called, FunctionType):
            return None
        text = _text_of(called.__code__.co_filename)
        definition = text and text.functions.get(called.__name__)
        return (text, definition) if text and definition else None

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


def _file_of(module: ModuleType) -> str | None:
    return getattr(module, "__file__", None)


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
    """Tell whether an expression that has read values is these, or says whether they hold."""
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
    """Tell whether a comparison has one answer: a number is not None, unknown ones are finite."""
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


def _values_of(loop: ast.comprehension | ast.For | ast.AsyncFor) -> ast.expr:
    """Return what a loop assigns values to: neither a table's keys nor numbers of places."""
    pairs = isinstance(loop.iter, ast.Call) and _name_of(loop.iter.func)[1] in _PAIRS
    if pairs and isinstance(loop.target, ast.Tuple) and len(loop.target.elts) == 2:
        return loop.target.elts[1]
    return loop.target


def _is_plain(chosen: ast.expr) -> bool:
    """Tell whether an expression is there already, or is computed by the host."""
    if isinstance(chosen, ast.Call):
        return _name_of(chosen.func)[0] in _OF_NUMBERS
    return isinstance(chosen, ast.Constant | ast.Name | ast.Attribute)


def _works(operands: Sequence[ast.expr], decided_by: ast.AST) -> bool:
    """Tell whether something is called behind one of the operands that may need memory."""
    behind = list(dropwhile(lambda operand: operand is not decided_by, operands))[1:]
    calls = (n for each in behind for n in ast.walk(each) if isinstance(n, ast.Call))
    return any(_name_of(call.func)[1] not in _COMPUTES | _CONVERTS | _FINITE for call in calls)


def _is_of_host(text: _Text, node: ast.expr) -> bool:
    """Tell whether a name is given what the host has: an array, a list, a copy."""
    made = [
        assigned.value
        for assigned in ast.walk(text.scope(node))
        if isinstance(assigned, ast.Assign)
        and ast.unparse(assigned.targets[0]) == ast.unparse(node)
    ]
    return any(re.search(r"\b(np|numpy|tolist|cpu)\b", ast.unparse(each)) for each in [node, *made])


def _assigned(statements: Sequence[ast.stmt]) -> list[ast.expr] | None:
    """Return what is assigned where nothing else is done but to show, save, and change numbers.

    None if more is done, for which memory may be needed.
    """
    targets: list[ast.expr] = []
    for statement in statements:
        match statement:
            case ast.Expr(value=ast.Call(func=function)):
                if not _SHOWS.fullmatch(_name_of(function)[1]):
                    return None
            case ast.If() | ast.For():
                if (within := _assigned([*statement.body, *statement.orelse])) is None:
                    return None
                targets += within
            case ast.Assign(value=ast.Constant() | ast.Name() | ast.Attribute()):
                targets += statement.targets
            case ast.AugAssign(value=ast.Constant() | ast.Name() | ast.Attribute()):
                targets.append(statement.target)
            case ast.Raise() | ast.Pass() | ast.Assert():
                pass
            case _:
                return None
    return targets


def _keeps_record(branch: ast.If) -> bool:
    """Tell whether the branch replaces what the value is compared with: the best one so far."""
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
        """Tell whether what a frame's instruction has computed decides."""
        if frame >= len(self.frames):
            return value.is_count
        code, instruction = self.frames[frame]
        if "/_pytest/" in code.co_filename:
            return False  # it is what a test returns
        text = _text_of(code.co_filename)
        node = None if text is None else text.read_at(code, instruction)
        if text is None or node is None:
            return value.is_count
        # The last instruction of a test has the place of all that follows.
        if isinstance(node, ast.While | ast.If):
            return self.of(text, node.test, replace(value, frame=frame))
        if isinstance(node, ast.For):
            return self.of(text, node.iter, replace(value, frame=frame))
        if isinstance(node, ast.stmt):
            return value.is_count and not isinstance(node, ast.Assert | ast.Raise)
        if not frame and not _is_result(text, node):  # a function has read it for itself
            sized = isinstance(node, ast.Call) and _OF_SIZES.fullmatch(_name_of(node.func)[1])
            return value.is_count or bool(sized)
        converts = isinstance(node, ast.Call) and _name_of(node.func)[1] in _CONVERTS
        is_count = value.is_count or (not frame and converts)
        return self.of(text, node, replace(value, frame=frame, is_count=is_count))

    def of(self, text: _Text, node: ast.AST, value: _Value) -> bool:
        """Tell whether the value of a node decides."""
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
                return self.of_branch(text, parent, value)
            case ast.IfExp() if node is parent.test:
                plain = _is_plain(parent.body) and _is_plain(parent.orelse)
                return not plain or self.of(text, parent, value)
            case ast.comprehension() if node in parent.ifs:
                return True
            case ast.comprehension() | ast.For() | ast.AsyncFor():
                return self.of_loop(text, parent, value)
            case ast.Return() | ast.Lambda() | ast.Yield():
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
                mask = replace(value, is_mask=True)
                return not _is_known(parent) and self.of(text, parent, mask)
            case ast.Attribute():
                return self.of_attribute(text, parent, value)
            case ast.Subscript() if node is parent.slice:
                return self.of_index(text, parent, value)
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

    def of_branch(self, text: _Text, branch: ast.If, value: _Value) -> bool:
        if _keeps_record(branch):
            return False
        targets = _assigned([*branch.body, *branch.orelse])
        return targets is None or any(self.named(text, t, value) for t in targets)

    def of_loop(
        self, text: _Text, loop: ast.comprehension | ast.For | ast.AsyncFor, value: _Value
    ) -> bool:
        if value.is_filter or self.named(text, _values_of(loop), value):
            return True
        return isinstance(loop, ast.comprehension) and self.of(text, text.parents[loop], value)

    def of_index(self, text: _Text, taken: ast.Subscript, value: _Value) -> bool:
        if value.is_count or value.comes_back:
            return True
        if isinstance(taken.ctx, ast.Store):  # as many as there are values
            return self.named(text, taken.value, replace(value, is_filter=True))
        filters = value.is_mask or value.is_filter
        if filters and not value.calls and not _is_of_host(text, taken.value):
            return True
        return self.of(text, taken, replace(value, is_mask=False, is_filter=filters))

    def of_attribute(self, text: _Text, node: ast.Attribute, value: _Value) -> bool:
        if node.attr in _DESCRIBES or (node.attr == "keys" and not value.is_filter):
            return False
        outer = text.parents[node]
        if not (isinstance(outer, ast.Call) and outer.func is node):
            return self.of(text, node, value)
        return self.of(text, outer, value.through(node.attr))

    def given(self, text: _Text, node: ast.AST, call: ast.Call, value: _Value) -> bool:
        """Tell whether a value decides that is an argument of a call."""
        first, name = _name_of(call.func)
        if name in _FINITE:
            return False
        if first in _MODULES or name in _COMPUTES | _CONVERTS:
            if _OF_SIZES.fullmatch(name):
                return True
            works = name == "map" and _name_of(call.args[0])[1] not in _COMPUTES | _CONVERTS
            if works and (value.is_count or value.is_filter):
                return True
            return self.of(text, call, value.through(name))
        if _SHOWS.fullmatch(name):
            return False
        if _OF_SIZES.fullmatch(name):
            return True
        if name in _ADDS and isinstance(call.func, ast.Attribute):
            return self.named(text, call.func.value, value)
        function = text.function(call, self.frames[value.frame][0])
        if function and all(call is not other for _, other in value.calls):
            return self.passed(text, node, call, *function, value)
        return value.is_count

    def passed(
        self,
        text: _Text,
        node: ast.AST,
        call: ast.Call,
        other: _Text,
        function: _Def,
        value: _Value,
    ) -> bool:
        """Tell whether a value decides that a function is given whose text is there."""
        names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
        if isinstance(call.func, ast.Attribute) and names[:1] in (["self"], ["cls"]):
            names = names[1:]
        within = replace(value, calls=(*value.calls, (text, call)))
        if isinstance(node, ast.keyword):
            name = node.arg or ""
        else:
            place = next((n for n, each in enumerate(call.args) if each is node), len(names))
            name = names[place] if place < len(names) else ""
        return self.uses(other, function, name, within) if name else value.is_count

    def uses(self, text: _Text, scope: ast.AST, name: str, value: _Value) -> bool:
        """Tell whether a value decides that has a plain name or an attribute's in a scope."""
        kind = ast.Attribute if "." in name else ast.Name
        uses = (n for n in ast.walk(scope) if isinstance(n, kind) and ast.unparse(n) == name)
        return any(
            self.of(text, use, value)
            for use in uses
            if isinstance(use, ast.Name | ast.Attribute) and isinstance(use.ctx, ast.Load)
        )

    def named(self, text: _Text, target: ast.AST, value: _Value) -> bool:
        """Tell whether a value decides that gets a name, by the uses of that name."""
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
        """Tell whether a value decides that a function returns, by what its caller does with it."""
        if value.calls:
            *calls, (outer, call) = value.calls
            return self.of(outer, call, replace(value, calls=tuple(calls)))
        function = node if isinstance(node, ast.Lambda) else text.scope(node)
        name = getattr(function, "name", "<lambda>")
        for number in range(value.frame, len(self.frames)):
            if self.frames[number][0].co_name == name:
                return self.at_frame(number + 1, value)
        named = (each for each in text.calls if _name_of(each.func)[1] == name)
        return value.is_count or any(self.of(text, each, value) for each in named)


def decides(frames: Sequence[Frame], *, is_count: bool, is_mask: bool = False) -> bool:
    """Tell whether a program decides by what it has read in the first of these frames.

    Each was called by the next one. A number or a mask decides if it is seen to, a count or the
    truth unless it is seen not to.
    """
    return _Following(frames).at_frame(0, _Value(0, is_count, is_mask=is_mask))
