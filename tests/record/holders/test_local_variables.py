"""What local variables lead to, noted while the program runs."""

import _thread
import functools
import gc
import threading
import weakref
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from pytest_torchmem.contexts import gc_paused
from pytest_torchmem.measuring.body_measurement import BodyMeasurement
from pytest_torchmem.record.holders import local_variables
from pytest_torchmem.record.holders.local_variables import OBJECTS, places_held_now
from pytest_torchmem.record.holders.search import young_garbage
from pytest_torchmem.record.owners.places import places_of

pytestmark = pytest.mark.searches


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.last = None

    def forward(self, x):
        self.last = x + 1
        return self.layer(self.last)


def way_to(place):
    return places_held_now()[0].get(place, "")


@pytest.mark.slow
def test_a_tensor_is_found_by_the_variable_that_leads_to_it():
    kept = torch.ones(3)
    assert way_to(*places_of(kept[1:])).startswith("kept in test_a_tensor_is_found_by")


def test_no_variable_lives_on_where_the_look_is_over_but_its_thread_is_not(monkeypatch):
    over = threading.Event()

    class LateToEnd:
        """A lock whose release takes until the test is over."""

        def __init__(self):
            self.lock = threading.Lock()
            self.acquire = self.lock.acquire

        def release(self):
            self.lock.release()
            over.wait(60)

    late = SimpleNamespace(allocate_lock=LateToEnd, start_new_thread=_thread.start_new_thread)
    monkeypatch.setattr(local_variables, "_thread", late)

    def body():
        model = Model()
        assert "model.layer.weight in body" in places_held_now()[0].values()
        return weakref.ref(model)

    model = body()
    try:
        assert model() is None
    finally:
        over.set()


def test_containers_and_attributes_are_part_of_the_way():
    def way(place):
        return way_to(place).partition(" in ")[0]

    losses = {"train": [torch.ones(1), torch.ones(2)]}
    model = Model()
    model(torch.ones(2, 4)).sum().backward()
    assert way(*places_of(losses["train"][1])) == "losses['train'][1]"
    assert way(*places_of(model.last)) == "model.last"
    assert way(*places_of(model.layer.weight)) == "model.layer.weight"
    assert way(*places_of(model.layer.weight.grad)) == "model.layer.weight.grad"


def test_what_a_graph_keeps_is_found_by_its_end():
    def loss_of(leaf):
        return (leaf * 2).exp().sum()

    loss = loss_of(torch.ones(5, requires_grad=True))
    saved = loss.grad_fn.next_functions[0][0]._saved_result
    test = "test_what_a_graph_keeps_is_found_by_its_end"
    ways = set(places_held_now()[0].values())
    assert f"loss in {test}, in its autograd graph" in ways
    assert way_to(*places_of(saved)).startswith("saved in ")


def test_what_the_graph_of_a_second_variable_keeps_is_found_too():
    def loss_of(leaf):
        return (leaf * 2).exp().sum()

    first = loss_of(torch.ones(5, requires_grad=True))
    second = loss_of(torch.ones(5, requires_grad=True))
    ways = set(places_held_now()[0].values())
    test = "test_what_the_graph_of_a_second_variable_keeps_is_found_too"
    assert {f"{name} in {test}, in its autograd graph" for name in ("first", "second")} <= ways
    del first, second


def test_nothing_is_kept_alive():
    tensor = torch.ones(3)
    gone = weakref.ref(tensor)
    enabled = gc.isenabled()
    gc.disable()
    try:
        places_held_now()
        del tensor
        assert gone() is None
    finally:
        if enabled:
            gc.enable()


def test_the_program_s_function_modes_hear_nothing_of_it():
    class Nosy(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            raise AssertionError(function)

    kept = torch.ones(3)
    lazy = torch.nn.LazyLinear(3)
    with Nosy():
        found, _ = places_held_now()
    assert [way.split()[0] for way in found.values()] == ["kept"]
    del kept, lazy


def test_a_namespace_that_somebody_asked_for_stays():
    tensor = torch.ones(3)
    namespace = locals()
    places_held_now()
    assert namespace["tensor"] is tensor


def test_not_every_object_is_looked_at():
    many = [[number] for number in range(2 * OBJECTS)]
    many.append(torch.ones(3))  # type: ignore[arg-type]
    near = torch.ones(3)
    (place,) = places_of(many[-1])
    assert way_to(place) == ""
    assert way_to(*places_of(near)).startswith("near in ")


def test_nobody_takes_it_for_a_thread_of_the_program():
    measurement = BodyMeasurement("cpu")
    measurement.start()
    with measurement.region("forward") as region:
        kept = torch.ones(64, 4)
    region.note_holders()
    assert measurement.stop().blind_spots == ()
    del kept


def test_a_place_that_something_else_took_since_is_not_asked_for():
    measurement = BodyMeasurement("cpu")

    def body():
        with measurement.region("forward") as region:
            gone = [torch.ones(64) for _ in range(200)]
        places = {place for tensor in gone for place in places_of(tensor)}
        gone.clear()
        later = [torch.ones(64) for _ in range(1000)]
        region.note_holders()
        return region, any(places & set(places_of(tensor)) for tensor in later)

    measurement.start()
    region, taken = body()
    measurement.stop()
    if not taken:
        pytest.skip("the system gave no tensor the place of the one that was freed")
    assert {str(held.holder) for held in region.find_holders()} == {"freed later"}


def test_what_a_region_left_behind_is_found_after_its_variables_are_gone():
    measurement = BodyMeasurement("cpu")

    def body():
        with measurement.region("forward") as region:
            loss = Model()(torch.ones(64, 4)).sum()
            batch = torch.ones(4096)
            dropped = [torch.ones(2048)]
        region.note_holders()
        dropped.clear()
        loss.backward()
        return region, batch[:0].tolist()

    measurement.start()
    region, _ = body()
    measurement.stop()
    told = {held.contributor.size_bytes: str(held.holder) for held in region.find_holders()}
    assert told[16384] == "held at its end by batch in body, freed later"
    assert told[8192] == "held at its end by dropped[0] in body, freed later"
    assert told[1024] == "held at its end by loss in body, in its autograd graph, freed later"


@dataclass(eq=False)
class Node:
    values: torch.Tensor
    owner: object = None

    def close(self) -> None:
        self.owner = self


def test_what_functions_and_exceptions_keep_is_part_of_the_way():
    def check(hidden):
        raise ValueError(hidden.shape)

    def adding():
        kept = []
        return kept.append, lambda: kept

    x, y, z = torch.ones(3), torch.ones(4), torch.ones(5)
    places = [*places_of(x), *places_of(y), *places_of(z)]
    errors = []
    try:
        check(x)
    except ValueError as error:
        errors.append(error)
    append, enclosing = adding()
    append(y)
    later = functools.partial(print, z)
    del x, y, z
    by_exception, by_function, by_partial = (way_to(place) for place in places)
    assert (callable(enclosing), callable(later)) == (True, True)
    test = "test_what_functions_and_exceptions_keep_is_part_of_the_way"
    assert by_exception.startswith(f"errors[0] in {test}, frame of check (test_local_variables.py:")
    assert by_exception.endswith("): hidden")
    assert by_function == f"enclosing in {test}, its variable 'kept'[0]"
    assert by_partial == f"later.args[0] in {test}"


def test_a_cycle_within_a_region_is_named_after_it_was_collected():
    measurement = BodyMeasurement("cpu")

    def body():
        with gc_paused():
            with measurement.region("forward") as region:
                for _ in range(3):
                    Node(torch.ones(4096)).close()
            region.note_holders()
        gc.collect()
        return region

    measurement.start()
    region = body()
    measurement.stop()
    told = {str(held.holder) for held in region.find_holders()}
    by = f"{__name__}.Node: values"
    assert told == {f"freed only by the garbage collector, in a cycle of {by}"}


def test_what_a_cycle_holds_is_named_in_the_body_and_in_its_region():
    measurement = BodyMeasurement("cpu")
    measurement.start()
    with gc_paused():
        with measurement.region("forward") as region:
            Node(torch.ones(4096)).close()
        measurement.stop()
        whole, part = measurement.find_holders(), region.find_holders()
    assert [held.holder for held in whole] == [held.holder for held in part]
    assert part[0].holder.by == f"{__name__}.Node: values"


def test_young_garbage_stays_as_it_is_and_nothing_else_is_taken_for_it():
    with gc_paused():
        alive = Node(torch.ones(1))
        alive.close()
        seen = weakref.ref(alive)
        gone = Node(torch.ones(1))
        gone.close()
        number = id(gone)
        del gone
        nodes = [thing for thing in young_garbage() if type(thing) is Node]
        assert [id(node) for node in nodes] == [number]
    assert seen() is alive


def test_a_collection_leaves_no_young_garbage():
    gc.collect()
    assert not [thing for thing in young_garbage() if type(thing) is Node]
