"""The operators behind each line of the Python that inductor generates.

Inductor writes a function that allocates buffers and hands them to kernels:

    buf5 = empty_strided_cpu((512, 256), (256, 1), torch.float32)
    # Topologically Sorted Source Nodes: [h], Original ATen: [aten.t, aten.addmm]
    extern_kernels.addmm(primals_5, buf4, primals_4, alpha=1, beta=1, out=buf5)

A buffer belongs to the first kernel that is given it. What that kernel computes stands in the
comment above it, or else in its name: ``cpp_fused_native_layer_norm_0``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from pytest_torchmem.record.torch_api import dispatcher

_ORIGIN: Final = re.compile(
    r"Source Nodes: \[(?P<nodes>[^\]]*)\], Original ATen: \[(?P<operators>[^\]]*)\]"
)
_FUSED: Final = re.compile(r"(?:cpp|triton_[a-z]+)_fused_(?P<names>.+?)(?:_\d+)?")
# The longest operator names are made of this many words.
_MOST_WORDS: Final = 8
_NO_KERNELS: Final = ("assert_", "get_raw_stream", "set_device", "clear", "synchronize")


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel, and the operators that it computes.

    Attributes:
        operator: The operator, ``aten::addmm``, or several joined by ``+``.
        nodes: Names of the nodes that torch.compile traced for it; empty where they are not told.
    """

    operator: str
    nodes: tuple[str, ...] = ()


@lru_cache(maxsize=256)
def kernels_by_line(path: str) -> Mapping[int, Kernel]:
    """Return the kernel that each line runs or allocates a buffer for.

    ``path`` names a file that inductor wrote; its name is a hash of its contents. Empty if the file
    cannot be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError):
        return {}
    kernels: dict[int, Kernel] = {}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            kernels |= _of_function(function, text.splitlines())
    return kernels


def _of_function(function: ast.FunctionDef, lines: Sequence[str]) -> dict[int, Kernel]:
    kernels: dict[int, Kernel] = {}
    waiting: dict[str, int] = {}
    for statement in _statements(function.body):
        value = statement.value
        name = _assigned(statement)
        if isinstance(value, ast.Name):
            _rename(waiting, value.id, name)
        elif isinstance(value, ast.Call):
            function_name = _called_name(value)
            if function_name.startswith("empty_strided") and name:
                waiting[name] = statement.lineno
            elif function_name in ("reinterpret_tensor", "alloc_from_pool") and name:
                for used in _names(value.args):
                    _rename(waiting, used, name)
            elif not function_name.startswith(_NO_KERNELS):
                kernel = kernels[statement.lineno] = _kernel(value, statement.lineno, lines)
                for used in _names([*value.args, *(k.value for k in value.keywords)]):
                    if used in waiting:
                        kernels[waiting.pop(used)] = kernel
    return {line: kernel for line, kernel in kernels.items() if kernel.operator}


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.Expr | ast.Assign]:
    """Calls and assignments in the order they stand in, those within blocks included."""
    for statement in body:
        if isinstance(statement, (ast.Expr, ast.Assign)):
            yield statement
        elif not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            for block in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(statement, block, ()))


def _assigned(statement: ast.Expr | ast.Assign) -> str:
    """The name that a statement gives to its value; empty if there is not exactly one."""
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
        return statement.targets[0].id
    return ""


def _rename(waiting: dict[str, int], old: str, new: str) -> None:
    if old in waiting and new:
        waiting[new] = waiting.pop(old)


def _called_name(call: ast.Call) -> str:
    """The last part of what is called: ``addmm`` of ``extern_kernels.addmm(...)``."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _names(arguments: Sequence[ast.expr]) -> Iterator[str]:
    for argument in arguments:
        for node in ast.walk(argument):
            if isinstance(node, ast.Name):
                yield node.id


def _kernel(call: ast.Call, line: int, lines: Sequence[str]) -> Kernel:
    operators, nodes = _in_comment(line, lines)
    if operators:
        return Kernel(_joined(operators), tuple(nodes))
    name = _called_name(call)
    if name == "run" and isinstance(call.func, ast.Attribute):
        name = call.func.value.id if isinstance(call.func.value, ast.Name) else name
    if match := _FUSED.fullmatch(name):
        operators = _split(match["names"])
        return Kernel(_joined(operators) if operators else name)
    return Kernel(_qualified(name))


def _in_comment(line: int, lines: Sequence[str]) -> tuple[list[str], list[str]]:
    """Operators and nodes in the comment right above a line; empty if there is none."""
    for text in reversed(lines[: line - 1]):
        if match := _ORIGIN.search(text):
            operators = [name.replace(".", "::", 1) for name in _names_in(match["operators"])]
            return operators, _names_in(match["nodes"])
        if not text.strip().startswith("#") and "get_raw_stream" not in text:
            break
    return [], []


def _names_in(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _joined(names: Sequence[str]) -> str:
    """``aten::addmm``, or ``aten::_softmax+pow+sum``: views need no memory and are left out."""
    making = [name for name in names if not dispatcher.only_views(name)] or list(names)
    first, *rest = dict.fromkeys(making)
    return "+".join([first, *(name.removeprefix("aten::") for name in rest)])


def _split(text: str) -> list[str]:
    """Take the names of operators apart that a kernel's name joins by ``_``; empty if impossible.

    The names are in alphabetical order and hold underscores themselves: the fewest names that
    explain the whole are the likeliest.
    """
    words = text.split("_")
    best: list[list[str] | None] = [[], *([None] * len(words))]
    for end in range(1, len(words) + 1):
        for begin in range(max(0, end - _MOST_WORDS), end):
            before = best[begin]
            if before is None or (best[end] is not None and len(best[end] or ()) <= len(before)):
                continue
            if name := _qualified("_".join(words[begin:end])):
                best[end] = [*before, name]
    return best[-1] or []


@lru_cache(maxsize=1024)
def _qualified(name: str) -> str:
    """The operator of that name with its namespace; empty if there is none."""
    for namespace in ("aten", "prims"):
        if dispatcher.schemas_of(f"{namespace}::{name}"):
            return f"{namespace}::{name}"
    return ""
