"""What the graphs of a compiler know, and that it outlives them."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path

import pytest
import torch

from pytest_torchmem.record.compiled.compiled_graphs import CompiledGraphs, user_frame
from pytest_torchmem.values.contributors import Source

pytestmark = [pytest.mark.slow, pytest.mark.compiles]


def add_one(x: torch.Tensor) -> torch.Tensor:
    return x.relu() + 1


def stack(line: int, text: str = "return x.relu() + 1", file: str = __file__) -> str:
    return f'  File "{file}", line {line}, in add_one\n    {text}\n'


def traced(**metas: dict[str, object]) -> torch.fx.GraphModule:
    """A graph whose nodes ``relu`` and ``add`` carry what torch.compile would note on them."""
    graph = torch.fx.symbolic_trace(add_one)
    for node in graph.graph.nodes:
        node.meta.update(metas.get(node.name, {}))
    return graph


def known_of(*graphs: torch.fx.GraphModule) -> CompiledGraphs:
    known = CompiledGraphs()
    known.collect()
    return known


def test_nothing_is_called_where_a_graphs_class_dies():
    graph = traced()
    known = known_of(graph)
    callbacks = [reference.__callback__ for reference in weakref.getweakrefs(type(graph))]
    assert known
    assert callbacks
    assert not any("WeakSet" in str(callback) for callback in callbacks)


def test_each_line_of_generated_code_is_a_node_also_when_the_graph_is_gone():
    graph = traced(add={"stack_trace": stack(3), "nn_module_stack": {"17": "a", "42@1": "b"}})
    known = known_of(graph)
    file = type(graph).forward.__code__.co_filename
    number = next(n for n, t in enumerate(graph.code.splitlines(), 1) if "add = " in t)
    del graph
    gc.collect()
    lines = known.lines(file)
    assert lines is not None
    assert lines[number].stack == stack(3)
    assert lines[number].modules == (42,)


def test_a_graph_without_stacks_is_none_of_a_compilers():
    graph = traced()
    assert known_of(graph).lines(type(graph).forward.__code__.co_filename) is None


def test_a_backward_node_has_the_module_of_its_forward():
    graph = traced(add={"stack_trace": stack(3), "fwd_nn_module_stack": {"7": "a"}})
    assert known_of(graph).traced_at(stack(3)).modules == (7,)


def test_a_module_in_the_place_of_one_that_died_is_not_the_graphs():
    """A compiled model may die before its graph; then its address is that of another module."""
    where = {"stack_trace": stack(35, "of a module that died")}
    here, other = torch.nn.ReLU(), torch.nn.Linear(1, 1)
    inside = {str(id(here)): ("L['self'].act", torch.nn.ReLU)}
    elsewhere = {str(id(other)): ("L['self'].act", torch.nn.ReLU)}
    known = known_of(
        traced(relu={**where, "nn_module_stack": inside}),
        traced(relu={**where, "nn_module_stack": elsewhere}),
    )
    assert known.traced_at(where["stack_trace"], ["relu"]).modules == (id(here),)


def test_a_stored_stack_is_recognised_by_its_code_whatever_its_line():
    graph = traced(
        add={"stack_trace": stack(30, "unique to this test"), "nn_module_stack": {"9": 0}}
    )
    origin = known_of(graph).traced_at(stack(28, "unique to this test"))
    assert origin.stack == stack(30, "unique to this test")
    assert origin.modules == (9,)


def test_a_stack_that_nobody_knows_is_all_there_is():
    assert CompiledGraphs().traced_at(stack(5)).stack == stack(5)
    assert CompiledGraphs().traced_at(stack(5)).modules == ()


def test_of_several_nodes_on_a_line_the_named_one_counts():
    where = {"stack_trace": stack(50, "two on one line")}
    graph = traced(
        relu={**where, "nn_module_stack": {"1": 0}}, add={**where, "nn_module_stack": {"2": 0}}
    )
    known = known_of(graph)
    assert known.traced_at(where["stack_trace"], ["add"]).modules == (2,)
    assert set(known.traced_at(where["stack_trace"]).modules) == {1, 2}


def test_a_node_outside_every_module_makes_the_line_belong_to_none():
    where = {"stack_trace": stack(60, "one inside, one outside")}
    graph = traced(relu={**where, "nn_module_stack": {"1": 0}}, add=where)  # type: ignore[arg-type]
    assert known_of(graph).traced_at(where["stack_trace"]).modules == ()


@pytest.fixture
def moved(tmp_path: Path) -> str:
    path = tmp_path / "model.py"
    path.write_text("# new\n# new\ndef add_one(x):\n    return x.relu() + 1\n")
    return str(path)


def test_code_that_moved_since_it_was_compiled_is_found_where_it_is_now(moved: str):
    assert user_frame(stack(2, file=moved)) == Source(moved, 4, "add_one")
    assert user_frame(stack(4, file=moved)) == Source(moved, 4, "add_one")


def test_code_that_is_gone_leaves_the_function_alone(moved: str):
    assert user_frame(stack(2, "return x", file=moved)) == Source(moved, 0, "add_one")


def test_the_innermost_frame_of_the_users_counts(moved: str):
    library = stack(9, file=torch.__file__)
    outer = stack(1, "# new", file=moved)
    assert user_frame(outer + stack(4, file=moved) + library) == Source(moved, 4, "add_one")
    assert user_frame(library) is None


def test_collecting_wakes_no_proxy():
    class Proxy:
        @property  # type: ignore[misc]
        def __class__(self) -> type:
            pytest.fail("somebody asked a proxy what it is")

    kept = Proxy()
    CompiledGraphs().collect_again()
    assert sys.getrefcount(kept) > 0
