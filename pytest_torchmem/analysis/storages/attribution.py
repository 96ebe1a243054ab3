"""The origin of a storage: operator, module, source line, phase, labels; in compiled code, too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pytest_torchmem.analysis.events import op_tree
from pytest_torchmem.analysis.events.op_tree import BACKWARD, PHASES, Annotations, ModulePaths
from pytest_torchmem.analysis.storages.evidence import Evidence
from pytest_torchmem.values.contributors import Category, Contributor, Phase, Source, common_module
from pytest_torchmem.values.packed import Column, PackedColumn, by_row
from pytest_torchmem.values.trace import EventKind, Ownership, Scope


@dataclass(frozen=True, slots=True)
class CompiledLine:
    """The operator, source and modules that a line of generated code stands for.

    Attributes:
        operator: The operator, or several joined by ``+``; empty if the events name it themselves.
        source: The user's line that was compiled into it; None if there is no such line.
        modules: ``id()`` of each module that it may have been traced in.
    """

    operator: str
    source: Source | None
    modules: tuple[int, ...]


# Operators that do nothing but allocate: whoever called them is the one to name.
_ALLOCATORS: Final = ("aten::empty", "aten::new_empty", "aten::resize_", "aten::set_")
# Annotations that torch writes itself.
_OWN_ANNOTATIONS: Final = (
    "Optimizer.",
    "##",
    "PythonDispatchMode",
    "PythonSubclass",
    "Torch-Compiled Region",
    "TorchDynamo ",
    "pytest-torchmem ",
)
# What a compiler puts between the user's code and the code it generated.
_COMPILED_GRAPH: Final = "GraphModule"
_CATEGORIES: Final = tuple(Category)
# Up to Python 3.11 it takes longer to look up a member of an enum than to compare two numbers.
_TORCH_OP: Final = int(EventKind.TORCH_OP)
_ALLOCATION: Final = int(EventKind.ALLOCATION)
_PY_CALL: Final = int(EventKind.PY_CALL)
_BACKWARD_FUNCTION: Final = int(Scope.BACKWARD_FUNCTION)
# So many origins are remembered: several windows ask for those of what was alive in them.
_MOST_ORIGINS: Final = 4096
_OWNED: Final = {
    Category.PARAMETER: Ownership.PARAMETER,
    Category.BUFFER: Ownership.BUFFER,
    Category.GRADIENT: Ownership.GRADIENT,
}


def grouped(
    storages: Iterable[int], origin_of: Callable[[int], Contributor]
) -> Iterator[tuple[Contributor, NDArray[np.int64]]]:
    """Yield each origin, as a contributor of no bytes, and which storages are from there."""
    groups: dict[Contributor, list[int]] = defaultdict(list)
    for storage in storages:
        groups[origin_of(storage)].append(storage)
    yield from ((origin, np.array(members, np.int64)) for origin, members in groups.items())


class _Columns(NamedTuple):
    """Columns of `trace.EVENT`: to take one out of the table for each row would cost more."""

    kind: Column | PackedColumn
    file: Column | PackedColumn
    line: Column | PackedColumn
    name: Column | PackedColumn
    scope: Column | PackedColumn
    is_operator: Column | PackedColumn
    parent: Column | PackedColumn
    sequence: Column | PackedColumn


@dataclass(frozen=True, eq=False)
class Attribution:
    """Finds the origin of storages and groups them by it.

    Attributes:
        evidence: Facts about the storages.
        labels: Their categories: uint8, shape (S,), each a column number.
        claimed: The reason of each storage whose category a user's pass decided.
    """

    evidence: Evidence
    labels: NDArray[np.uint8]
    claimed: Mapping[int, str] = field(default_factory=dict)
    _origins: dict[int, Contributor] = field(default_factory=dict, init=False)
    _distinct: dict[Contributor, Contributor] = field(default_factory=dict, init=False)
    _users_files: dict[int, bool] = field(default_factory=dict, init=False)

    def contributors(self, storages: Sequence[int]) -> tuple[Contributor, ...]:
        """Group storages by category and origin, largest group first."""
        table, rows = self.evidence.storages, np.array(storages, np.int64)
        # By identity: an origin has ten fields, and there is one of a kind.
        groups: dict[int, tuple[Contributor, list[int], list[int]]] = {}
        sizes, births = table.size_bytes[rows].tolist(), table.born[rows].tolist()
        for storage, size_bytes, born in zip(storages, sizes, births, strict=True):
            origin = self.origin(storage)
            _, members, began = groups.setdefault(id(origin), (origin, [], []))
            members.append(size_bytes)
            began.append(born)
        contributors = [
            origin.holding(sum(members), len(members), max(0, min(began)))
            for origin, members, began in groups.values()
        ]
        contributors.sort(
            key=lambda g: (-g.size_bytes, g.identity, g.source.line if g.source else 0)
        )
        return tuple(contributors)

    def contributor(self, storage: int) -> Contributor:
        """Return one storage as a contributor."""
        return self.contributors([storage])[0]

    def origin(self, storage: int) -> Contributor:
        """Return a storage's category and origin, without its bytes; equal ones are one object."""
        origin = self._origins.get(storage)
        if origin is None:
            origin = self._find_origin(storage)
            origin = self._distinct.setdefault(origin, origin)
            if len(self._origins) < _MOST_ORIGINS:
                self._origins[storage] = origin
        return origin

    def _find_origin(self, storage: int) -> Contributor:
        category = _CATEGORIES[int(self.labels[storage])]
        name = self._held_names.get((storage, _OWNED[category])) if category in _OWNED else None
        event = int(self.evidence.storages.event[storage])
        if event < 0 or not self.evidence.made[storage]:
            module, claimed = name or "", self.claimed.get(storage, "")
            return Contributor(category, 0, 0, "", module, None, Phase.PREEXISTING, claimed=claimed)
        chain = self._chain(event)
        anchor = self._anchor(event, chain)
        around = chain if anchor is None else self._chain(anchor)
        compiled, depth = self._compiled_call(chain)
        traced = compiled or self._compiled_call(around)[0]
        return Contributor(
            category,
            size_bytes=0,
            count=0,
            operator=self._operator(chain, compiled, depth),
            module=name or self._traced_module(traced, event) or self._module(around),
            source=(compiled and compiled.source)
            or self._source(self._within_node(chain) if anchor is not None else [])
            or self._source(around)
            or self._source(chain)
            or self._source(self._waiting(event)),
            phase=PHASES[int(self.evidence.tree.phase[event])],
            labels=self._labels(event),
            claimed=self.claimed.get(storage, ""),
        )

    def stack(self, storage: int) -> tuple[Source, ...]:
        """Return the Python calls around an allocation, innermost first; () where none is known.

        In a backward pass they are those of the forward operator. The outermost one is a function
        of the user's: what called that, a test runner for instance, explains nothing.
        """
        event = int(self.evidence.storages.event[storage])
        if event < 0 or not self.evidence.made[storage]:
            return ()
        chain = self._chain(event)
        anchor = self._anchor(event, chain)
        columns, strings = self._columns, self.evidence.tree.trace.strings
        frames: list[Source] = []
        users = 0
        for row, file, line, _ in self._calls(chain if anchor is None else self._chain(anchor)):
            if file >= 0:
                frames.append(Source(strings[file], line, strings[columns.name[row]]))
                own = self._is_users(file) and "site-packages" not in strings[file]
                users = len(frames) if own else users
        return tuple(frames[:users])

    def _calls(self, chain: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
        """Yield the Python calls in a chain: row, file, line, and how far out each is."""
        kinds, files, lines, below = *self._columns[:3], -1
        for depth, row in enumerate(chain):
            if kinds[row] == _PY_CALL:
                yield row, int(files[row]), int(lines[below]) if below >= 0 else 0, depth
            below = row

    def _waiting(self, event: int) -> list[int]:
        """Return the chain of the call that waits while a thread of the engine's allocates.

        On a GPU a backward pass runs on such a thread, and no Python call is around its events.
        """
        tree = self.evidence.tree
        if tree.phase[event] != BACKWARD:
            return []
        events, rows = tree.trace.events, self._engine_calls
        before = int(np.searchsorted(tree.rank[rows], tree.rank[event]))
        open_ = rows[:before][events["end_ns"][rows[:before]] >= events["start_ns"][event]]
        return self._chain(int(open_[-1])) if len(open_) else []

    @cached_property
    def _engine_calls(self) -> NDArray[np.intp]:
        rows = np.flatnonzero(op_tree.calls_of_engine(self.evidence.tree))
        return rows[np.argsort(self.evidence.tree.rank[rows])]

    @cached_property
    def _columns(self) -> _Columns:
        events = self.evidence.tree.trace.events
        return _Columns(*(by_row(events, name) for name in _Columns._fields))

    def _chain(self, event: int) -> list[int]:
        """The event and those around it, innermost first."""
        chain = []
        parents = self._columns.parent
        while event >= 0:
            chain.append(event)
            event = int(parents[event])
        return chain

    def _anchor(self, event: int, chain: list[int]) -> int | None:
        """The forward operator that a backward allocation belongs to.

        Autograd gives a node the sequence number of the operator that made it. The node that
        accumulates into a leaf has none: it runs right after the one that hands the gradient to it.
        """
        if self.evidence.tree.phase[event] != BACKWARD:
            return None
        node = len(self._within_node(chain))
        if node == len(chain):
            return None
        row, nodes, parents = chain[node], self._nodes, self._columns.parent
        if self._columns.sequence[row] < 0 and (before := int(np.searchsorted(nodes, row))):
            handed_by = int(nodes[before - 1])
            same_pass = parents[parents[handed_by]] == parents[parents[row]]
            row = handed_by if same_pass else row
        return self._forward_of.get(int(self._columns.sequence[row]))

    def _within_node(self, chain: list[int]) -> list[int]:
        """Return the part of a chain within a node: its backward pass, where that is in Python."""
        sequences, scopes = self._columns.sequence, self._columns.scope
        return list(
            takewhile(lambda row: sequences[row] < 0 and scopes[row] != _BACKWARD_FUNCTION, chain)
        )

    @cached_property
    def _nodes(self) -> NDArray[np.intp]:
        events = self.evidence.tree.trace.events
        return np.flatnonzero((events["scope"] == _BACKWARD_FUNCTION) & (events["sequence"] >= 0))

    @cached_property
    def _forward_of(self) -> dict[int, int]:
        tree = self.evidence.tree
        sequences = tree.trace.events["sequence"]
        rows = np.flatnonzero((sequences >= 0) & (tree.phase != BACKWARD))
        rows = rows[np.argsort(tree.rank[rows])]
        return dict(zip(sequences[rows].tolist(), rows.tolist(), strict=True))

    @cached_property
    def _compiled(self) -> dict[tuple[int, int], CompiledLine]:
        """The meaning of each generated line, by the number of its file and its own."""
        lines_by_place: dict[tuple[int, int], CompiledLine] = {}
        trace = self.evidence.tree.trace
        strings = trace.strings
        for row in trace.compiled_lines.tolist():
            file, line, operator, source_file, source_line, function, module = row
            before = lines_by_place.get((file, line))
            modules = (*(before.modules if before else ()), *((module,) if module else ()))
            source = None
            if source_file >= 0:
                source = Source(strings[source_file], source_line, strings[function])
            lines_by_place[file, line] = CompiledLine(strings[operator], source, modules)
        return lines_by_place

    @cached_property
    def _compiled_files(self) -> frozenset[int]:
        return frozenset(file for file, _ in self._compiled)

    def _compiled_call(self, chain: list[int]) -> tuple[CompiledLine | None, int]:
        """The innermost generated line around an event, and how far out in its chain that is."""
        for _, file, line, depth in self._calls(chain) if self._compiled else ():
            if compiled_line := self._compiled.get((file, line)):
                return compiled_line, depth
        return None, 0

    def _operator(self, chain: list[int], compiled: CompiledLine | None, depth: int) -> str:
        """The operator that a line of the user's called; in generated code what the line is for."""
        if compiled is None or not compiled.operator:
            return self._recorded_operator(chain)
        operator = self._recorded_operator(chain[:depth])
        makes = operator and not operator.startswith(_ALLOCATORS)
        return operator if makes else compiled.operator

    def _recorded_operator(self, chain: list[int]) -> str:
        """The outermost operator around an allocation that one line of Python, or a node, called.

        ``relu`` and not the ``clamp_min`` that it calls: a reader looks for it in the source.
        """
        columns, strings = self._columns, self.evidence.tree.trace.strings
        path = ""
        for row in chain:
            kind = columns.kind[row]
            if kind != _TORCH_OP:
                if path and kind != _ALLOCATION:
                    break
                continue
            is_node = columns.scope[row] == _BACKWARD_FUNCTION
            if not columns.is_operator[row] and not is_node:
                continue
            if is_node and path and not path.startswith(_ALLOCATORS):
                break
            path = strings[columns.name[row]]
        return path

    def _module(self, chain: list[int]) -> str:
        tree = self.evidence.tree
        row = chain[0]
        while row >= 0 and (call := int(self.evidence.module_call[row])) >= 0:
            path = self._paths.path(self._module_by_call[call], float(tree.rank[call]))
            if path != _COMPILED_GRAPH:
                return op_tree.folded(path)
            row = int(self._columns.parent[call])
        return ""

    def _traced_module(self, traced: CompiledLine | None, event: int) -> str:
        """The module that compiled code was traced in; what all have in common if it may be any.

        The graph of a model that is gone may be there still. The recording knows none of its
        modules.
        """
        if traced is None:
            return ""
        rank = float(self.evidence.tree.rank[event])
        paths = (self._paths.path(module, rank) for module in traced.modules)
        return common_module(op_tree.folded(path) for path in paths if path)

    @cached_property
    def _module_by_call(self) -> dict[int, int]:
        calls = self.evidence.tree.trace.module_calls
        return dict(zip(calls["event"].tolist(), calls["module"].tolist(), strict=True))

    @cached_property
    def _paths(self) -> ModulePaths:
        return ModulePaths(self.evidence.tree)

    def _source(self, chain: list[int]) -> Source | None:
        strings = self.evidence.tree.trace.strings
        for row, file, line, _ in self._calls(chain):
            compiled = self._compiled.get((file, line))
            if compiled is not None and compiled.source is not None:
                return compiled.source
            if file >= 0 and self._is_users(file):
                return Source(strings[file], line, strings[self._columns.name[row]])
        return None

    def _is_users(self, file: int) -> bool:
        """Return whether the file with that number is the user's."""
        is_users = self._users_files.get(file)
        if is_users is None:
            text = self.evidence.tree.trace.strings[file]
            is_users = self._users_files[file] = (
                text.endswith(".py")
                and file not in self._compiled_files
                and not text.startswith(self._libraries)
                and "torchinductor" not in text
            )
        return is_users

    @cached_property
    def _libraries(self) -> tuple[str, ...]:
        folders = self.evidence.tree.trace.meta.get("library_paths", [])
        return (*(f"{folder.rstrip('/')}/" for folder in folders), "<", "torch/")

    def _labels(self, event: int) -> tuple[str, ...]:
        trace = self.evidence.tree.trace
        rows = self._annotations.around(float(self.evidence.tree.rank[event]))
        names = (trace.strings[self._columns.name[row]] for row in rows)
        return tuple(name for name in names if not name.startswith(_OWN_ANNOTATIONS))

    @cached_property
    def _annotations(self) -> Annotations:
        return Annotations(self.evidence.tree)

    @cached_property
    def _held_names(self) -> dict[tuple[int, int], str]:
        """The name under which a module holds a storage, by storage and kind of holding.

        A module made in the body gets its place in the model only later. So its path is that of the
        moment when the tensor dies, or the module before it.
        """
        tree = self.evidence.tree
        owners = tree.trace.owners
        died = np.minimum(self.evidence.storages.died, self.evidence.window.end)
        of_owner = self.evidence.storages.of_owner
        names: dict[tuple[int, int], str] = {}
        rows = np.flatnonzero((owners["module"] > 0) & (of_owner >= 0))
        storages = of_owner[rows]
        named = (owners[c][rows] for c in ("module", "name", "kind", "mark"))
        columns = (c.tolist() for c in (storages, died[storages], *named))
        noted: set[tuple[int, ...]] = set()
        for storage, rank, module, name, kind, mark in zip(*columns, strict=True):
            # Each backward pass notes again what modules hold.
            holding = (storage, module, name, kind, self._paths.end(module, mark))
            if holding in noted:
                continue
            noted.add(holding)
            path = self._paths.path(module, rank, mark)
            text = op_tree.folded(f"{path}.{tree.trace.strings[name]}")
            key = (storage, kind)
            names[key] = min(text, names.get(key, text))
        return names
