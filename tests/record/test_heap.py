"""The objects of this process, and what they refer to."""

from __future__ import annotations

import subprocess
import sys
import weakref

from pytest_torchmem.record.heap import instances_of, variables_of


class Base:
    pass


class Derived(Base):
    pass


class Other:
    pass


class Proxy:
    """Says that it is a Base, and must not be asked."""

    @property  # type: ignore[misc]
    def __class__(self) -> type[object]:
        raise AssertionError("a proxy was woken")


class Named(type):
    def __subclasses__(cls) -> list[type[object]]:
        raise AssertionError("a metaclass may mean something else by this name")


class WithMetaclass(Base, metaclass=Named):
    pass


def test_instances_of_classes_below_are_found_and_others_are_not():
    alive = [Base(), Derived(), Other(), Proxy(), WithMetaclass()]
    found = instances_of([Base])
    assert {id(thing) for thing in found} == {id(alive[0]), id(alive[1]), id(alive[4])}


def test_nothing_is_alive_of_no_class():
    assert instances_of([]) == []


AWAITED = """
import asyncio, gc
from pytest_torchmem.record.heap import referents

async def wait():
    future = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(future.set_result, None)
    await future

async def wait_twice():
    await asyncio.gather(wait(), wait())

for _ in range(5):
    asyncio.run(wait_twice())
    assert len(referents(*gc.get_objects())) > 1000
    gc.collect()
"""


def test_the_collector_works_on_after_a_look_at_what_awaited_futures_left() -> None:
    subprocess.run([sys.executable, "-c", AWAITED], check=True, timeout=60)


def test_a_look_at_variables_keeps_none_that_the_function_deletes_later():
    thing = Other()
    gone = weakref.ref(thing)
    assert variables_of(sys._getframe())["thing"] is thing
    del thing
    assert gone() is None


def test_a_look_at_the_names_of_a_class_leaves_them_there():
    class Made:
        number = 1
        seen = variables_of(sys._getframe())

    assert (Made.number, Made.seen["number"]) == (1, 1)
