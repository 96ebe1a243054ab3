"""What is alive, asked of the garbage collector."""

from __future__ import annotations

from pytest_torchmem.record.live_objects import instances_of


class Base:
    pass


class Derived(Base):
    pass


class Other:
    pass


class Proxy:
    """Says that it is a Base, and must not be asked."""

    @property
    def __class__(self) -> type[object]:  # type: ignore[override]
        raise AssertionError("a proxy was woken")


class Named(type):
    def __subclasses__(cls) -> list[type[object]]:  # type: ignore[override]
        raise AssertionError("a metaclass may mean something else by this name")


class WithMetaclass(Base, metaclass=Named):
    pass


def test_instances_of_classes_below_are_found_and_others_are_not():
    alive = [Base(), Derived(), Other(), Proxy(), WithMetaclass()]
    found = instances_of([Base])
    assert {id(thing) for thing in found} == {id(alive[0]), id(alive[1]), id(alive[4])}


def test_nothing_is_alive_of_no_class():
    assert instances_of([]) == []
