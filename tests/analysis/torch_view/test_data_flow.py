"""The data-flow graph: a line for each node, and the checks that torch makes of its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pytest_torchmem.analysis.events.op_tree import build_op_tree
from pytest_torchmem.analysis.storages.timeline import Timeline
from pytest_torchmem.analysis.torch_view.data_flow import DataFlowGraph, build_data_flow
from pytest_torchmem.analysis.torch_view.torch_timeline import (
    TORCH_ORDER,
    Action,
    TorchMemoryProfile,
    coalesced,
    in_snapshot,
)
from pytest_torchmem.values.contributors import Category
from pytest_torchmem.values.errors import TraceError
from pytest_torchmem.values.trace import Trace
from tests.builders import TraceBuilder


def written_once() -> Trace:
    """One tensor that is made, written to, read, and freed; another that is made from it."""
    b = TraceBuilder()
    with b.op("aten::ones"):
        x = b.alloc(16)
    with b.op("aten::add_", writes=[x]):
        pass
    with b.op("aten::mul", reads=[x]):
        b.alloc(32)
    b.free(x)
    return b.build()


def graph_of(trace: Trace) -> DataFlowGraph:
    return build_data_flow(build_op_tree(trace))


def test_a_graph_is_told_with_a_line_for_each_node():
    assert graph_of(written_once()).dump().splitlines() == [
        "aten::ones          -> T0(v0)",
        "aten::add_  T0(v0)  -> T0(v1)",
        "aten::mul   T0(v1)  -> T1(v0)",
        "[memory]    T0(v1)",
    ]


def test_an_empty_graph_has_no_lines():
    graph = graph_of(TraceBuilder().build())
    graph.validate()
    assert graph.dump() == ""


def test_what_a_node_makes_and_frees_itself_is_no_edge_of_others():
    b = TraceBuilder()
    with b.op("aten::softmax"):
        b.free(b.alloc(16))
    assert graph_of(b.build()).dump() == "aten::softmax"


def test_entries_carry_the_tensor_key_and_the_version():
    profile = TorchMemoryProfile(build_op_tree(written_once()))
    keys = profile.graph.keys
    told = [
        (Action(entry["action"]).name, int(keys.size_bytes[entry["key"]]), int(entry["version"]))
        for entry in profile.entries
    ]
    assert told == [
        ("CREATE", 16, 0),
        ("INCREMENT_VERSION", 16, 0),
        ("CREATE", 32, 0),
        ("DESTROY", 16, 1),
    ]


def test_a_free_of_what_no_operator_took_was_there_before():
    """As the profiler of a GPU sees it, where each free carries its size."""
    b = TraceBuilder(devices=("cuda:0",))
    b.free(b.unheard_of(4096))
    trace = b.build()
    trace.allocations["keyed"] = False
    entries = TorchMemoryProfile(build_op_tree(trace)).entries
    assert entries[["action", "key", "size_bytes"]].tolist() == [
        (Action.PREEXISTING, -1, 4096),
        (Action.DESTROY, -1, 4096),
    ]
    assert entries["time_ns"][0] == -1


def test_a_graph_of_a_recording_is_valid():
    graph_of(written_once()).validate()


def test_a_version_that_is_made_twice_is_refused():
    graph = graph_of(written_once())
    twice = replace(graph, key=np.zeros_like(graph.key), allocates=np.ones_like(graph.allocates))
    with pytest.raises(TraceError, match=r"version 0 of tensor 1 is made twice"):
        twice.validate()


def test_a_version_that_is_not_there_yet_is_refused():
    graph = graph_of(written_once())
    late = replace(graph, version=np.where(graph.mutates, 1, graph.version))
    with pytest.raises(TraceError, match=r"version 1 of tensor 1 is used where version 0 is"):
        late.validate()


def test_the_first_node_has_its_edges():
    b = TraceBuilder()
    b.read(b.existing(8), name="aten::view")
    assert graph_of(b.build()).dump() == "aten::view  T0(v0)"


def test_what_a_node_has_an_edge_to_is_in_torch_s_snapshot():
    assert in_snapshot(graph_of(written_once())).tolist() == [True, True]


def test_what_torch_has_no_name_for_counts_as_unknown():
    levels = np.zeros((1, len(Category)), np.int64)
    levels[0, [Category.BUFFER.column, Category.WORKSPACE.column]] = 8, 16
    _, sizes = coalesced(Timeline(np.array([5]), levels), 0)
    assert sizes == [[0] * len(TORCH_ORDER) + [24]]
    assert TORCH_ORDER[-1] is Category.UNKNOWN


def test_the_last_moment_is_told():
    levels = np.zeros((3, len(Category)), np.int64)
    levels[:, Category.BUFFER.column] = 8, 16, 24
    times, sizes = coalesced(Timeline(np.array([0, 10, 5000]), levels), 0)
    assert (times, [row[-1] for row in sizes]) == ([0, 5], [16, 24])
