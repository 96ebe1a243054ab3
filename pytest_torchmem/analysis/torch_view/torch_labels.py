"""torch's own labels: seven passes over the data-flow graph, with torch's results.

These are the labels of ``torch/profiler/_memory_profiler.py``, kept as a reference and for people
who compare with what they recorded before. For labels to rely on see `categories`.

A label is set for an id, for a key or for one version of a key, and looked up in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pytest_torchmem.analysis.torch_view.data_flow import DataFlowGraph
from pytest_torchmem.values.contributors import Category
from pytest_torchmem.values.trace import EventKind, Role, Scope

TorchPass: TypeAlias = "Callable[[FlowLists, TorchLabels], Iterator[TorchClaim]]"

#: What torch calls None.
NOTHING: Final = Category.UNKNOWN.column
_GRADIENT: Final = Category.GRADIENT.column
_PARAMETER: Final = Category.PARAMETER.column
_INPUT: Final = Category.INPUT.column
_ACTIVATION: Final = Category.ACTIVATION.column
_TEMPORARY: Final = Category.TEMPORARY.column
_AUTOGRAD_DETAIL: Final = Category.AUTOGRAD_DETAIL.column


@dataclass(frozen=True, slots=True, eq=False)
class TorchLabels:
    """Labels as column numbers, `NOTHING` where there is none.

    Attributes:
        by_id: uint8, shape (I,), one for each tensor id from 0 to the largest.
        by_key: uint8, shape (K,), one for each tensor key.
        by_version: uint8, shape (W,), one for each version of each key.
    """

    by_id: NDArray[np.uint8]
    by_key: NDArray[np.uint8]
    by_version: NDArray[np.uint8]

    def of_versions(self, graph: DataFlowGraph) -> NDArray[np.uint8]:
        """The label of each version, after looking at id, key and version: uint8, shape (W,)."""
        offsets = graph.version_offset
        key = np.repeat(np.arange(len(graph.keys)), np.diff(offsets))
        of_id = self.by_id[graph.keys.id[key]]
        of_key = np.where(of_id != NOTHING, of_id, self.by_key[key])
        return np.where(of_key != NOTHING, of_key, self.by_version)

    def unlabelled(self, versions: Iterable[int]) -> NDArray[np.bool_]:
        """Return which of some versions have no label of their own: bool, shape (W,)."""
        mask = np.zeros(len(self.by_version), np.bool_)
        mask[list(versions)] = True
        mask &= self.by_version == NOTHING
        return mask


class TorchClaim(NamedTuple):
    """A pass's word: these ids, keys or versions, by number or as a mask, have a label."""

    level: Literal["by_id", "by_key", "by_version"]
    where: NDArray[np.int64] | NDArray[np.bool_]
    category: Category


def _by_owner(owner: NDArray[np.int64], values: NDArray[np.int64], count: int) -> list[list[int]]:
    """The values of each owner from 0 to ``count``; ``owner`` is ascending."""
    listed = values.tolist()
    starts = np.searchsorted(owner, np.arange(count + 1)).tolist()
    return [listed[start:end] for start, end in pairwise(starts)]


class FlowLists:
    """A data-flow graph as lists per node: what a walk over the nodes in order needs."""

    def __init__(self, graph: DataFlowGraph) -> None:
        self.graph = graph
        self.count = len(graph.node_event)
        self.in_backward: list[bool] = graph.in_backward.tolist()

    @cached_property
    def inputs(self) -> list[list[int]]:
        """For each node the numbers of the versions it takes in."""
        rows = self.graph.is_input
        return _by_owner(self.graph.node[rows], self.graph.version_in[rows], self.count)

    @cached_property
    def outputs(self) -> list[list[int]]:
        """For each node the numbers of the versions it brings out."""
        rows = self.graph.is_output
        return _by_owner(self.graph.node[rows], self.graph.version_out[rows], self.count)

    @cached_property
    def id_of_version(self) -> NDArray[np.int64]:
        graph = self.graph
        key = np.repeat(np.arange(len(graph.keys)), np.diff(graph.version_offset))
        return graph.keys.id[key]

    def ids_of(self, *roles: Role) -> NDArray[np.int64]:
        """Ids of the tensors mentioned in any of ``roles``."""
        tensors = self.graph.tree.trace.tensors
        in_role = np.logical_or.reduce([tensors["role"] == role for role in roles])
        ids: NDArray[np.int64] = tensors["id"][in_role & tensors["keyed"]]
        return ids

    def depends_on_gradient(self, labels: TorchLabels) -> NDArray[np.bool_]:
        """Ids of which any version depends on a gradient or a parameter: bool, shape (I,).

        Not a matter of order: an id that comes to depend late makes every node that ever read it
        depend. So this is reachability, from ids to the nodes that read them to what these make.
        """
        rows = self.graph.is_input
        versions = labels.of_versions(self.graph)
        seeds = (versions == _GRADIENT) | (versions == _PARAMETER)
        reached = np.zeros(len(labels.by_id), np.bool_)
        read = self.graph.version_in[rows]
        reached[self.id_of_version[read[seeds[read]]]] = True
        readers, makes = self._readers, self._makes
        visited, is_reached = [False] * self.count, reached.tolist()
        waiting = [node for start in np.flatnonzero(reached).tolist() for node in readers[start]]
        while waiting:
            node = waiting.pop()
            if not visited[node]:
                visited[node] = True
                for made_id in makes[node]:
                    if not is_reached[made_id]:
                        is_reached[made_id] = True
                        waiting += readers[made_id]
        return np.array(is_reached, np.bool_)

    @cached_property
    def _readers(self) -> list[list[int]]:
        """For each id the nodes that take in any version of it."""
        rows = self.graph.is_input
        ids = self.id_of_version[self.graph.version_in[rows]]
        by_id = np.argsort(ids, kind="stable")
        count = int(self.id_of_version.max(initial=-1)) + 1
        return _by_owner(ids[by_id], self.graph.node[rows][by_id], count)

    @cached_property
    def _makes(self) -> list[list[int]]:
        """For each node the ids of the versions it brings out."""
        rows = self.graph.is_output
        ids = self.id_of_version[self.graph.version_out[rows]]
        return _by_owner(self.graph.node[rows], ids, self.count)


def set_gradients_and_temporaries(flow: FlowLists, _: TorchLabels) -> Iterator[TorchClaim]:
    """``.grad`` as the Python tracer saw it, what AccumulateGrad keeps, scratch inside nodes."""
    graph = flow.graph
    yield TorchClaim("by_id", _accumulated_ids(graph), Category.GRADIENT)
    gradient_ids = flow.ids_of(Role.MODULE_GRADIENT, Role.OPTIMIZER_GRADIENT)
    yield TorchClaim("by_id", gradient_ids, Category.GRADIENT)
    yield TorchClaim("by_key", graph.key[graph.is_intermediate], Category.TEMPORARY)


def _accumulated_ids(graph: DataFlowGraph) -> NDArray[np.int64]:
    trace = graph.tree.trace
    events, tensors = trace.events, trace.tensors
    names = {name: number for number, name in enumerate(trace.strings)}
    node_name = names.get("torch::autograd::AccumulateGrad", -2)
    keeping = [names.get(name, -2) for name in ("aten::detach", "aten::add_")]
    is_node = (events["name"] == node_name) & (events["scope"] == Scope.BACKWARD_FUNCTION)
    rows = np.arange(len(events))
    parent = events["parent"]
    first_child = (parent == rows - 1) & (parent >= 0)
    kept = (
        first_child
        & is_node[parent]
        & (events["kind"] == EventKind.TORCH_OP)
        & np.isin(events["name"], keeping)
    )
    first = (tensors["role"] == Role.OPERATOR_INPUT) & (tensors["argument"] == 0)
    ids: NDArray[np.int64] = tensors["id"][first & kept[tensors["event"]] & tensors["keyed"]]
    return ids


def set_parameters_using_python_tracer(flow: FlowLists, _: TorchLabels) -> Iterator[TorchClaim]:
    """Modules and optimizers name their parameters."""
    ids = flow.ids_of(Role.MODULE_PARAMETER, Role.OPTIMIZER_PARAMETER)
    yield TorchClaim("by_id", ids, Category.PARAMETER)


def set_inputs(flow: FlowLists, labels: TorchLabels) -> Iterator[TorchClaim]:
    """An input helps to make a gradient and does not depend on one."""
    graph = flow.graph
    version_labels = labels.of_versions(graph)
    produces = set(
        np.flatnonzero((version_labels == _GRADIENT) | (version_labels == _PARAMETER)).tolist()
    )
    members: set[int] = set()
    for taken, made in zip(reversed(flow.inputs), reversed(flow.outputs), strict=True):
        if not (produces.isdisjoint(taken) and produces.isdisjoint(made)):
            produces.update(taken, made)
            members.update(taken, made)
    candidates = labels.unlabelled(members)
    made_in_backward = graph.is_output & graph.in_backward[graph.node]
    candidates[graph.version_out[made_in_backward]] = False
    candidates &= ~flow.depends_on_gradient(labels)[flow.id_of_version]
    yield TorchClaim("by_version", candidates, Category.INPUT)


def set_parameters_using_data_flow(flow: FlowLists, labels: TorchLabels) -> Iterator[TorchClaim]:
    """Parameters that no module and no optimizer named.

    They meet data in the forward pass, help to make a gradient, and depend on one.
    """
    version_labels = labels.of_versions(flow.graph)
    gradient = set(np.flatnonzero(version_labels == _GRADIENT).tolist())
    forward = set(np.flatnonzero(version_labels == _INPUT).tolist())
    candidates: set[int] = set()
    nodes = zip(flow.inputs, flow.outputs, flow.in_backward, strict=True)
    for taken, made, in_backward in nodes:
        if in_backward or forward.isdisjoint(taken):
            continue
        if gradient.isdisjoint(taken) and gradient.isdisjoint(made):
            forward.update(made)
            candidates |= set(taken) - forward
    used = set(gradient)
    for taken, made in zip(reversed(flow.inputs), reversed(flow.outputs), strict=True):
        if not used.isdisjoint(made):
            used.update(taken)
    mask = np.zeros(len(labels.by_id), np.bool_)
    mask[flow.id_of_version[list(candidates & used)]] = True
    mask &= flow.depends_on_gradient(labels)
    yield TorchClaim("by_id", mask, Category.PARAMETER)


def set_activations(flow: FlowLists, labels: TorchLabels) -> Iterator[TorchClaim]:
    """Everything that the forward pass makes from inputs, parameters and temporaries."""
    version_labels = labels.of_versions(flow.graph).tolist()
    versions: list[int] = []
    required = {_INPUT, _ACTIVATION}
    allowed = required | {_PARAMETER, _TEMPORARY}
    for taken, made, in_backward in zip(flow.inputs, flow.outputs, flow.in_backward, strict=True):
        if in_backward:
            continue
        categories = {version_labels[version] for version in taken}
        if categories & required and categories <= allowed:
            versions += made
            for version in made:
                if version_labels[version] == NOTHING:
                    version_labels[version] = _ACTIVATION
    yield TorchClaim("by_version", labels.unlabelled(versions), Category.ACTIVATION)


def set_optimizer_state(flow: FlowLists, _: TorchLabels) -> Iterator[TorchClaim]:
    """The Python tracer found it in an optimizer's state."""
    yield TorchClaim("by_id", flow.ids_of(Role.OPTIMIZER_STATE), Category.OPTIMIZER_STATE)


def set_autograd_detail(flow: FlowLists, labels: TorchLabels) -> Iterator[TorchClaim]:
    """The backward pass makes it, and no other pass explains it."""
    graph = flow.graph
    version_labels = labels.of_versions(graph).tolist()
    versions: list[int] = []
    prior = (NOTHING, _AUTOGRAD_DETAIL)
    rows = np.flatnonzero(graph.is_output & graph.in_backward[graph.node])
    first = (graph.version_out[rows] == graph.version_offset[graph.key[rows]]).tolist()
    for version, is_first in zip(graph.version_out[rows].tolist(), first, strict=True):
        if is_first or version_labels[version - 1] in prior:
            versions.append(version)
            if version_labels[version] == NOTHING:
                version_labels[version] = _AUTOGRAD_DETAIL
    yield TorchClaim("by_version", labels.unlabelled(versions), Category.AUTOGRAD_DETAIL)


TORCH_PASSES: Final[tuple[TorchPass, ...]] = (
    set_gradients_and_temporaries,
    set_parameters_using_python_tracer,
    set_inputs,
    set_parameters_using_data_flow,
    set_activations,
    set_optimizer_state,
    set_autograd_detail,
)


def label_versions(graph: DataFlowGraph) -> TorchLabels:
    """Return torch's labels for every version in the graph."""
    ids = int(graph.keys.id.max()) + 1 if len(graph.keys) else 0
    labels = TorchLabels(
        by_id=np.full(ids, NOTHING, np.uint8),
        by_key=np.full(len(graph.keys), NOTHING, np.uint8),
        by_version=np.full(int(graph.version_offset[-1]), NOTHING, np.uint8),
    )
    flow = FlowLists(graph)
    for torch_pass in TORCH_PASSES:
        for level, where, category in torch_pass(flow, labels):
            getattr(labels, level)[where] = category.column
    return labels
