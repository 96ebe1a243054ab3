"""From lines of code that a compiler generated to the user's own.

Compiled code runs as generated Python: the forward of an FX graph module, or the file that inductor
wrote. The profiler sees its calls with lines of that code. What each such line stands for goes into
`Trace.compiled_lines`, so that the analysis needs neither torch nor the compiler's files.

Every FX node that torch.compile traced carries the stack it was traced at and the modules it was
traced in. A graph may be gone when the recording ends, so what it knows is noted as plain values.
"""

from __future__ import annotations

import linecache
import re
import weakref
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import NoneType
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from pytest_torchmem.record.compiled.inductor import Kernel, kernels_by_line
from pytest_torchmem.record.graphs.origin import is_user_file, operator_name
from pytest_torchmem.record.heap import is_a, with_subclasses
from pytest_torchmem.record.owners.live_objects import find_modules
from pytest_torchmem.record.recorded_tables import StringTable
from pytest_torchmem.record.torch_api import compiler
from pytest_torchmem.values.contributors import Source
from pytest_torchmem.values.packed import Table
from pytest_torchmem.values.trace import COMPILED_LINE

_FRAME: Final = re.compile(
    r'File "(?P<file>[^"\n]+)", line (?P<line>\d+), in (?P<function>[^\n]+)\n\s*(?P<text>[^\n]*)'
)
_LINE_NUMBER: Final = re.compile(r'(?<=", line )\d+(?=, in )')
# The name under which a compiler knows a module: by its place in what was compiled.
_PLACE: Final = re.compile(r"L\['\w+'\]((?:\.\w+)+)")
_ASSIGNED: Final = re.compile(r"\b(\w+)(?:\s*:[^=]*)? = ")


@dataclass(frozen=True, slots=True)
class NodeOrigin:
    """The source, the modules and the operator of a node.

    Attributes:
        stack: The stack it was traced at, as text.
        modules: The ``id()`` of each module it may belong to.
        operator: What it calls, ``aten::mm``; empty if that is no operator.
    """

    stack: str
    modules: tuple[int, ...]
    operator: str = ""


@dataclass(frozen=True, slots=True)
class _Place:
    """The names that lead to a module, from what was compiled on, and the name of its class."""

    names: tuple[str, ...]
    class_name: str


class ModuleTree:
    """Finds modules by their places, from `trace.MODULE_EDGE` rows.

    A model of a class that was compiled before runs the code of the first one. The graph knows the
    modules of that one alone, which may be dead.
    """

    def __init__(self, edges: NDArray[np.void], strings: Sequence[str]) -> None:
        self._parents: dict[int, set[tuple[int, str]]] = defaultdict(set)
        self._modules_by_name: dict[tuple[str, str], dict[int, None]] = defaultdict(dict)
        columns = (edges[name].tolist() for name in ("child", "parent", "name", "class_name"))
        for child, parent, name, class_name in zip(*columns, strict=True):
            if parent:
                self._parents[child].add((parent, strings[name]))
                self._modules_by_name[strings[name], strings[class_name]][child] = None

    def at(self, place: _Place) -> list[int]:
        """Return the ``id()`` of each module in a place."""
        candidates = self._modules_by_name.get((place.names[-1], place.class_name), {})
        return [module for module in candidates if self._is_at(module, place.names)]

    def _is_at(self, module: int, names: tuple[str, ...]) -> bool:
        return not names or any(
            name == names[-1] and self._is_at(parent, names[:-1])
            for parent, name in self._parents.get(module, ())
        )


class CompiledGraphs:
    """Collects what living graphs know."""

    def __init__(self) -> None:
        # A set of Python's own would run code where one dies, and dynamo may look at that.
        self._classes: set[weakref.ref[type[torch.fx.GraphModule]]] = set()
        self._lines: dict[str, Mapping[int, NodeOrigin]] = {}
        self._traced: dict[str, _Traced] = {}
        self._places: dict[int, _Place] = {}

    def collect(self) -> None:
        """Learn from the graphs that were made since the last time, if any."""
        if not self._classes.issuperset(map(weakref.ref, _graph_module_classes())):
            self.collect_again()

    def collect_again(self) -> None:
        """Learn from all graphs that are alive, also from those that have been changed since."""
        kinds = with_subclasses(_graph_module_classes())
        modules = {id(module): module for module in find_modules()} if kinds else {}
        graphs = [m for m in modules.values() if is_a(m, torch.fx.GraphModule)]
        for graph in (graph for graph in graphs if type(graph) in kinds):
            nodes = [node for node in graph.graph.nodes if node.op.startswith("call_")]
            if any(node.stack_trace for node in nodes):
                for node in nodes:
                    self._note(node, modules)
                # Asking for the code generates it now if nobody has run the graph yet.
                lines = _origins_by_line(graph.code, nodes)
                self._lines[compiler.generated_file(graph)] = lines
        self._classes = set(map(weakref.ref, _graph_module_classes()))

    def lines(self, generated_file: str) -> Mapping[int, NodeOrigin] | None:
        """Return the node behind each line of generated code; None if the graph is not known."""
        return self._lines.get(generated_file)

    def traced_at(self, stack: str, nodes: Collection[str] = ()) -> NodeOrigin:
        """Return the origin of a stack that a compiler has stored, in the modules of ``nodes``.

        The compiler's files may be older than the source. Then the same code has another line
        number now, and the graph that this process traced knows it. Without ``nodes``, or where
        the graph has none of them, the origin has the modules of all nodes traced there.
        """
        traced = self._traced.get(_unnumbered(stack))
        if traced is None:
            return NodeOrigin(stack, ())
        current = stack if stack in traced.stacks else next(iter(traced.stacks))
        module_lists = [traced.modules[node] for node in nodes if node in traced.modules]
        modules = dict.fromkeys(chain.from_iterable(module_lists or traced.modules.values()))
        return NodeOrigin(current, () if 0 in modules else tuple(modules))

    def modules_in_place(self, module: int, tree: ModuleTree) -> list[int]:
        """Return the modules in the place of one that was traced: itself, where it still is."""
        place = self._places.get(module)
        nodes = tree.at(place) if place else []
        return [module] if module in nodes or not nodes else nodes

    def _note(self, node: torch.fx.Node, living: Mapping[int, torch.nn.Module]) -> None:
        # A graph may outlive its modules, and another module have the place of one of them.
        module, name, kind = _module_of(node)
        is_other = not isinstance(living.get(module), (kind, NoneType))
        if (match := _PLACE.fullmatch(name)) and kind is not object:
            self._places[module] = _Place(tuple(match[1].split(".")[1:]), kind.__name__)
        if node.stack_trace and not is_other:
            traced = self._traced.setdefault(_unnumbered(node.stack_trace), _Traced())
            traced.stacks.setdefault(node.stack_trace)
            traced.modules.setdefault(node.name, {}).setdefault(module)


@dataclass(slots=True)
class _Traced:
    """Stacks that differ in line numbers alone, and the modules of each node traced there.

    The dicts are ordered sets: they have no values. Module 0 stands for none.
    """

    stacks: dict[str, None] = field(default_factory=dict)
    modules: dict[str, dict[int, None]] = field(default_factory=dict)


def user_frame(stack: str) -> Source | None:
    """The innermost of the user's frames in a stack, with the line its code stands on now."""
    for frame in reversed(list(_FRAME.finditer(stack))):
        if is_user_file(frame["file"]):
            line = _line_now(frame["file"], int(frame["line"]), frame["text"].strip())
            return Source(frame["file"], line, frame["function"])
    return None


def _line_now(file: str, line: int, text: str) -> int:
    """Return the line on which the code ``text`` of ``line`` stands now; 0 if it is gone."""
    lines = [code.strip() for code in linecache.getlines(file)]
    if not lines or not text or text == "".join(lines[line - 1 : line]):
        return line
    same = (number for number, code in enumerate(lines, 1) if code == text)
    return min(same, key=lambda number: abs(number - line), default=0)


def _unnumbered(stack: str) -> str:
    return _LINE_NUMBER.sub("", stack).strip()


def _graph_module_classes() -> list[type[torch.fx.GraphModule]]:
    """The classes of graph modules that are alive: each has one of its own, of this name."""
    kinds = with_subclasses([torch.fx.GraphModule])
    return [kind for kind in kinds if kind.__qualname__.endswith(".GraphModuleImpl")]


def _origins_by_line(code: str, nodes: Iterable[torch.fx.Node]) -> dict[int, NodeOrigin]:
    """The node that each line of a graph's generated code computes."""
    by_node_name = {node.name: node for node in nodes}
    by_line = {}
    for number, text in enumerate(code.splitlines(), 1):
        names = (match[1] for match in _ASSIGNED.finditer(text))
        node = next((by_node_name[name] for name in names if name in by_node_name), None)
        if node is not None and node.stack_trace:
            module, _, _ = _module_of(node)
            operator = operator_name(node)
            by_line[number] = NodeOrigin(
                node.stack_trace, (module,) if module else (), operator if "::" in operator else ""
            )
    return by_line


def _module_of(node: torch.fx.Node) -> tuple[int, str, type]:
    """Return ``id()``, name and class of the innermost module a node was traced in.

    0, ``""`` and `object` stand for what is not known. A node of a backward graph has the modules
    of the forward node that it belongs to.
    """
    modules = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {"": ""}
    *_, (key, module) = modules.items()
    # The second call of a module is noted under "1234@1". Some releases use a name as the key.
    number = re.match(r"\d*", str(key))
    name, kind = module if isinstance(module, tuple) and len(module) == 2 else ("", object)
    return (
        int(number[0] or 0) if number else 0,
        name if isinstance(name, str) else "",
        kind if isinstance(kind, type) else object,
    )


_FX_CODE: Final = "<eval_with_key>"


class CompiledSources:
    """Resolves lines of generated code; `learn` after each compilation for the best answers."""

    def __init__(self, strings: StringTable) -> None:
        self._strings = strings
        self._graphs = CompiledGraphs()
        self._resolved: dict[tuple[int, int], list[tuple[int, ...]]] = {}
        self._given_up: set[int] = set()

    def learn(self) -> None:
        """Note what the living graphs know: they may be gone when `read` needs it."""
        self._graphs.collect()

    def read(self, events: Table, edges: NDArray[np.void]) -> NDArray[np.void]:
        """Return `trace.COMPILED_LINE` rows for the lines of generated code among ``events``.

        ``edges`` are the `trace.MODULE_EDGE` rows of the recording.
        """
        parents = events["parent"]
        files = np.where(parents >= 0, events["file"][parents], -1)
        called = (files >= 0) & (events["line"] > 0)
        names = self._strings.values()
        is_called = np.zeros(len(names), np.bool_)
        is_called[files[called]] = True
        generated = [n for n in np.flatnonzero(is_called).tolist() if self._is_generated(names[n])]
        if not generated:
            return np.empty(0, COMPILED_LINE)
        unknown = {
            n
            for n in generated
            if names[n].startswith(_FX_CODE) and self._graphs.lines(names[n]) is None
        }
        if unknown - self._given_up:
            self._graphs.collect_again()
            self._given_up |= unknown
        mine = called & np.isin(files, generated)
        pairs = np.unique(np.stack([files[mine], events["line"][mine]], axis=1), axis=0)
        tree = ModuleTree(edges, names)
        rows: dict[tuple[int, ...], None] = {}  # an ordered set
        for file, line in pairs.tolist():
            if (file, line) not in self._resolved:
                self._resolved[file, line] = self._resolve(file, line, names[file])
            for *what, module in self._resolved[file, line]:
                for living in self._graphs.modules_in_place(module, tree):
                    rows.setdefault((*what, living))
        return np.array([*rows], COMPILED_LINE)

    def _is_generated(self, name: str) -> bool:
        return (
            name.startswith(_FX_CODE)
            or self._graphs.lines(name) is not None
            or compiler.inductor_line_map(name) is not None
        )

    def _resolve(self, file: int, line: int, name: str) -> list[tuple[int, ...]]:
        """One row for each module that the line may belong to; one with module 0 if for none."""
        line_map = compiler.inductor_line_map(name)
        if line_map is None:
            origin = (self._graphs.lines(name) or {}).get(line)
            operator = origin.operator if origin else ""
        else:
            kernel = kernels_by_line(name).get(line, Kernel(""))
            operator = kernel.operator
            origin = self._stored_at(line_map, line, kernel)
        number = self._strings.number
        frame = user_frame(origin.stack) if origin else None
        source = (number(frame.file), frame.line, number(frame.function)) if frame else (-1, 0, -1)
        modules = origin.modules if origin else ()
        return [(file, line, number(operator), *source, module) for module in modules or (0,)]

    def _stored_at(
        self, line_map: tuple[Sequence[int], Sequence[str]], line: int, kernel: Kernel
    ) -> NodeOrigin | None:
        """Look a line up in inductor's map to stacks: an entry holds until the next one."""
        lines, stacks = line_map
        position = bisect_right(lines, line)
        stack = stacks[position - 1] if position else None
        return self._graphs.traced_at(stack, kernel.nodes) if stack else None
