"""Which nodes were made while hooks were in force."""

from __future__ import annotations

import pytest

from pytest_torchmem.record.owners import pack_hooks
from pytest_torchmem.record.torch_api import autograd


@pytest.fixture
def thread(monkeypatch: pytest.MonkeyPatch) -> pack_hooks._Thread:
    numbers = iter(range(10, 100, 10))
    monkeypatch.setattr(autograd, "next_sequence_number", lambda: next(numbers))
    return pack_hooks._Thread()  # known from 10 on


def test_what_is_made_between_push_and_pop_is_hooked(thread: pack_hooks._Thread) -> None:
    thread.push()  # at 20
    thread.push()
    thread.pop()
    assert [thread.hooked(number) for number in (19, 20, 99)] == [False, True, True]
    thread.pop()  # at 30
    thread.push()  # at 40
    found = [thread.hooked(number) for number in (19, 20, 29, 30, 39, 40)]
    assert found == [False, True, True, False, False, True]


def test_hooks_that_were_there_before_leave_what_was_made_unknown(
    thread: pack_hooks._Thread,
) -> None:
    thread.pop()  # at 20
    assert thread.known_from == 20
    thread.push()  # at 30
    assert [thread.hooked(number) for number in (29, 30)] == [False, True]
