"""What is alive, asked of the garbage collector."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pytest_torchmem.record import heap
from pytest_torchmem.record.heap import instances_of
from pytest_torchmem.record.native.choice import Choice
from pytest_torchmem.record.owners import live_objects
from pytest_torchmem.record.owners.live_objects import Census, SwapWatch

pytestmark = [pytest.mark.slow, pytest.mark.searches(with_optimizers=True)]


class Base:
    pass


class Derived(Base):
    pass


class Other:
    pass


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


@pytest.fixture(params=["library", "alone"])
def census(request: pytest.FixtureRequest) -> Iterator[Census]:
    """A census that the library tells what becomes old, and one that has to do without."""
    made = Census(Base)
    if request.param == "library":
        library = Choice.of_process().library
        assert library
        made.watch_by(library)
    callbacks = [*gc.callbacks]
    yield made
    assert gc.callbacks == callbacks
    if made._callback:
        gc.callbacks.remove(made._callback)


@pytest.mark.nightly("library-1", "alone-1")
@pytest.mark.parametrize("seed", range(2))
def test_a_census_finds_what_a_look_at_all_objects_finds(
    quiet_collector: None, census: Census, seed: int
) -> None:
    random.seed(seed)
    alive: list[object] = []
    for _ in range(40):
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
                census.settle(lambda: random.random() < 0.5)
            case "find":
                assert ids(census.find()) == ids(instances_of([Base]))
    assert ids(census.find()) == ids(instances_of([Base]))


def looks_at_everything(census: Census, monkeypatch: pytest.MonkeyPatch) -> bool:
    looks = []
    with monkeypatch.context() as patched:
        look = instances_of
        patched.setattr(live_objects, "instances_of", lambda c: looks.append(c) or look(c))
        assert ids(census.find()) == ids(look([Base]))
    return bool(looks)


@pytest.mark.skipif(not live_objects.HAS_GENERATIONS, reason="no generations to go by")
def test_a_census_looks_at_everything_only_when_it_must(
    quiet_collector: None, quiet_threads: None, census: Census, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = [Base()]
    assert looks_at_everything(census, monkeypatch)
    assert not looks_at_everything(census, monkeypatch)
    alive.append(Derived())
    gc.collect(0)
    alive.append(Base())
    census.settle(lambda: True)
    assert not looks_at_everything(census, monkeypatch)
    for generation in (1, 2):
        alive.append(Base())
        gc.collect(0)  # in the second generation now
        alive.append(Base())
        gc.collect(generation)
        assert looks_at_everything(census, monkeypatch) != bool(census._callback)


@pytest.fixture
def watched() -> Iterator[Census]:
    census, library = Census(Base), Choice.of_process().library
    assert library
    census.watch_by(library)
    yield census
    if census._callback in gc.callbacks:
        gc.callbacks.remove(census._callback)


@pytest.mark.skipif(not live_objects.HAS_GENERATIONS, reason="no generations to go by")
def test_a_collection_that_nobody_told_of_is_followed_by_a_look_at_everything(
    quiet_collector: None, watched: Census, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched.find()
    gc.callbacks.remove(watched._callback)
    alive = Base()
    gc.collect(1)
    gc.callbacks.append(watched._callback)
    gc.collect(1)
    assert looks_at_everything(watched, monkeypatch)
    assert alive in watched.find()
    alive = Derived()
    gc.collect(1)
    assert not looks_at_everything(watched, monkeypatch)


@pytest.mark.skipif(not live_objects.HAS_GENERATIONS, reason="no generations to go by")
def test_what_dies_where_nobody_looks_for_long_is_forgotten(
    quiet_collector: None, watched: Census, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched.find()
    for _ in range(5):
        dead = [Base() for _ in range(60_000)]
        gc.collect(1)
        del dead
    assert len(watched._references) < 300_000
    assert looks_at_everything(watched, monkeypatch)
    assert len(watched._references) < 1000


@pytest.mark.skipif(not live_objects.HAS_GENERATIONS, reason="no generations to go by")
def test_another_callback_after_ours_may_let_other_threads_run(
    quiet_collector: None, watched: Census, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Choice.of_process().library
    watched.find()
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    later: Callable[[str, dict[str, int]], None] = lambda phase, info: None  # noqa: E731
    gc.callbacks.append(later)
    try:
        gc.collect(1)
        assert looks_at_everything(watched, monkeypatch)
        watched.watch_by(library)  # type: ignore[arg-type]
        gc.collect(1)
        assert not looks_at_everything(watched, monkeypatch)
    finally:
        gc.callbacks.remove(later)
        ended.set()
        thread.join()


def test_a_program_sees_no_reference_of_ours_where_it_swaps(watched: Census) -> None:
    base: Any = Base()
    references: Any = SwapWatch()
    assert base in watched.find()
    gc.collect(1)
    assert base in watched.find()
    assert weakref.getweakrefs(base)
    assert references.getweakrefs(base) == []
    mine = references.ref(base)
    assert references.getweakrefs(base) == [mine]


@pytest.mark.skipif(not live_objects.HAS_GENERATIONS, reason="no generations to go by")
def test_a_census_knows_nothing_of_what_another_thread_made_while_it_collected(
    quiet_collector: None, census: Census
) -> None:
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
        census.settle(lambda: True)
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
    census.settle()
    # What Python 3.12 itself has frozen is thawed.
    assert gc.get_freeze_count() in (0, before)
    assert left() is not None
    assert any(found is left() for found in gc.get_objects())
    census.settle(lambda: True)
    assert left() is None


@pytest.mark.skipif(not live_objects.HAS_GENERATIONS, reason="Python collects by itself")
@pytest.mark.parametrize("is_on", [True, False])
def test_garbage_of_many_small_tests_goes_as_it_does_without_us(
    quiet_collector: None, is_on: bool
) -> None:
    census, dead = Census(Base), []
    census.settle(lambda: True)
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
        census.settle()
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
    census.settle(lambda: True)
    del old
    for _ in range(20):
        cycles: list[list[object]] = [[number] for number in range(len(gc.get_objects()) // 40)]
        for cycle in cycles:
            cycle.append(cycle)
        # Python has looked at them while the test referred to them.
        gc.collect(0)
        del cycles, cycle
        gc.enable()
        census.settle()
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
        Census(Base).settle()
        assert gc.get_freeze_count() >= frozen
    finally:
        gc.unfreeze()
