"""Who owns a storage, as noted while a body runs."""

from __future__ import annotations

import copy
import io
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from pytest_torchmem.record.owners import ownership
from pytest_torchmem.record.owners.ownership import OwnershipLog, OwnershipWatch
from pytest_torchmem.record.owners.places import data_ptr, places_of, storages_of
from pytest_torchmem.record.patches import Installed
from pytest_torchmem.record.recorded_tables import StringTable
from pytest_torchmem.record.recorder import Recorder
from pytest_torchmem.record.torch_api import autograd, profiler
from pytest_torchmem.values.trace import CREATE_GRAPH, MarkKind, Ownership
from tests.measured import measured

pytestmark = pytest.mark.searches(with_optimizers=True)


class Watched:
    """A watch at work, and what it has noted."""

    def __init__(self) -> None:
        self.strings = StringTable()
        self.log = OwnershipLog(self.strings, StringTable())
        self.marks: list[tuple[MarkKind, str]] = []
        self.watch = OwnershipWatch(self.log, self._mark)
        self.patches = Installed()

    def install(self) -> None:
        self.watch.install(self.patches)
        self.watch.install_hooks(self.patches)

    def remove(self) -> None:
        self.patches.remove()

    def _mark(self, kind: MarkKind, text: str) -> int:
        self.marks.append((kind, text))
        return len(self.marks) - 1

    def owned(self, kind: Ownership) -> set[tuple[int, str]]:
        """Pointer and name of all that was noted as owned in a way."""
        names = self.strings.values()
        return {(ptr, names[name]) for _, k, _, ptr, _, _, name in self.log.owners if k == kind}

    def pointers(self, kind: Ownership) -> set[int]:
        return {ptr for ptr, _ in self.owned(kind)}

    def scan(self) -> None:
        self.watch.scan(self._mark(MarkKind.START, ""))

    def freed(self) -> list[tuple[int, int]]:
        """Pointer and bytes of the storages that were noted as freed."""
        marks = [n for n, (kind, _) in enumerate(self.marks) if kind is MarkKind.STORAGE_FREED]
        return [(ptr, size) for mark, _, _, ptr, size, *_ in self.log.owners if mark in marks]

    def edges(self) -> set[tuple[int, int, str]]:
        names = self.strings.values()
        return {(child, parent, names[name]) for _, child, parent, name, _ in self.log.edges}

    def kinds(self, *wanted: MarkKind) -> list[MarkKind]:
        return [kind for kind, _ in self.marks if kind in wanted]


@pytest.fixture
def seen() -> Iterator[Watched]:
    watched = Watched()
    watched.install()
    yield watched
    watched.remove()


def pointer(tensor: torch.Tensor | None) -> int:
    assert tensor is not None
    return tensor.untyped_storage().data_ptr()


# --- where a tensor lives ---------------------------------------------------------------------


def test_a_view_is_placed_where_its_storage_begins():
    x = torch.ones(10, 10)
    assert list(places_of(x[3:, 2:].t())) == list(places_of(x)) == [("cpu", x.data_ptr())]
    assert list(storages_of(x[3:, 2:])) == [("cpu", x.data_ptr(), 400)]


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_sparse_tensor_is_its_indices_and_values():
    x = torch.eye(4).to_sparse()
    assert [size for _, _, size in storages_of(x)] == [2 * 4 * 8, 4 * 4]
    starts, columns = torch.arange(5), torch.arange(4)
    rows = torch.sparse_csr_tensor(starts, columns, torch.ones(4), check_invariants=False)
    assert sorted(size for _, _, size in storages_of(rows)) == [4 * 4, 4 * 8, 5 * 8]


def test_what_has_no_memory_is_nowhere():
    with FakeTensorMode():
        fake = torch.ones(4)
    for nothing in (fake, torch.ones(4, device="meta"), torch.empty(0), None, "text"):
        assert list(places_of(nothing)) == []


def test_a_tensor_of_a_function_transform_is_the_plain_one_below():
    inside = []
    x = torch.ones(4)
    torch.func.vmap(lambda v: inside.append(list(places_of(v))) or v * 2)(x)
    assert inside == [[("cpu", x.data_ptr())]]


# --- modules ----------------------------------------------------------------------------------


def test_registered_tensors_are_noted_with_module_and_name(seen: Watched):
    norm = nn.BatchNorm1d(4)
    assert (pointer(norm.weight), "weight") in seen.owned(Ownership.PARAMETER)
    assert (pointer(norm.running_mean), "running_mean") in seen.owned(Ownership.BUFFER)


def test_parts_are_noted_with_their_name(seen: Watched):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert {(id(model[0]), id(model), "0"), (id(model[1]), id(model), "1")} <= seen.edges()
    # Parent 0 says: from here on the id stands for this module.
    assert (id(model), 0, "") in seen.edges()


@pytest.mark.parametrize("how", ["copied", "unpickled"])
def test_a_module_that_never_registers_anything_is_met(seen: Watched, how: str):
    model = nn.Sequential(nn.Linear(2, 2))
    if how == "copied":
        other = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert (id(other), 0, "") in seen.edges()
    seen.watch.sample(0)
    assert (pointer(other[0].weight), "weight") in seen.owned(Ownership.PARAMETER)  # type: ignore[arg-type]
    assert (id(other[0]), id(other), "0") in seen.edges()


def test_modules_that_were_there_are_found_by_a_scan(seen: Watched):
    seen.remove()
    model = nn.Linear(2, 2)
    seen.install()
    assert pointer(model.weight) not in seen.pointers(Ownership.PARAMETER)
    seen.scan()
    assert (pointer(model.weight), "weight") in seen.owned(Ownership.PARAMETER)
    assert pointer(model.bias) in seen.pointers(Ownership.LIVE)


def test_a_module_is_not_kept_alive(seen: Watched):
    released = []

    class Noisy(nn.Linear):
        def __del__(self) -> None:
            released.append(True)

    model = Noisy(2, 2)
    del model
    assert released


# --- the free of what was there ---------------------------------------------------------------


def test_a_storage_that_dies_is_noted_once_however_many_views_it_had(seen: Watched):
    x = torch.ones(100)
    views = [x[10:], x.view(10, 10)]
    where = x.data_ptr()
    seen.scan()
    del x
    assert where not in [ptr for ptr, _ in seen.freed()]
    views.clear()
    freed = seen.freed()
    assert [size for ptr, size in freed if ptr == where] == [400]


# --- backward ---------------------------------------------------------------------------------


def _held_since(seen: Watched, first: int, first_edge: int) -> set[str]:
    """Names of what modules were noted to hold, from some rows of owners and edges on."""
    names, kinds = seen.strings.values(), (Ownership.PARAMETER, Ownership.BUFFER)
    owners = [name for _, k, *_, name in [*seen.log.owners][first:] if k in kinds]
    edges = [name for *_, name, _ in [*seen.log.edges][first_edge:]]
    return {names[number] for number in (*owners, *edges)} - {""}


# At its address there is a storage, and another one after that.
_MEMORY = bytearray(64)


def _mean() -> torch.Tensor:
    return torch.frombuffer(_MEMORY, dtype=torch.float32, count=4)


@pytest.mark.parametrize(
    ("change", "noted"),
    [
        (lambda model: None, set()),
        (lambda model: setattr(model[0].weight, "data", torch.ones(4, 4)), {"weight"}),
        (lambda model: model[1].running_var.untyped_storage().resize_(640_000), {"running_var"}),
        (lambda model: setattr(model[1].running_mean, "data", _mean()), {"running_mean"}),
        (lambda model: model._modules.update({"0": copy.copy(model[0])}), {"0", "weight", "bias"}),
        (lambda model: setattr(model[0], "__class__", type("Other", (nn.Linear,), {})), {"0"}),
    ],
    ids=["nothing", "other_data", "moved", "same_address", "other_module", "other_class"],
)
def test_what_modules_hold_is_noted_again_where_it_has_changed(
    seen: Watched, change: Callable[[nn.Sequential], object], noted: set[str]
):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].running_mean.data = _mean()
    seen.scan()
    model(torch.ones(2, 4)).sum().backward()
    before = len(seen.log.owners), len(seen.log.edges)
    change(model)
    model(torch.ones(2, 4)).sum().backward()
    assert _held_since(seen, *before) == noted


def test_what_lies_where_a_storage_was_that_has_moved_is_noted_again(seen: Watched, monkeypatch):
    def moved(part: torch.Tensor | torch.UntypedStorage) -> int:
        return address(part) + isinstance(part, torch.UntypedStorage)

    model, address = nn.Linear(4, 4), data_ptr
    seen.scan()
    model(torch.ones(2, 4)).sum().backward()
    before = len(seen.log.owners), len(seen.log.edges)
    monkeypatch.setattr(ownership, "data_ptr", moved)
    model(torch.ones(2, 4)).sum().backward()
    assert _held_since(seen, *before) == {"weight", "bias"}


def test_a_backward_pass_is_noted_with_what_it_keeps_and_makes(seen: Watched):
    w = torch.ones(4, requires_grad=True)
    x = torch.ones(4)
    (w * x).sum().backward()
    assert [kind for kind, _ in seen.marks] == [MarkKind.BACKWARD_BEGIN, MarkKind.BACKWARD_END]
    assert pointer(x) in seen.pointers(Ownership.SAVED)
    assert seen.pointers(Ownership.LEAF) == {pointer(w)}
    assert seen.pointers(Ownership.GRADIENT) == {pointer(w.grad)}


def test_what_autograd_grad_returns_is_noted_as_returned(seen: Watched):
    w = torch.ones(4, requires_grad=True)
    (gradient,) = torch.autograd.grad((w * w).sum(), [w], create_graph=True)
    assert pointer(gradient) in seen.pointers(Ownership.RETURNED)
    assert (MarkKind.BACKWARD_BEGIN, CREATE_GRAPH) in seen.marks


def test_an_input_without_a_gradient_is_no_obstacle(seen: Watched):
    w, unused = (torch.ones(4, requires_grad=True) for _ in range(2))
    gradient, nothing = torch.autograd.grad((w * 2).sum(), [w, unused], allow_unused=True)
    assert nothing is None
    assert seen.pointers(Ownership.RETURNED) == {pointer(gradient)}


def test_a_backward_pass_may_begin_at_an_edge(seen: Watched):
    w = torch.ones(4, requires_grad=True)
    y = w.exp()
    torch.autograd.backward(torch.autograd.graph.get_gradient_edge(y), torch.ones(4))
    assert seen.pointers(Ownership.SAVED) == {pointer(y)}
    assert seen.pointers(Ownership.GRADIENT) == {pointer(w.grad)}


def test_a_backward_pass_that_fails_has_an_end_too(seen: Watched):
    w = torch.ones(4, requires_grad=True)
    w.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        w.sum().backward()
    pair = seen.kinds(MarkKind.BACKWARD_BEGIN, MarkKind.BACKWARD_END)
    assert pair == [MarkKind.BACKWARD_BEGIN, MarkKind.BACKWARD_END]


def test_a_pass_within_a_pass_hands_its_gradients_on(seen: Watched):
    x = torch.ones(4, requires_grad=True)
    w = torch.ones(4, requires_grad=True)
    checkpoint(lambda v: (v * w).exp(), x * 2, use_reentrant=True).sum().backward()
    assert seen.kinds(MarkKind.BACKWARD_BEGIN, MarkKind.BACKWARD_END) == [
        MarkKind.BACKWARD_BEGIN,
        MarkKind.BACKWARD_BEGIN,
        MarkKind.BACKWARD_END,
        MarkKind.BACKWARD_END,
    ]
    assert pointer(x.grad) in seen.pointers(Ownership.GRADIENT)
    # The checkpoint's input is a detached copy of an activation: no leaf of the user's.
    assert seen.pointers(Ownership.LEAF) <= {pointer(x), pointer(w)}


def test_looking_makes_no_second_owner_of_a_gradient(seen: Watched):
    w = torch.ones(4, requires_grad=True)
    w.sum().backward()
    first = pointer(w.grad)
    w.sum().backward()
    # Autograd adds up in place only what nobody else holds.
    assert pointer(w.grad) == first


# --- optimizers -------------------------------------------------------------------------------


def test_an_optimizers_step_is_noted_with_its_state(seen: Watched):
    w = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([w], lr=0.1, momentum=0.9)
    w.sum().backward()
    optimizer.step()
    kinds = seen.kinds(MarkKind.OPTIMIZER_BEGIN, MarkKind.OPTIMIZER_END)
    assert kinds == [MarkKind.OPTIMIZER_BEGIN, MarkKind.OPTIMIZER_END]
    momentum = optimizer.state[w]["momentum_buffer"]
    assert seen.pointers(Ownership.OPTIMIZER_STATE) == {pointer(momentum)}
    assert pointer(w) in seen.pointers(Ownership.PARAMETER)


def test_the_profiler_records_no_call_of_what_looks(seen: Watched):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    session = profiler.Session()
    session.start()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    waiting, names = list(session.stop().experimental_event_tree()), set()
    while waiting:
        event = waiting.pop()
        waiting += event.children
        names.add(profiler.name_of(event))
    assert seen.log.owners
    assert any("adam.py" in name for name in names)
    ours = {name for name in names if "pytest_torchmem" in name}
    assert any("ownership.py" in name and "run_backward" in name for name in ours)
    assert not [name for name in ours if "places.py" in name or "autograd_graph.py" in name]


def test_the_state_of_an_optimizer_that_was_there_is_found(seen: Watched):
    seen.remove()
    w = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.Adam([w])
    w.sum().backward()
    optimizer.step()
    seen.install()
    seen.scan()
    state = {pointer(t) for t in optimizer.state[w].values()}
    assert state <= seen.pointers(Ownership.OPTIMIZER_STATE)


# --- restoring --------------------------------------------------------------------------------


def hooks() -> tuple[object, ...]:
    module = torch.nn.modules.module
    optimizer = sys.modules["torch.optim.optimizer"]
    return (
        autograd.engine(),
        torch.nn.Module.__setstate__,
        vars(torch.nn.Module)["_apply"],
        dict(module._global_parameter_registration_hooks),
        dict(module._global_buffer_registration_hooks),
        dict(module._global_module_registration_hooks),
        dict(optimizer._global_optimizer_pre_hooks),
        dict(optimizer._global_optimizer_post_hooks),
    )


def test_everything_is_restored_by_remove():
    before = hooks()
    watched = Watched()
    watched.install()
    assert all(now != then for now, then in zip(hooks(), before, strict=True))
    watched.remove()
    assert hooks() == before


def test_everything_is_restored_when_a_recording_cannot_begin(monkeypatch: pytest.MonkeyPatch):
    before = hooks()
    monkeypatch.setattr(OwnershipWatch, "scan", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Recorder(torch.device("cpu")).start()
    assert hooks() == before
    assert not profiler.profiler_is_active()


def test_everything_is_restored_when_a_body_fails(monkeypatch: pytest.MonkeyPatch):
    before = hooks()
    recorder = Recorder(torch.device("cpu"))
    recorder.start()
    with pytest.raises(RuntimeError):
        torch.ones(2) @ torch.ones(3)
    recorder.stop()
    assert hooks() == before


@dataclass
class WithoutHash(torch.nn.Module):
    """Has no hash, as it can be compared."""

    width: int

    def __post_init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(self.width, self.width, bias=False)


def test_what_a_module_without_a_hash_holds_is_parameters() -> None:
    there, made = WithoutHash(16), []
    result = measured(lambda: made.append(WithoutHash(16)) or there.layer(torch.ones(16)).sum())
    assert result.retained.parameter == 16 * 16 * 4
    assert result.peak.parameter == 2 * 16 * 16 * 4


def test_objects_that_have_not_called_torchs_init_spoil_no_measurement() -> None:
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            """Forget torch's."""

    class Optimizer(torch.optim.Optimizer):
        def __init__(self) -> None:
            """Forget torch's."""

    there = Module(), Optimizer()
    made: list[object] = []
    result = measured(lambda: made.extend((Module(), Optimizer(), torch.ones(256))))
    assert result.retained.total == 1024
    del there
