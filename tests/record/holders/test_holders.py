"""What keeps a storage alive, and the way to it."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import io
import logging
import re
import sys
import threading
import types
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import ClassVar

import pytest
import torch
from torch import nn

from pytest_torchmem.contexts import gc_paused
from pytest_torchmem.measuring.body_measurement import BodyMeasurement
from pytest_torchmem.record.holders import search
from pytest_torchmem.record.holders.search import NO_TENSOR, Kept, find_holders
from pytest_torchmem.record.owners.places import storages_of
from pytest_torchmem.values.results import Fate

pytestmark = [pytest.mark.slow, pytest.mark.searches]

#: Each search looks at all of the heap: as many as prove the point, and not as many as users get.
SEARCHES = 3


@pytest.fixture(autouse=True)
def few_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "SEARCHES", SEARCHES)


class Trainer:
    shared: ClassVar[list[torch.Tensor]] = []

    def __init__(self) -> None:
        self.me = self
        self.held: object = None


class Slots:
    __slots__ = ("tensor",)


@pytest.fixture
def models() -> Iterator[types.ModuleType]:
    module = types.ModuleType("models")
    sys.modules["models"] = module
    yield module
    del sys.modules["models"]


def sizes(*tensors: torch.Tensor | None) -> dict[tuple[str, int], int]:
    return {(device, ptr): n for t in tensors for device, ptr, n in storages_of(t)}


def ways(found: list[Kept]) -> list[str]:
    return [f"{'in garbage: ' if kept.in_garbage else ''}{kept.by}" for kept in found]


def test_a_cache_in_a_module_is_named_with_the_key(models):
    models.CACHE = {"last": [torch.ones(8)]}
    (place,) = wanted = sizes(models.CACHE["last"][0])
    assert find_holders(wanted) == [Kept(place, False, "models.CACHE['last'][0]")]


def test_a_variable_of_contexts_is_named():
    others = [contextvars.ContextVar(f"other {number}") for number in range(40)]
    variable = contextvars.ContextVar[list[torch.Tensor]]("current")
    tokens = [other.set([number]) for number, other in enumerate(others)]
    token = variable.set([torch.ones(8)])
    try:
        wanted = sizes(*variable.get())
        assert ways(find_holders(wanted)) == ["the context variable 'current'[0]"]
    finally:
        variable.reset(token)
        for other, its_token in zip(others, tokens, strict=True):
            other.reset(its_token)


def test_an_attribute_of_a_thread_is_named_as_one(models):
    models.state = threading.local()
    models.state.made = [torch.ones(8)]
    wanted = sizes(*models.state.made)
    assert ways(find_holders(wanted)) == ["models.state.made[0]"]


def test_an_attribute_of_a_function_is_named_as_one(models):
    models.sample = lambda: None
    models.sample.seen = [torch.ones(8)]
    wanted = sizes(models.sample.seen[0])
    assert ways(find_holders(wanted)) == ["models.sample.seen[0]"]


def test_each_item_of_a_list_is_found_however_long_it_is():
    losses = [torch.ones(8) for _ in range(SEARCHES + 4)]
    found = find_holders(sizes(*losses))
    here = " in test_each_item_of_a_list_is_found_however_long_it_is ("
    assert [kept.by.partition(here)[0] for kept in found] == [
        f"losses[{n}]" for n in range(len(found))
    ]


def test_the_rest_of_what_is_deep_in_a_container_is_found(models):
    models.trainer = Trainer()
    models.trainer.held = [{"loss": (number, torch.ones(8))} for number in range(SEARCHES + 4)]
    wanted = sizes(*(each["loss"][1] for each in models.trainer.held))
    expected = [f"models.trainer.held[{n}]['loss'][1]" for n in range(SEARCHES + 4)]
    assert ways(find_holders(wanted)) == expected


def test_the_rest_of_a_large_model_and_its_gradients_is_found(models):
    models.model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(SEARCHES + 4)))
    models.model(torch.ones(1, 4)).sum().backward()
    wanted = sizes(*(layer.weight.grad for layer in models.model))
    expected = [f"models.model.{n}.weight.grad" for n in range(SEARCHES + 4)]
    assert ways(find_holders(wanted)) == expected


def test_the_rest_of_what_a_closure_and_a_class_hold_is_found(models):
    def hooked(tensors: list[torch.Tensor]) -> object:
        return lambda: tensors

    models.hook = hooked([torch.ones(8) for _ in range(SEARCHES + 4)])
    found = find_holders(sizes(*models.hook()))
    assert ways(found)[-1] == f"models.hook, its variable 'tensors'[{SEARCHES + 3}]"
    Trainer.shared.extend(torch.ones(8) for _ in range(SEARCHES + 4))
    try:
        found = find_holders(sizes(*Trainer.shared))
    finally:
        Trainer.shared.clear()
    assert ways(found)[-1] == f"{__name__}.Trainer.shared[{SEARCHES + 3}]"


def test_what_was_not_looked_for_is_told_apart(models):
    for number in range(SEARCHES + 4):
        setattr(models, f"loss_{number}", torch.ones(8))
    found = find_holders(sizes(*(getattr(models, f"loss_{n}") for n in range(SEARCHES + 4))))
    assert [kept.by for kept in found[-5:]] == [
        f"models.loss_{SEARCHES - 1}",
        None,
        None,
        None,
        None,
    ]


def test_looking_at_a_long_list_walks_the_heap_once_per_item(models, monkeypatch):
    models.LOSSES = [torch.ones(8) for _ in range(SEARCHES)]
    size, calls = sizes(*models.LOSSES), []
    of_torch = gc.get_referrers
    monkeypatch.setattr(gc, "get_referrers", lambda *a: calls.append(1) or of_torch(*a))
    find_holders(size)
    assert len(calls) <= SEARCHES + 4


def test_an_attribute_of_a_class_is_named_with_it():
    Trainer.shared.append(torch.ones(8))
    try:
        found = find_holders(sizes(Trainer.shared[0]))
    finally:
        Trainer.shared.clear()
    assert ways(found) == [f"{__name__}.Trainer.shared[0]"]


def test_parameters_and_gradients_have_the_path_of_their_module(models):
    models.model = nn.Sequential(nn.Linear(4, 4))
    models.model(torch.ones(1, 4)).sum().backward()
    own, gradient = sizes(models.model[0].weight), sizes(models.model[0].weight.grad)
    assert ways(find_holders(own)) == ["models.model.0.weight"]
    assert ways(find_holders(gradient)) == ["models.model.0.weight.grad"]


def test_what_only_a_graph_holds_is_found_through_its_root(models):
    x = torch.randn(8, requires_grad=True)
    y = x.exp()
    models.loss, size = y.sum(), sizes(y)
    del x, y
    assert ways(find_holders(size)) == ["models.loss, in its autograd graph"]


def test_a_leaf_that_only_a_graph_holds_is_found_through_its_root(models):
    leaf = torch.randn(8, requires_grad=True)
    models.loss, size = (leaf + 1).sum(), sizes(leaf)
    del leaf
    assert ways(find_holders(size)) == ["models.loss, in its autograd graph"]


def test_a_closure_is_named_with_its_variable(models):
    def hooked(tensor: torch.Tensor) -> object:
        return lambda: tensor

    models.hook = hooked(torch.ones(8))
    found = find_holders(sizes(models.hook()))
    assert ways(found) == ["models.hook, its variable 'tensor'"]


def test_an_array_of_numpys_is_named_in_whatever_holds_it(models):
    pytest.importorskip("numpy")
    tensors = [torch.ones(8) for _ in range(3)]
    wanted = sizes(*tensors)
    models.PREDICTIONS = [tensors[0].numpy()]
    models.ALONE = {"last": tensors[1].numpy()[2:]}
    models.TRAINER = Trainer()
    models.TRAINER.held = tensors[2].numpy().data
    del tensors
    found = ways(find_holders(wanted))
    assert found == ["models.PREDICTIONS[0]", "models.ALONE['last']", "models.TRAINER.held"]


def test_slots_and_instances_are_attributes(models):
    models.slots, models.trainer = Slots(), Trainer()
    models.slots.tensor, models.trainer.held = torch.ones(8), [torch.ones(16)]
    found = find_holders(sizes(models.slots.tensor, models.trainer.held[0]))
    assert [h.by for h in found] == ["models.trainer.held[0]", "models.slots.tensor"]


def test_each_attribute_has_a_way_of_its_own(models):
    models.trainer = Trainer()
    vars(models.trainer).update(first=torch.ones(8), second=torch.ones(8))
    wanted = sizes(models.trainer.first, models.trainer.second)
    assert ways(find_holders(wanted)) == ["models.trainer.first", "models.trainer.second"]


def test_a_local_variable_is_named_with_its_function():
    kept = torch.ones(8)
    (found,) = find_holders(sizes(kept))
    assert found.by.startswith("kept in test_a_local_variable_is_named_with_its_function (")


def test_a_traceback_is_named_with_the_frame_that_it_keeps(models):
    def failing() -> None:
        tensor = torch.ones(8)
        models.size = sizes(tensor)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        failing()
    (found,) = find_holders(models.size)
    assert found.by.startswith("a frame of failing (test_holders.py:")
    assert found.by.endswith("that a traceback keeps: tensor")
    del caught


def failing(models: types.ModuleType, calls_count: int) -> None:
    tensor = torch.ones(8 << calls_count)
    models.sizes.update(sizes(tensor))
    if calls_count:
        failing(models, calls_count - 1)
    raise ZeroDivisionError


def test_frames_are_named_with_the_exception_that_keeps_them(models):
    models.sizes = {}
    try:
        failing(models, 1)
    except ZeroDivisionError as error:
        models.LAST_ERROR = error
    # The second time a frame has a dict of its variables.
    for _ in range(2):
        found = ways(find_holders(models.sizes))
        folded = [re.sub(r"py:\d+", "py", way) for way in found]
        assert folded == 2 * ["models.LAST_ERROR, frame of failing (test_holders.py): tensor"]


def test_an_exception_may_be_the_cause_of_another(models):
    models.sizes, models.trainer = {}, Trainer()
    try:
        try:
            failing(models, 0)
        except ZeroDivisionError as error:
            raise RuntimeError from error
    except RuntimeError as error:
        models.trainer.held = [error]
    (way,) = ways(find_holders(models.sizes))
    assert way.startswith("models.trainer.held[0], frame of failing (test_holders.py:")


def test_an_exception_in_a_local_variable_is_named_with_its_function(models):
    models.sizes = {}
    try:
        failing(models, 0)
    except ZeroDivisionError as error:
        kept = error
    (way,) = ways(find_holders(models.sizes))
    assert way.startswith("kept in test_an_exception_in_a_local_variable")
    assert way.endswith("): tensor")
    del kept


class Caller:
    """Calls a function and keeps why it fails."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []

    def call(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            function(*arguments)
        except ZeroDivisionError as error:
            self.errors.append(error)


def test_frames_that_know_the_keeper_of_their_exception_are_not_on_the_way(models):
    models.sizes, models.jobs = {}, {"a": (Caller(),)}
    models.jobs["a"][0].call(failing, models, 0)
    (way,) = ways(find_holders(models.sizes))
    assert way.startswith("models.jobs['a'][0].errors[0], frame of failing (test_holders.py:")


def test_what_the_program_holds_is_named_before_the_log_that_pytest_captures(models, caplog):
    def logged(kept: list[torch.Tensor]) -> dict[tuple[str, int], int]:
        tensor = torch.ones(64)
        logging.getLogger(__name__).warning("seen %s", tensor)
        kept.append(tensor)
        return sizes(tensor)

    (way,) = ways(find_holders(logged([])))
    assert way.startswith("the log that pytest captures: records[0].args")
    models.KEPT = {"last": [[]]}
    (way,) = ways(find_holders(logged(models.KEPT["last"][0])))
    assert way == "models.KEPT['last'][0][0]"


def test_the_log_that_pytest_captures_keeps_exceptions(models, caplog):
    models.sizes = {}
    try:
        failing(models, 0)
    except ZeroDivisionError:
        logging.getLogger(__name__).exception("failed")
    (way,) = ways(find_holders(models.sizes))
    assert way.startswith("the log that pytest captures: records[0].exc_info[")
    assert re.search(r"\], frame of failing \(test_holders.py:\d+\): tensor$", way)


def test_the_interpreter_s_note_of_an_exception_is_no_name(models, monkeypatch):
    models.sizes = {}
    with pytest.raises(ZeroDivisionError) as caught:
        failing(models, 0)
    monkeypatch.setattr(sys, "last_value", caught.value, raising=False)
    (way,) = ways(find_holders(models.sizes))
    assert way.endswith("that a traceback keeps: tensor")


def numbers(models: types.ModuleType) -> Iterator[int]:
    tensor = torch.ones(8)
    models.sizes = sizes(tensor)  # type: ignore[attr-defined]
    yield len(tensor)


async def awaited(models: types.ModuleType) -> None:
    tensor = torch.ones(8)
    models.sizes = sizes(tensor)  # type: ignore[attr-defined]
    await Pause()  # type: ignore[misc]
    del tensor


async def streamed(models: types.ModuleType) -> AsyncIterator[int]:
    tensor = torch.ones(8)
    models.sizes = sizes(tensor)  # type: ignore[attr-defined]
    yield len(tensor)


class Pause:
    def __await__(self) -> Iterator[None]:
        yield


def suspended(found: list[Kept]) -> str:
    """The only way; before Python 3.11 a generator's variables are in a frame like any other's."""
    (way,) = ways(found)
    return re.sub(r"frame of (\w+) \(test_holders.py:\d+\)", r"suspended \1", way)


def test_a_generator_is_named_with_what_keeps_it(models):
    models.LOADERS = [numbers(models)]
    next(models.LOADERS[0])
    assert suspended(find_holders(models.sizes)) == "models.LOADERS[0], suspended numbers: tensor"
    (loader,) = models.LOADERS
    del models.LOADERS
    way = suspended(find_holders(models.sizes))
    assert way.startswith("loader in test_a_generator_is_named_with_what_keeps_it (")
    assert way.endswith("), suspended numbers: tensor")
    loader.close()


def test_a_coroutine_is_named_with_what_keeps_it(models):
    models.task = awaited(models)
    models.task.send(None)
    assert suspended(find_holders(models.sizes)) == "models.task, suspended awaited: tensor"
    models.task.close()


def test_an_asynchronous_generator_is_named_with_what_keeps_it(models):
    models.stream = streamed(models)
    with contextlib.suppress(StopIteration):
        models.stream.__anext__().send(None)
    assert suspended(find_holders(models.sizes)) == "models.stream, suspended streamed: tensor"


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
def test_a_cycle_is_named_by_the_class_that_closes_it():
    def left_behind() -> dict[tuple[str, int], int]:
        trainer = Trainer()
        trainer.held = {"batch": torch.ones(8)}
        return sizes(trainer.held["batch"])

    (found,) = find_holders(left_behind())
    assert (found.in_garbage, found.by) == (True, f"{__name__}.Trainer: held['batch']")


@pytest.mark.usefixtures("no_collection")
def test_an_exception_in_a_cycle_is_named_with_who_keeps_it():
    def check(hidden: torch.Tensor) -> None:
        raise ValueError(hidden.shape)

    def run() -> dict[tuple[str, int], int]:
        errors, tensor = [], torch.ones(8)
        try:
            check(tensor)
        except ValueError as error:
            errors.append(error)
        place = sizes(tensor)
        del tensor
        return place

    (found,) = find_holders(run())
    keeper, _, frame = found.by.partition(", frame of check")
    assert keeper == "ValueError, kept by errors[0] in run"
    assert frame.endswith("): hidden")


class Waking:
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        raise AssertionError("woken")

    def __getattr__(self, name: str) -> object:
        raise AssertionError("woken")


def test_proxies_that_are_near_are_not_woken(models):
    class Owner:
        pass

    owner, lazy = Owner(), Waking()
    owner.tensor = lazy.tensor = torch.ones(8)  # type: ignore[attr-defined]
    models.proxy, models.dead = weakref.proxy(owner), weakref.proxy(Owner())
    models.owner, models.lazy, size = owner, lazy, sizes(owner.tensor)  # type: ignore[attr-defined]
    models.held = [models.proxy, models.dead, lazy]
    del owner, lazy
    (found,) = find_holders(size)
    assert found.by in ("models.owner.tensor", "models.lazy.tensor")


@pytest.mark.usefixtures("no_collection")
def test_a_function_that_refers_to_itself_is_a_cycle():
    def left_behind() -> dict[tuple[str, int], int]:
        tensor = torch.ones(8)

        def again() -> object:
            return tensor, again

        return sizes(tensor)

    (found,) = find_holders(left_behind())
    assert found.in_garbage
    assert found.by.endswith("left_behind.<locals>.again, its variable 'tensor'")


@pytest.mark.usefixtures("no_collection")
def test_what_the_graph_of_garbage_holds_is_garbage():
    def left_behind() -> dict[tuple[str, int], int]:
        trainer = Trainer()
        x = torch.randn(8, requires_grad=True)
        y = x.exp()
        trainer.held = y.sum()
        return sizes(y)

    (found,) = find_holders(left_behind())
    by = f"{__name__}.Trainer: held, in its autograd graph"
    assert (found.in_garbage, found.by) == (True, by)


@pytest.mark.usefixtures("no_collection")
def test_garbage_is_freed_and_none_is_left_for_others_to_see():
    trainer = Trainer()
    trainer.held = torch.ones(8)
    size = sizes(trainer.held)
    del trainer
    flags, known = gc.get_debug(), list(gc.garbage)
    find_holders(size)
    assert not [o for o in gc.get_objects() if type(o) is Trainer]
    assert (gc.get_debug(), gc.garbage) == (flags, known)


def test_nothing_to_look_for_finds_nothing():
    assert find_holders({}) == []


def test_what_no_tensor_holds_is_told_apart_from_garbage():
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(nn.Linear(50, 50)), buffer)
    buffer.seek(0)
    measurement = BodyMeasurement("cpu")
    measurement.start()
    loaded = torch.jit.load(buffer)
    node = (torch.ones(300, requires_grad=True) * 2).exp().grad_fn
    Trainer().held = torch.ones(20)
    with gc_paused():
        measurement.stop()
        found = [held.holder for held in measurement.find_holders()]
    unseen = [holder for holder in found if holder.by == NO_TENSOR]
    assert {holder.fate for holder in unseen} == {Fate.HELD}
    assert sum(holder.size_bytes for holder in unseen) >= 50 * 50 * 4 + 300 * 4
    assert [h.fate for h in found if h.by.endswith("Trainer: held")] == [Fate.GARBAGE]
    assert (loaded, node) != (None, None)
