"""FX graph with fake tensors -> StaticGraph.

Reads what tracing left on the nodes: ``meta["val"]`` (fake tensors, whose storages tell views from
new memory), ``nn_module_stack``, ``stack_trace``. Works on graphs of ``make_fx``, AOT joint graphs,
partitioned pairs and exported programs. Nothing is executed.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from pytest_torchmem.record.graphs.origin import module_path, operator_name, source_line
from pytest_torchmem.record.torch_api import dispatcher, fake_tensors, memory
from pytest_torchmem.values.contributors import Category, Phase
from pytest_torchmem.values.errors import EstimateError
from pytest_torchmem.values.static_graph import NodeKind, StaticGraph, StaticNode, StaticStorage

_KINDS = {
    "placeholder": NodeKind.INPUT,
    "get_attr": NodeKind.ATTRIBUTE,
    "output": NodeKind.OUTPUT,
}

# These return a view or a copy, whatever their schema says; only the fake tensors can tell.
_MAYBE_COPIES = frozenset(
    {
        "aten::reshape",
        "aten::contiguous",
        "aten::to",
        "aten::flatten",
        "aten::ravel",
        "aten::reshape_as",
        "aten::type_as",
        "aten::resolve_conj",
        "aten::resolve_neg",
    }
)

# How torch (2.9 and later) describes what an AOT graph's input or output is, by class name.
_DESCRIBED = {
    "ParamAOTInput": Category.PARAMETER,
    "BufferAOTInput": Category.BUFFER,
    "PlainAOTInput": Category.INPUT,
    "TangentAOTInput": Category.AUTOGRAD_DETAIL,
}


Graph: TypeAlias = torch.fx.Graph | torch.fx.GraphModule | torch.export.ExportedProgram


def is_graph(program: object) -> bool:
    """Return whether it is what `read_graph` takes."""
    return isinstance(program, Graph)


def read_graph(graph: object) -> StaticGraph:
    """Return what a graph does with memory.

    ``graph`` is a ``torch.fx.Graph``, a ``GraphModule`` or a ``torch.export.ExportedProgram``,
    whose signature says what placeholders are for. Raises `EstimateError` if the nodes carry no
    fake tensors.
    """
    return _read([(_graph_of(graph), Phase.FORWARD)], _signature(graph))[0]


def read_pair(forward: object, backward: object) -> tuple[StaticGraph, StaticGraph]:
    """Return a forward graph and its backward graph over one table of storages."""
    graphs = [(_graph_of(forward), Phase.FORWARD), (_graph_of(backward), Phase.BACKWARD)]
    read_forward, read_backward = _read(graphs, {})
    return read_forward, read_backward


def with_fx_nodes(graph: object, is_asked: Callable[[Any], bool]) -> Callable[[StaticNode], bool]:
    """A question to a ``torch.fx.Node``, to be asked of the `StaticNode` that was read from it."""
    nodes = {node.name: node for node in _graph_of(graph).nodes}
    return lambda node: is_asked(nodes[node.name])


def graph_nodes(nodes: Iterable[object]) -> torch.fx.Graph:
    """Return the graph that some nodes are part of. Raises `EstimateError` without any."""
    for node in nodes:
        return _graph_of(getattr(node, "graph", node))
    raise EstimateError("there is no node to tell the graph by")


def _graph_of(graph: object) -> torch.fx.Graph:
    inner = getattr(graph, "graph", graph)
    if not isinstance(inner, torch.fx.Graph):
        raise EstimateError(
            f"cannot read a {type(graph).__name__} as a graph; give a torch.fx.Graph, a "
            "GraphModule or an ExportedProgram"
        )
    return inner


def _signature(program: object) -> dict[str, Category]:
    """Return the category of each input of an exported program, by node name."""
    signature = getattr(program, "graph_signature", None)
    kinds = {"PARAMETER": Category.PARAMETER, "BUFFER": Category.BUFFER}
    return {
        spec.arg.name: kinds.get(spec.kind.name, Category.INPUT)
        for spec in getattr(signature, "input_specs", ())
        if hasattr(spec.arg, "name")
    }


def _read(
    graphs: list[tuple[torch.fx.Graph, Phase]], categories: Mapping[str, Category]
) -> list[StaticGraph]:
    table = _StorageTable()
    read = []
    for graph, phase in graphs:
        _require_fakes(graph)
        reader = _FxReader(graph, phase, categories, table)
        read.append(tuple(reader.node(node) for node in graph.nodes))
    return [StaticGraph(nodes, tuple(table.storages)) for nodes in read]


def _require_fakes(graph: torch.fx.Graph) -> None:
    calls = [n for n in graph.nodes if n.op.startswith("call_")]
    bare = next((n for n in calls if _value(n) is None and n.users), None)
    if bare is not None and all(_value(n) is None for n in calls):
        raise EstimateError(
            f"the graph's nodes carry no fake tensors ({bare.name} has no meta['val']), so their "
            "sizes are unknown; trace with make_fx(..., tracing_mode='fake'), export the module, "
            "or run torch.fx.passes.fake_tensor_prop.FakeTensorProp over the graph first"
        )


def _value(node: torch.fx.Node) -> Any:
    """The fake value of a node: AOT and export call it ``val``, dynamo ``example_value``."""
    return node.meta.get("val", node.meta.get("example_value"))


@dataclass(slots=True)
class _StorageTable:
    """Numbers storages; one table serves all graphs that share tensors."""

    storages: list[StaticStorage] = field(default_factory=list)
    numbers: dict[tuple[int, str], int] = field(default_factory=dict)
    # An address is an identity only while its storage lives.
    alive: list[torch.UntypedStorage] = field(default_factory=list)

    def add(self, key: tuple[int, str], tensor: torch.Tensor, category: Category) -> int:
        size = fake_tensors.size_hint(tensor.untyped_storage().nbytes())
        self.storages.append(StaticStorage(size, key[1], category))
        return self.alias(key, tensor, len(self.storages) - 1)

    def alias(self, key: tuple[int, str], tensor: torch.Tensor, number: int) -> int:
        self.alive.append(tensor.untyped_storage())
        self.numbers[key] = number
        return number


def _key(tensor: torch.Tensor) -> tuple[int, str]:
    return memory.storage_key(tensor), str(tensor.device)


class _FxReader:
    """Reads the nodes of one graph, in order."""

    def __init__(
        self,
        graph: torch.fx.Graph,
        phase: Phase,
        categories: Mapping[str, Category],
        table: _StorageTable,
    ) -> None:
        self._phase = phase
        self._categories = categories
        self._table = table
        self._attributes = graph.owning_module
        self._seen_storages: set[int] = set()
        self._holds: dict[torch.fx.Node, tuple[int, ...]] = {}
        self._in_backward: set[torch.fx.Node] = set()

    def node(self, node: torch.fx.Node) -> StaticNode:
        kind = _KINDS.get(node.op, NodeKind.OPERATOR)
        # The output node repeats its arguments in its value; it makes nothing.
        tensors = [] if kind is NodeKind.OUTPUT else self._tensors(node)
        holds = tuple(
            dict.fromkeys(self._number(node, kind, i, tensor) for i, tensor in enumerate(tensors))
        )
        self._holds[node] = holds
        makes = tuple(s for s in holds if s not in self._seen_storages)
        self._seen_storages.update(makes)
        inputs = (s for n in node.all_input_nodes for s in self._holds[n])
        uses = holds if kind is NodeKind.INPUT else tuple(dict.fromkeys(inputs))
        return StaticNode(
            name=node.name,
            kind=kind,
            operator=operator_name(node) if kind is NodeKind.OPERATOR else "",
            module=module_path(node),
            source=source_line(node),
            phase=self._phase_of(node),
            makes=makes,
            uses=uses,
            writes=tuple(s for s in holds if s in uses)
            if dispatcher.writes_in_place(node.target)
            else (),
        )

    def _tensors(self, node: torch.fx.Node) -> list[torch.Tensor]:
        value = _value(node)
        if value is None and node.op == "get_attr" and self._attributes is not None:
            value = _attribute(self._attributes, node.target)
        return [leaf for leaf in fake_tensors.leaves(value) if isinstance(leaf, torch.Tensor)]

    def _number(
        self, node: torch.fx.Node, kind: NodeKind, position: int, tensor: torch.Tensor
    ) -> int:
        # A fake tensor takes its time to say on which device it is.
        key = _key(tensor)
        number = self._table.numbers.get(key)
        if number is not None:
            return number
        if kind is NodeKind.OPERATOR:
            aliased = self._aliased(node, position)
            if aliased is not None:
                return self._table.alias(key, tensor, aliased)
            return self._table.add(key, tensor, Category.UNKNOWN)
        return self._table.add(key, tensor, self._given_category(node, kind, tensor))

    def _aliased(self, node: torch.fx.Node, position: int) -> int | None:
        """The storage an unknown one stands for: a graph that was saved and loaded has fake tensors
        that no longer share storages, and real attributes never share with fakes."""
        if node.target is operator.getitem:
            return self._claimed(node.args[0], node.args[1])
        if operator_name(node) in _MAYBE_COPIES:
            return None
        # A view with many outputs (split) has one return, the list.
        output = 0 if dispatcher.is_view(node.target) else position
        name = dispatcher.aliased_argument(node.target, output)
        if name is None:
            return None
        names = [a.name for a in dispatcher.schema_of(node.target).arguments]
        place = names.index(name)
        given = node.args[place] if place < len(node.args) else node.kwargs.get(name)
        storages = self._holds.get(given, ()) if isinstance(given, torch.fx.Node) else ()
        return storages[0] if storages else None

    def _claimed(self, source: Any, key: Any) -> int | None:
        """The storage of one element of an operator with many outputs."""
        try:
            element = _value(source)[key]
        except (TypeError, KeyError, IndexError):
            return None
        tensors = [t for t in fake_tensors.leaves(element) if isinstance(t, torch.Tensor)]
        return self._table.numbers.get(_key(tensors[0])) if len(tensors) == 1 else None

    def _given_category(
        self, node: torch.fx.Node, kind: NodeKind, tensor: torch.Tensor
    ) -> Category:
        if node.name in self._categories:
            return self._categories[node.name]
        described = _DESCRIBED.get(type(node.meta.get("desc")).__name__)
        if described is not None:
            return described
        if kind is NodeKind.ATTRIBUTE:
            held = tensor if self._attributes is None else _attribute(self._attributes, node.target)
            is_parameter = isinstance(held, torch.nn.Parameter)
            return Category.PARAMETER if is_parameter else Category.BUFFER
        if node.name.startswith("tangents"):
            return Category.AUTOGRAD_DETAIL
        # What a lone backward graph takes besides primals and tangents, its forward saved.
        if self._phase is Phase.BACKWARD and not node.name.startswith("primals"):
            return Category.ACTIVATION
        return Category.INPUT

    def _phase_of(self, node: torch.fx.Node) -> Phase:
        """In a joint graph, whatever depends on a tangent is backward."""
        tangent = node.op == "placeholder" and node.name.startswith("tangents")
        tagged = node.meta.get("partitioner_tag") == "is_backward"
        # make_fx (torch 2.10 and later) marks what the autograd engine called.
        tagged = tagged or bool(node.meta.get("autograd_backward"))
        if tangent or tagged or any(n in self._in_backward for n in node.all_input_nodes):
            self._in_backward.add(node)
            return Phase.BACKWARD
        return self._phase


def _attribute(module: object, path: object) -> object:
    for name in str(path).split("."):
        module = getattr(module, name, None)
    return module


def devices_of(graphs: Iterable[StaticGraph]) -> list[str]:
    """The devices of a graph's storages, the one with the most bytes first."""
    amounts = Counter[str]()
    for storage in (s for graph in graphs for s in graph.storages):
        amounts[storage.device] += storage.size_bytes
    return [device for device, _ in amounts.most_common()]
