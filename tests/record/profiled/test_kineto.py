"""The profiler's event tree as columns."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from pytest_torchmem.record.devices import device_name
from pytest_torchmem.record.profiled.kineto import TreeReader
from pytest_torchmem.record.recorded_tables import Tables
from pytest_torchmem.record.torch_api import profiler
from pytest_torchmem.values.trace import EventKind, Mutable, Role, Scope


def read(body: Callable[[], object], reader: TreeReader | None = None) -> tuple[Tables, list[str]]:
    """The tables of a body and the name of each event."""
    reader = reader or TreeReader()
    session = profiler.Session()
    session.start()
    body()
    tables = reader.read(session.stop())
    strings = reader.strings.values()
    return tables, [strings[name] for name in tables.events["name"].tolist()]


def inputs_of(tables: Tables, row: int) -> list[tuple[int, int]]:
    """Argument and mutability of each tensor that the operator in a row takes."""
    mine = tables.tensors[
        (tables.tensors["event"] == row) & (tables.tensors["role"] == Role.OPERATOR_INPUT)
    ]
    return list(zip(mine["argument"].tolist(), mine["mutable"].tolist(), strict=True))


def test_rows_stand_in_depth_first_order_with_the_end_of_each_subtree():
    layer = nn.Linear(8, 8)
    events = read(lambda: layer(torch.ones(2, 8)).sum().backward())[0].events
    for row, (parent, end) in enumerate(
        zip(events["parent"].tolist(), events["end"].tolist(), strict=True)
    ):
        assert row < end <= len(events)
        assert parent < row
        if parent >= 0:
            assert end <= events["end"][parent]
    children = np.flatnonzero(events["parent"] == 0)
    assert events["end"][0] == max(events["end"][children])


def test_python_calls_that_lead_to_nothing_are_left_out():
    def idle() -> int:
        return sum(range(10))

    def busy() -> torch.Tensor:
        idle()
        return torch.ones(4)

    _, names = read(busy)
    assert "busy" in names
    assert "idle" not in names


def test_allocations_and_frees_carry_the_same_identity():
    def body() -> None:
        x = torch.empty(1000)
        x.fill_(1)
        del x

    allocations = read(body)[0].allocations
    made, freed = (allocations[allocations["size_bytes"] == size] for size in (4000, -4000))
    assert len(made) == len(freed) == 1
    assert made["ptr"] == freed["ptr"]
    assert made["keyed"].all()
    assert (made["id"], made["allocation_id"]) == (freed["id"], freed["allocation_id"])


def test_a_node_of_the_backward_graph_has_the_number_of_its_operator():
    x = torch.ones(4, requires_grad=True)
    tables, names = read(lambda: (x * x).sum().backward())
    row = names.index("MulBackward0")
    assert tables.events["scope"][row] == Scope.BACKWARD_FUNCTION
    assert tables.events["sequence"][names.index("aten::mul")] == tables.events["sequence"][row]


@pytest.mark.parametrize(
    ("call", "name", "expected"),
    [
        (lambda a, b: torch.cat([a, b]), "aten::cat", [(0, Mutable.NO), (0, Mutable.NO)]),
        (lambda a, b: torch.stack([a, b]), "aten::stack", [(0, Mutable.NO), (0, Mutable.NO)]),
        (lambda a, b: a.add_(b), "aten::add_", [(0, Mutable.YES), (1, Mutable.NO)]),
        (
            lambda a, b: torch._foreach_add_([a, b], [b, b]),
            "aten::_foreach_add_",
            [(0, Mutable.YES), (0, Mutable.YES), (1, Mutable.NO), (1, Mutable.NO)],
        ),
        (
            lambda a, b: torch.add(a, b, out=torch.empty(4)),
            "aten::add",
            [(0, Mutable.NO), (1, Mutable.NO), (3, Mutable.YES)],
        ),
    ],
)
def test_inputs_and_lists_of_them_say_whether_they_are_written_to(call, name, expected):
    a, b = torch.ones(4), torch.ones(4)
    tables, names = read(lambda: call(a, b))
    assert inputs_of(tables, names.index(name)) == expected


def test_lists_of_one_operator_may_differ_in_length():
    a = torch.ones(4)
    tables, names = read(lambda: (torch.cat([a, a]), torch.cat([a, a, a])))
    rows = [row for row, name in enumerate(names) if name == "aten::cat"]
    assert [len(inputs_of(tables, row)) for row in rows] == [2, 3]


def test_a_tensor_from_before_has_at_least_the_extent_that_is_seen():
    x = torch.ones(100, 10)
    part = x[10:20, 0]
    tables, names = read(part.sum)
    row = names.index("aten::sum")
    mention = tables.tensors[tables.tensors["event"] == row][0]
    # Ten elements, ten apart.
    assert mention["size_bytes"] == 10 * 10 * 4
    assert mention["size_bytes"] <= x.untyped_storage().nbytes()


def test_modules_and_their_parameters_are_noted_with_each_call():
    layer = nn.Linear(4, 4)
    tables, names = read(lambda: layer(torch.ones(1, 4)))
    (call,) = np.asarray(tables.module_calls)
    assert call["module"] == id(layer)
    assert names[call["event"]].startswith("nn.Module: Linear")
    roles = tables.tensors["role"][tables.tensors["event"] == call["event"]]
    assert roles.tolist() == [Role.MODULE_PARAMETER] * 2


def test_names_have_one_number_over_several_sessions():
    reader = TreeReader()
    first, _ = read(lambda: torch.ones(4), reader)
    second, _ = read(lambda: torch.ones(4), reader)
    number = reader.strings.number("aten::ones")
    assert number in first.events["name"]
    assert number in second.events["name"]
    assert reader.device_names.values() == ("cpu",)


@pytest.mark.parametrize("enabled", [True, False])
def test_reading_leaves_the_garbage_collector_as_it_was(enabled):
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        read(lambda: torch.ones(4))
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_a_session_without_events_has_empty_tables():
    tables, names = read(lambda: None)
    assert len(tables.allocations) == len(tables.module_calls) == len(tables.tensors) == 0
    assert EventKind.TORCH_OP not in tables.events["kind"]
    assert len(names) == len(tables.events)


def test_the_cpu_is_one_device():
    assert device_name(torch.device("cpu", 3)) == device_name(torch.device("cpu")) == "cpu"
    assert [device_name(torch.device("cuda", n)) for n in (0, 1)] == ["cuda:0", "cuda:1"]
    assert device_name(torch.device("cuda")) == "cuda:0"


def test_a_call_has_the_line_it_stands_on_in_its_caller():
    def body() -> torch.Tensor:
        return torch.ones(4)

    tables, names = read(body)
    call = int(tables.events["parent"][names.index("aten::ones")])
    assert tables.events["kind"][call] == EventKind.PY_C_CALL
    assert tables.events["line"][call] == body.__code__.co_firstlineno + 1
