"""What is alive, asked of the garbage collector."""

from __future__ import annotations

import gc
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from pytest_torchmem.record import heap
from pytest_torchmem.record.heap import instances_of
from pytest_torchmem.record.owners import live_objects
from pytest_torchmem.record.owners.live_objects import Census


class Base:
    pass


class Derived(Base):
    pass


class Other:
    pass


class Holder:
    """Is looked for, too, and holds others."""

    def __init__(self, *held: object) -> None:
        self.held = {"all of them": list(held)}


def ids(things: list[object]) -> list[int]:
    return sorted(map(id, things))


@pytest.fixture
def quiet_collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No collection but those that a test asks for, and nothing that somebody froze before.

    Nor are there cycles of another test's: no holder leads to what is in them.
    """
    gc.collect()
    monkeypatch.setattr(heap, "get_freeze_count", lambda: 0)
    enabled = gc.isenabled()
    gc.disable()
    yield
    if enabled:
        gc.enable()


@pytest.fixture
def quiet_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other thread runs, as one of pytest-xdist's does when the other worker reports."""
    monkeypatch.setattr(live_objects, "_where_others_stand", dict)


@pytest.mark.parametrize("seed", range(3))
def test_a_census_finds_what_a_look_at_all_objects_finds(quiet_collector: None, seed: int) -> None:
    random.seed(seed)
    census = Census(Base)
    alive: list[object] = []
    for _ in range(60):
        match random.choice(("make", "make", "cycle", "drop", "collect", "clean", "find")):
            case "make":
                alive.append(random.choice((Base, Derived, Other))())
            case "cycle":
                base = Base()
                base.__dict__["me"] = base
            case "drop":
                if alive:
                    alive.pop(random.randrange(len(alive)))
            case "collect":
                gc.collect(random.randrange(3))
            case "clean":
                census.settle(collect=random.random() < 0.5)
            case "find":
                assert ids(census.find()) == ids(instances_of([Base]))
    assert ids(census.find()) == ids(instances_of([Base]))


@pytest.mark.parametrize("seed", range(2))
def test_a_census_that_lets_go_finds_the_same(quiet_collector: None, seed: int) -> None:
    random.seed(seed)
    census = Census(Base, Holder, released=Base)
    alive: list[object] = []
    for _ in range(40):
        match random.choice(("make", "hold", "move", "cycle", "drop", "collect", "clean", "go")):
            case "make":
                alive.append(random.choice((Base, Derived, Other))())
            case "hold":
                alive.append(Holder(Base(), Derived()))
            case "move":
                holders = [thing for thing in alive if isinstance(thing, Holder)]
                alive += [thing for holder in holders for thing in holder.held["all of them"]]
            case "cycle":
                base = Base()
                base.__dict__["me"] = base
                del base
            case "drop":
                if alive:
                    alive.pop(random.randrange(len(alive)))
            case "collect":
                gc.collect(random.choice((0, 0, 0, 1, 2)))
            case "clean":
                census.settle(collect=random.random() < 0.2)
            case "go":
                census.let_go()
                assert not any(map(weakref.getweakrefs, instances_of([Base])))
                continue
        if random.random() < 0.3:
            assert ids(census.find()) == ids(instances_of([Base, Holder]))
        if random.random() < 0.3:
            assert ids(census.find_kept()) == ids(instances_of([Holder]))


def looks_at_everything(
    census: Census, monkeypatch: pytest.MonkeyPatch, find: Callable[[Census], object] = Census.find
) -> bool:
    looks = []
    with monkeypatch.context() as patched:
        look = instances_of
        patched.setattr(live_objects, "instances_of", lambda c: looks.append(c) or look(c))
        find(census)
    return bool(looks)


@pytest.mark.skipif(not live_objects.HAS_GENERATIONS, reason="no generations to go by")
def test_a_census_looks_at_everything_only_when_it_must(
    quiet_collector: None, quiet_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    census = Census(Base)
    assert looks_at_everything(census, monkeypatch)
    assert not looks_at_everything(census, monkeypatch)
    gc.collect(0)
    census.settle(collect=True)
    assert not looks_at_everything(census, monkeypatch)
    for generation in (1, 2):
        gc.collect(generation)
        assert looks_at_everything(census, monkeypatch)


@pytest.mark.skipif(not live_objects.HAS_GENERATIONS, reason="no generations to go by")
def test_what_was_let_go_of_is_found_by_its_holder_or_known_to_be_gone(
    quiet_collector: None, quiet_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    census = Census(Base, Holder, released=Base)
    holder, gone, moved = Holder(Base()), Base(), Base()
    holder.held["all of them"].append(moved)
    census.settle(collect=False)
    census.let_go()
    del gone
    young = Base()
    assert not looks_at_everything(census, monkeypatch)
    assert ids(census.find()) == ids([holder, *holder.held["all of them"], young])
    census.settle(collect=False)
    census.let_go()
    holder.held["all of them"].remove(moved)
    assert looks_at_everything(census, monkeypatch)
    assert ids(census.find()) == ids([holder, *holder.held["all of them"], young, moved])


@pytest.mark.skipif(not live_objects.HAS_GENERATIONS, reason="no generations to go by")
def test_what_is_kept_is_found_while_what_was_let_go_of_is_out_of_sight(
    quiet_collector: None, quiet_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    census = Census(Base, Holder, released=Base)
    holder, unheld = Holder(), Base()
    census.settle(collect=False)
    census.let_go()
    assert not looks_at_everything(census, monkeypatch, Census.find_kept)
    assert ids(census.find_kept()) == ids([holder])
    gc.collect(1)
    assert looks_at_everything(census, monkeypatch, Census.find_kept)
    assert ids(census.find()) == ids([holder, unheld])


@pytest.mark.skipif(not live_objects.HAS_GENERATIONS, reason="no generations to go by")
def test_what_a_module_has_as_a_variable_is_found_there(
    quiet_collector: None, quiet_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    census = Census(Base, released=Base)
    module = ModuleType("with_a_base")
    module.__dict__["variable"] = Base()
    monkeypatch.setitem(sys.modules, "with_a_base", module)
    census.settle(collect=False)
    for _ in range(2):
        census.let_go()
        assert not looks_at_everything(census, monkeypatch)
        assert ids(census.find()) == ids([module.variable])
        census.settle(collect=False)


@pytest.mark.skipif(not live_objects.HAS_GENERATIONS, reason="no generations to go by")
def test_what_a_function_holds_is_looked_for_everywhere_at_first(
    quiet_collector: None, quiet_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    census = Census(Base, released=Base)

    def function_with(base: Base) -> Callable[[], Base]:
        return lambda: base

    function = function_with(Base())
    looks = []
    for _ in range(12):
        census.settle(collect=False)
        census.let_go()
        looks.append(looks_at_everything(census, monkeypatch))
        assert ids(census.find()) == ids([function()])
    assert looks == [True] * 8 + [False] * 4
    census.let_go()
    moved = function()
    del function
    assert looks_at_everything(census, monkeypatch)
    assert ids(census.find()) == ids([moved])


class Mark:
    """Holds what all tests of a function are parametrized with, as pytest's does."""

    def __init__(self, *values: tuple[Base, ...]) -> None:
        self.args = ["base", list(values)]


class Case:
    """Holds what one of these tests is parametrized with."""

    def __init__(self, base: Base) -> None:
        self.params = {"base": base}


@pytest.mark.skipif(not live_objects.HAS_GENERATIONS, reason="no generations to go by")
@pytest.mark.parametrize("count", [5, 60, 300])
def test_what_tests_are_parametrized_with_is_looked_for_everywhere_at_first(
    quiet_collector: None, quiet_threads: None, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    census = Census(Base, released=Base)

    def parametrized() -> tuple[Mark, list[Case]]:
        bases = [Base() for _ in range(count)]
        return Mark(*((base,) for base in bases)), [Case(base) for base in bases]

    def looks() -> bool:
        census.settle(collect=False)
        census.let_go()
        looked = looks_at_everything(census, monkeypatch)
        assert ids(census.find()) == ids(instances_of([Base]))
        return looked

    kept = [parametrized()]
    assert [looks() for _ in range(10)] == [True] * 8 + [False] * 2
    # Further holders do not take the place of those.
    kept.append(parametrized())
    gc.collect(1)
    assert [looks() for _ in range(10)] == [True] * 8 + [False] * 2


@pytest.mark.skipif(not live_objects.HAS_GENERATIONS, reason="no generations to go by")
def test_a_census_knows_nothing_of_what_another_thread_made_while_it_collected(
    quiet_collector: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    census = Census(Base)
    turn, done, alive = threading.Event(), threading.Event(), []

    def work() -> None:
        turn.wait()
        alive.append(Base())
        done.set()
        turn.clear()
        turn.wait()

    def let_it_run(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            turn.set()
            done.wait()

    thread = threading.Thread(target=work)
    thread.start()
    gc.callbacks.append(let_it_run)
    try:
        census.settle(collect=True)
        assert ids(census.find()) == ids(alive)  # type: ignore[arg-type]
    finally:
        gc.callbacks.remove(let_it_run)
        turn.set()
        thread.join()


def test_to_settle_frees_no_garbage_where_the_collector_is_off(quiet_collector: None) -> None:
    census = Census(Base)
    thing = Base()
    thing.__dict__["me"] = thing
    left = weakref.ref(thing)
    del thing
    before = gc.get_freeze_count()
    census.settle(collect=False)
    # What Python 3.12 itself has frozen is thawed.
    assert gc.get_freeze_count() in (0, before)
    assert left() is not None
    assert any(found is left() for found in gc.get_objects())
    census.settle(collect=True)
    assert left() is None


@pytest.mark.skipif(not live_objects.HAS_GENERATIONS, reason="Python collects by itself")
@pytest.mark.parametrize("is_on", [True, False])
def test_garbage_of_many_small_tests_goes_as_it_does_without_us(
    quiet_collector: None, is_on: bool
) -> None:
    census, dead = Census(Base), []
    census.settle(collect=True)
    alive = len(gc.get_objects())
    for _ in range(20):
        for _ in range(alive // 40):
            cycle: list[object] = []
            cycle.append(cycle)
        thing = Base()
        thing.__dict__["me"] = thing
        dead.append(weakref.ref(thing))
        del thing
        if is_on:
            gc.enable()
        census.settle(collect=False)
        gc.disable()
    assert (dead[0]() is None) == is_on
    # Of twenty times a fortieth, no more than a fourth is ever left.
    assert (len(gc.get_objects()) < alive * 1.4) == is_on


@pytest.mark.skipif(not live_objects.HAS_GENERATIONS, reason="Python collects by itself")
def test_garbage_of_small_tests_alone_is_no_reason_to_look_at_everything(
    quiet_collector: None,
) -> None:
    census, old = Census(Base), Base()
    old.__dict__["me"] = old
    left = weakref.ref(old)
    census.settle(collect=True)
    del old
    for _ in range(20):
        cycles: list[list[object]] = [[number] for number in range(len(gc.get_objects()) // 40)]
        for cycle in cycles:
            cycle.append(cycle)
        # Python has looked at them while the test referred to them.
        gc.collect(0)
        del cycles, cycle
        gc.enable()
        census.settle(collect=False)
        gc.disable()
    assert left() is not None


def test_what_python_itself_froze_makes_no_look_longer(
    quiet_collector: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.12 freezes some 400 objects when it begins: each test took a second more."""
    looks = list[int]()
    monkeypatch.setattr(heap, "referents", lambda *things: looks.append(len(things)) or [])
    for count, expected in ((375, False), (100_000, True)):
        looks.clear()
        monkeypatch.setattr(heap, "get_freeze_count", lambda count=count: count)
        Census(Base).find()
        assert bool(looks) == expected


def test_what_a_user_froze_stays_frozen() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        Census(Base).settle(collect=False)
        assert gc.get_freeze_count() >= frozen
    finally:
        gc.unfreeze()
