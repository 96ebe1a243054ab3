"""Context managers without a generator."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from pytest_torchmem.contexts import Around, Originals


def test_the_end_gets_what_the_beginning_returned_also_after_an_exception() -> None:
    ended: list[str] = []

    def fail() -> None:
        with Around(lambda: "begun", ended.append) as value:
            assert value == "begun"
            assert not ended
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert ended == ["begun"]


def calls_of_c_around(
    context: Callable[[Callable[..., None]], AbstractContextManager[object]],
) -> list[int]:
    """How many calls of C are open where a context begins and where it ends."""
    depths: list[int] = []
    now = 0

    def trace(frame: object, event: str, _: object) -> None:
        nonlocal now
        now += {"c_call": 1, "c_return": -1, "c_exception": -1}.get(event, 0)
        if event == "call" and frame.f_code.co_name == "note":  # type: ignore[attr-defined]
            depths.append(now)

    def note(*_: object) -> None:
        pass

    around = context(note)
    sys.setprofile(trace)
    try:
        with around:
            pass
    finally:
        sys.setprofile(None)
    return depths


def test_no_call_of_c_stands_between_the_block_and_its_ends() -> None:
    @contextmanager
    def generator(note: Callable[[], None]) -> Iterator[None]:
        note()
        yield
        note()

    assert calls_of_c_around(lambda note: Around(note, note)) == [0, 0]
    assert calls_of_c_around(generator) == [1, 1]


def test_originals_are_back_in_the_block_and_what_replaced_them_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    originals, real = Originals(), (os.getpid, Path.exists, time.monotonic)
    originals.note()
    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr(Path, "exists", lambda self: False)
    originals.note()
    with originals.back():
        assert (os.getpid, Path.exists, time.monotonic) == real
        with originals.back():
            assert (os.getpid, Path.exists) == real[:2]
        assert (os.getpid, Path.exists) == real[:2]
    assert os.getpid() == 1
    assert not Path(__file__).exists()


def test_originals_that_are_back_are_not_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    originals, looks = Originals(), list[str]()
    originals.note()
    look = originals._replaced
    monkeypatch.setattr(originals, "_replaced", lambda: looks.append("") or look())
    for _ in range(2):
        with originals.back(), originals.back():
            pass
    assert len(looks) == 2
