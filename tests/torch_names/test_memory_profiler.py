"""torch's names for memory profiles: the claims of torch's own suite, about ours."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pytest_torchmem.contexts import gc_paused
from pytest_torchmem.torch_names import memory_profiler as names
from pytest_torchmem.torch_names.memory_profiler import Category, MemoryProfile
from pytest_torchmem.values.errors import TraceError
from tests.torch_names.programs import (
    OURS,
    PROGRAMS,
    Scale,
    layer_step,
    profiled,
    stacked,
    told,
    torchs,
    training_step,
)
from tests.torch_names.record_expectations import FILE

pytestmark = pytest.mark.slow

RECORDED = json.loads(FILE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def finished() -> Any:
    return profiled(layer_step())


def plain(key: Any) -> tuple[Any, ...]:
    """A key of either engine as a plain value."""
    return (key.id, key.storage.allocation_id, key.storage.ptr, str(key.device))


# --- data flow, schemas, categories, timeline ----------------------------------------------------


@pytest.mark.skipif(
    not torch.__version__.startswith(RECORDED["torch"]), reason="recorded with another torch"
)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_flow_schemas_and_timeline_are_those_that_torchs_engine_gave(program):
    assert told(OURS, profiled(program())) == RECORDED["programs"][program.__name__]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_flow_schemas_and_timeline_are_torchs_on_the_same_profile(program):
    pytest.importorskip("torch.profiler._memory_profiler")
    finished = profiled(program())
    assert told(OURS, finished) == told(torchs(), finished)


def test_what_an_operator_uses_within_itself_is_its_intermediate():
    profile = MemoryProfile(profiled(lambda: torch.ones(25).mul(2)))
    node = next(n for n in profile.data_flow_graph.flow_nodes if n.event.name == "aten::mul")
    (made,) = node.intermediates
    assert profile.size_map[made] == 4
    assert profile.categories.get(made, 0) is Category.TEMPORARY


def test_a_graph_is_told_and_checked_through_its_name(finished):
    graph = MemoryProfile(finished).data_flow_graph
    graph.validate()
    assert "aten::linear" in graph.dump()
    assert "[memory]" in graph.dump()


def test_nodes_have_torchs_events(finished):
    ours, theirs = MemoryProfile(finished).data_flow_graph, finished._memory_profile()
    theirs = theirs._data_flow_graph
    assert [n.start_time for n in ours.flow_nodes] == [n.start_time for n in theirs.flow_nodes]
    assert [n.event.id for n in ours.flow_nodes] == [n._event.id for n in theirs.flow_nodes]
    assert [e.id for e in ours.leaf_events] == [e.id for e in theirs.leaf_events]


def test_last_versions_are_torchs(finished):
    ours, theirs = MemoryProfile(finished).data_flow_graph, finished._memory_profile()
    last = {plain(key): version for key, version in theirs._data_flow_graph._active_version.items()}
    keys = ours.op_tree.keys
    assert {plain(k): ours.lookup(k) for k in keys if plain(k) in last} == last
    assert set(last.values()) == {0, 1}


def test_the_last_version_of_a_key_can_be_looked_up():
    graph = MemoryProfile(profiled(lambda: torch.ones(25).add_(1).add_(1))).data_flow_graph
    made = next(key for n in graph.flow_nodes if n.event.name == "aten::ones" for key in n.outputs)
    assert graph.lookup(made) == 2
    with pytest.raises(KeyError):
        graph.lookup(names.TensorKey(torch.device("cpu"), 10**6, names.StorageId(0, 0)))


def test_keys_snapshot_and_sizes_are_torchs(finished):
    theirs = finished._memory_profile()
    ours = MemoryProfile(finished)
    assert {(plain(k), v): c and c.name for (k, v), c in ours.category_snapshot().items()} == {
        (plain(k), v): c and c.name for (k, v), c in theirs._category_snapshot().items()
    }
    found = {plain(k): size for k, size in theirs._size_map._values.items()}
    assert {plain(k): ours.size_map[k] for k in ours.op_tree.keys} == found
    assert list(map(plain, sorted(ours.op_tree.keys))) == sorted(found)


def test_parameters_gradients_and_scopes_are_torchs(finished):
    from torch.profiler import _memory_profiler as theirs

    profile, torchs_profile = MemoryProfile(finished), finished._memory_profile()
    seen: list[list[Any]] = []
    for module, tree in ((names, profile.op_tree), (theirs, torchs_profile._op_tree)):
        events = list(tree.dfs())
        seen.append([[plain(p) for e in events for p in module.extract_parameters(e)]])
        pairs = [pair for e in events for pair in module.extract_gradients(e)]
        seen[-1].append([(p and plain(p), plain(g)) for p, g in pairs])
    assert seen[0] == seen[1]
    assert all(seen[0])
    scopes = [[module.get_scopes(e) for e in profile.op_tree.dfs()] for module in (names, theirs)]
    assert scopes[0] == scopes[1]
    assert max(map(len, scopes[0])) > 1
    assert names.get_scopes(None) == ()


def test_events_are_walked_by_depth_and_by_time(finished):
    tree, theirs = names.OpTree(finished), finished._memory_profile()._op_tree
    assert [e.id for e in tree.dfs()] == [e.id for e in theirs.dfs()]
    assert [e.id for e in tree.dfs(children_fn=lambda _: [])] == [e.id for e in tree.roots]
    starts = [e.start_time_ns for e in tree.sorted_nodes]
    assert starts == sorted(starts)
    assert len(starts) == len(list(tree.dfs()))


def test_schemas_are_looked_up_by_name():
    found = names.SchemaMatcher.lookup_schemas("aten::add_")
    assert found is not None
    assert {"Tensor", "Scalar"} <= {getattr(s, "overload_name", "") for s in found}
    assert names.SchemaMatcher.lookup_schemas("a note") is None


@pytest.mark.parametrize("form", ["coalesced", "raw", "html"])
def test_a_timeline_is_written_as_torch_writes_it(finished, tmp_path, form):
    from torch.profiler._memory_profiler import MemoryProfileTimeline

    ours = names.MemoryProfileTimeline(MemoryProfile(finished))
    theirs = MemoryProfileTimeline(finished._memory_profile())
    assert ours.coalesce_timeline("cpu") == tuple(theirs._coalesce_timeline("cpu"))
    mine, torchs_file = tmp_path / "mine.html", tmp_path / "torch.json"
    if form == "html":
        ours.export_memory_timeline_html(mine, "cpu")
        assert "activation" in mine.read_text(encoding="utf-8")
        return
    suffix = "_raw" if form == "raw" else ""
    getattr(ours, f"export_memory_timeline{suffix}")(mine, "cpu")
    getattr(theirs, f"export_memory_timeline{suffix}")(str(torchs_file), "cpu")
    read = [json.loads(Path(path).read_text()) for path in (mine, torchs_file)]
    if form == "raw":  # entries of one moment come in any order
        read = [sorted(entries) for entries in read]
    assert read[0] == read[1]


def test_a_profile_that_recorded_too_little_says_what_it_lacks():
    with pytest.raises(ValueError, match="record_shapes=True, profile_memory=True required"):
        MemoryProfile(profiled(lambda: None, shapes=False, memory=False))
    with pytest.raises(ValueError, match=r"^profile_memory=True required"):
        MemoryProfile(profiled(lambda: None, memory=False))
    assert MemoryProfile(profiled(lambda: None)).timeline == ()


# --- gradients -----------------------------------------------------------------------------------


def shown(finished: Any, tag: str) -> set[tuple[int | None, int]]:
    """Addresses of (parameter, gradient), as events of one kind show them."""
    return {
        (parameter.storage.ptr if parameter else None, gradient.storage.ptr)
        for event in names.OpTree(finished).dfs()
        if event.tag.name == tag
        for parameter, gradient in names.extract_gradients(event)
    }


def addresses(*tensors: torch.Tensor) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors}


def gradients(parameters: Any) -> set[int]:
    return addresses(*(p.grad for p in parameters))


def pairs(parameters: Any) -> set[tuple[int, int]]:
    return {(p.data_ptr(), p.grad.data_ptr()) for p in parameters}


OPERATORS, CALLS = "TorchOp", "PyCall"


def test_accumulated_gradients_are_shown_without_their_parameters():
    x, w0, w1 = torch.ones(1), *(torch.ones(1, requires_grad=True) for _ in range(2))
    for _ in range(2):  # the first makes gradients, the second adds to them
        finished = profiled(lambda: (x.expand(4) * w0 * w1).sum().backward())
        assert shown(finished, OPERATORS) == {(None, g) for g in gradients([w0, w1])}
        assert shown(finished, CALLS) == set()


def test_modules_show_the_gradients_that_were_there_when_they_were_called():
    model = nn.Sequential(nn.Linear(2, 1), Scale())
    parameters = list(model.parameters())
    for cold in (True, False):
        finished = profiled(lambda: model(torch.ones(2, 2)).sum().backward())
        assert shown(finished, OPERATORS) == {(None, g) for g in gradients(parameters)}
        assert shown(finished, CALLS) == (set() if cold else pairs(parameters))
    forward = profiled(lambda: model(torch.ones(2, 2)))
    assert shown(forward, CALLS) == pairs(parameters)
    assert shown(forward, OPERATORS) == set()


@pytest.mark.parametrize("set_to_none", [False, True])
def test_optimizers_show_gradients_as_they_were_when_first_seen(set_to_none):
    x, weights = torch.ones(1), [torch.ones(1, requires_grad=True) for _ in range(2)]
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad(set_to_none=set_to_none)
        (x.expand(4) * weights[0] * weights[1]).sum().backward()
        optimizer.step()

    for _ in range(2):
        finished = profiled(step)
        assert shown(finished, CALLS) >= pairs(weights)
        assert shown(finished, OPERATORS) == {(None, g) for g in gradients(weights)}
        twice = profiled(lambda: [step() for _ in range(2)])
        # The profiler looks once: gradients that are new since then it does not see.
        assert (shown(twice, CALLS) >= pairs(weights)) is not set_to_none


def test_modules_and_optimizers_show_gradients_side_by_side():
    model = nn.Sequential(nn.Linear(2, 1), Scale())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        model(torch.ones(2, 2)).sum().backward()
        optimizer.step()

    assert shown(profiled(step), CALLS) >= pairs(model.parameters())


# --- parameters, gradients and inputs of programs ------------------------------------------------


def labels_of(tensor: torch.Tensor, profile: MemoryProfile) -> set[Category | None]:
    """The categories of the versions of the latest storage at a tensor's address."""
    snapshot, ptr = profile.category_snapshot(), tensor.untyped_storage().data_ptr()
    latest = max((k.storage.allocation_id for k, _ in snapshot if k.storage.ptr == ptr), default=-1)
    return {c for (key, _), c in snapshot.items() if key.storage.allocation_id == latest}


def assert_labelled(body: Any, model: nn.Module, with_gradients: bool = True) -> None:
    profile = MemoryProfile(profiled(body))
    for parameter in model.parameters():
        assert labels_of(parameter, profile) == {Category.PARAMETER}
        if with_gradients:
            assert parameter.grad is not None
            assert labels_of(parameter.grad, profile) == {Category.GRADIENT}
        else:
            assert parameter.grad is None
    assert profile.timeline


def mean_error(model: nn.Module) -> torch.Tensor:
    return functional.mse_loss(model(torch.ones(2, 2)), torch.rand(2, 1))


def test_parameters_and_gradients_are_known_with_and_without_a_backward():
    model = nn.Sequential(nn.Linear(2, 2), Scale(), nn.Linear(2, 1), Scale())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        mean_error(model).backward()
        optimizer.step()

    assert_labelled(lambda: model(torch.ones(2, 2)), model, with_gradients=False)
    assert_labelled(step, model)
    assert_labelled(step, model)
    assert_labelled(lambda: model(torch.ones(2, 2)), model)


def test_gradients_that_are_made_anew_in_each_step_are_known():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def steps() -> None:
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            mean_error(model).backward()
            optimizer.step()

    steps()
    assert_labelled(steps, model)
    optimizer.zero_grad(set_to_none=True)
    assert_labelled(steps, model)


class Lazy(nn.Module):
    """A layer whose parameters are made when it is first called."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.shape = (outer, inner)

    def forward(self, x):
        if getattr(self, "weight", None) is None:
            self.weight = nn.Parameter(torch.empty(self.shape).uniform_())
            self.bias = nn.Parameter(torch.empty(self.shape[0]).uniform_())
        return functional.linear(x, self.weight, self.bias)


@pytest.mark.parametrize(
    ("layer", "label"), [(nn.Linear, Category.INPUT), (Lazy, None)], ids=["known", "lazy"]
)
def test_inputs_of_a_forward_are_known_where_the_parameters_are(layer, label):
    model = nn.Sequential(layer(2, 2), layer(2, 1))
    inputs = [torch.ones(2, 2) for _ in range(2)]

    def forwards() -> None:
        inputs.extend(torch.ones(2, 2) for _ in range(2))
        for x in inputs:
            model(x)

    profile = MemoryProfile(profiled(forwards))
    assert [labels_of(x, profile) for x in inputs] == [{label}] * 4
    assert (Category.INPUT in profile.category_snapshot().values()) == (label is not None)


def test_inputs_and_targets_of_training_steps_are_known():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [(torch.ones(2, 2), torch.rand(2, 1)) for _ in range(2)]

    def steps() -> None:
        data.extend((torch.ones(2, 2), torch.rand(2, 1)) for _ in range(2))
        for x, target in data:
            functional.mse_loss(model(x), target).backward()
            optimizer.step()
            optimizer.zero_grad()

    profile = MemoryProfile(profiled(steps))
    assert all(labels_of(t, profile) == {Category.INPUT} for both in data for t in both)


def test_parameters_that_are_made_within_the_recording_are_known():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), Lazy(2, 2), nn.ReLU(), nn.Linear(2, 1))

    def step() -> None:
        loss = mean_error(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    assert_labelled(step, model)
    assert len(list(model.parameters())) == 6


def test_parameters_of_a_step_by_hand_are_known():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))

    def step() -> None:
        mean_error(model).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.add_(parameter.grad, alpha=-0.1)

    assert_labelled(step, model)


# --- timelines -----------------------------------------------------------------------------------


def test_times_ascend_and_only_what_was_there_before_has_none():
    timeline = MemoryProfile(profiled(training_step())).timeline
    times = [time for time, *_ in timeline]
    assert times == sorted(times)
    assert {time == -1 for time, action, *_ in timeline if action is names.Action.PREEXISTING} == {
        True
    }
    assert all(time > 0 for time, action, *_ in timeline if action is not names.Action.PREEXISTING)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_memory_without_a_tensor_is_in_the_timeline_without_a_key(device):
    if device != "cpu" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, or `torchmem simulate`")
    before = [torch.ones(1024, device=device)]

    def body() -> None:
        before.clear()  # no operator took it since the recording began
        unseen = torch.empty(64, device=device)
        del unseen
        seen = torch.empty(256, device=device)
        seen.view_as(seen)

    gc.collect()
    with gc_paused():  # what others left would be freed within
        timeline = MemoryProfile(profiled(body)).timeline
    there_before = [("PREEXISTING", names.Key, 4096), ("DESTROY", names.Key, 4096)]
    # The CPU's allocator does not know how large a block is that it frees; a GPU's does. It gives
    # out whole multiples of 512 bytes.
    unseen_bytes = 256 if device == "cpu" else 512
    rows = [(action.name, type(key), size) for _, action, (key, _), size in timeline]
    # A thread that another test left may free what it has, which is less.
    assert [row for row in rows if row[2] >= 256] == [
        *(there_before if device != "cpu" else ()),
        ("CREATE", names.Key, unseen_bytes),
        ("DESTROY", names.Key, unseen_bytes),
        ("CREATE", names.TensorKey, 1024),
        ("DESTROY", names.TensorKey, 1024),
    ]
    assert {key.device for _, _, (key, _), _ in timeline} == {torch.device(device)}


def test_an_interrupted_graph_is_refused():
    profile = MemoryProfile(profiled(stacked()))
    columns = profile.data_flow_graph.columns
    columns.version[columns.is_input] += 1
    with pytest.raises(TraceError, match="is used where version 0 is the last"):
        profile.data_flow_graph.validate()


def test_devices_categories_and_schemas_are_those_of_torch() -> None:
    profile = MemoryProfile(profiled(lambda: torch.ones(25).add_(1)))
    assert {key.device for _, _, (key, _), _ in profile.timeline} == {torch.device("cpu")}
    assert [(c.name, c.value) for c in Category] == [
        (c.name, c.value) for c in torch.profiler._memory_profiler.Category
    ]


def test_functions_take_the_events_of_torchs_tree() -> None:
    model = nn.Linear(4, 3)
    model(torch.ones(2, 4)).sum().backward()
    finished = profiled(lambda: model(torch.ones(2, 4)).sum().backward())
    theirs: Any = torch.profiler._memory_profiler
    found = 0
    for event in MemoryProfile(finished)._op_tree.dfs():
        assert [
            [None if key is None else (key.id, key.device) for key in pair]
            for pair in names.extract_gradients(event)
        ] == [
            [None if key is None else (key.id, key.device) for key in pair]
            for pair in theirs.extract_gradients(event)
        ]
        if event.tag.name == "TorchOp":
            found += 1
            fields = event.extra_fields
            assert [
                schema.overload_name for schema in names.SchemaMatcher.match_schemas(fields)
            ] == [schema.overload_name for schema in theirs.SchemaMatcher.match_schemas(fields)]
            assert names.SchemaMatcher.inputs_are_mutable(
                fields
            ) == theirs.SchemaMatcher.inputs_are_mutable(fields)
    assert found > 10


def test_options_that_are_lacking_are_a_value_error_as_in_torch() -> None:
    with torch.profiler.profile(record_shapes=True, with_stack=True) as finished:
        torch.ones(1)
    with pytest.raises(ValueError, match=r"^profile_memory=True required for memory profiling\.$"):
        MemoryProfile(finished)


def test_properties_of_classes_with_slots_are_functions_of_python():
    # Python 3.14 looks at the code of each when it makes such a class.
    slotted = [
        kind for kind in vars(names).values() if "__slots__" in getattr(kind, "__dict__", ())
    ]
    getters = [p.fget for kind in slotted for p in vars(kind).values() if isinstance(p, property)]
    assert len(getters) > 3
    assert all(hasattr(getter, "__code__") for getter in getters)
