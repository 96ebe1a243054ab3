"""What local variables lead to, noted while the program runs."""

import gc
import weakref

import pytest
import torch

from pytest_torchmem.measuring.body import BodyMeasurement
from pytest_torchmem.record.holders.local_variables import OBJECTS, places_in_local_variables
from pytest_torchmem.record.owners.places import places_of


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.last = None

    def forward(self, x):
        self.last = x + 1
        return self.layer(self.last)


def way_to(place):
    return places_in_local_variables().get(place, "")


def test_a_tensor_is_found_by_the_variable_that_leads_to_it():
    kept = torch.ones(3)
    assert way_to(*places_of(kept[1:])).startswith("kept in test_a_tensor_is_found_by")


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
    ways = set(places_in_local_variables().values())
    assert f"loss in {test}, in its autograd graph" in ways
    assert way_to(*places_of(saved)).startswith("saved in ")


def test_what_the_graph_of_a_second_variable_keeps_is_found_too():
    def loss_of(leaf):
        return (leaf * 2).exp().sum()

    first = loss_of(torch.ones(5, requires_grad=True))
    second = loss_of(torch.ones(5, requires_grad=True))
    ways = set(places_in_local_variables().values())
    test = "test_what_the_graph_of_a_second_variable_keeps_is_found_too"
    assert {f"{name} in {test}, in its autograd graph" for name in ("first", "second")} <= ways
    del first, second


def test_nothing_is_kept_alive():
    tensor = torch.ones(3)
    gone = weakref.ref(tensor)
    enabled = gc.isenabled()
    gc.disable()
    try:
        places_in_local_variables()
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
        found = places_in_local_variables()
    assert [way.split()[0] for way in found.values()] == ["kept"]
    del kept, lazy


def test_a_namespace_that_somebody_asked_for_stays():
    tensor = torch.ones(3)
    namespace = locals()
    places_in_local_variables()
    assert namespace["tensor"] is tensor


def test_not_every_object_is_looked_at():
    many = [[number] for number in range(2 * OBJECTS)]
    many.append(torch.ones(3))
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
