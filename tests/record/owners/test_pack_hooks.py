"""Which nodes were made while hooks were in force."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from pytest_torchmem.record.owners.autograd_graph import PackHookWatch, surely_without
from pytest_torchmem.record.patches import Installed
from pytest_torchmem.record.recorder import Recorder
from pytest_torchmem.record.torch_api import autograd

Node = torch.autograd.graph.Node


@pytest.fixture(autouse=True)
def as_before_2_10(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autograd, "READS_SAVED", False)
    monkeypatch.setattr(PackHookWatch, "latest", None)


@pytest.fixture
def patches() -> Iterator[Installed]:
    with Installed() as installed:
        yield installed


def node() -> Node:
    found = (torch.ones(1, requires_grad=True) * 2).grad_fn
    assert found is not None
    return found


def hooks() -> saved_tensors_hooks:
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def test_what_is_made_between_push_and_pop_is_hooked(patches: Installed) -> None:
    before = node()
    PackHookWatch().install(patches)
    free = node()
    with hooks():
        hooked = [node()]
        with hooks():
            hooked.append(node())
        hooked.append(node())
    between = node()
    with hooks():
        pass
    again = node()
    assert [surely_without(n) for n in (free, between, again)] == [True] * 3
    assert [surely_without(n) for n in (before, *hooked)] == [False] * 4


def test_hooks_that_were_there_before_leave_what_was_made_unknown(patches: Installed) -> None:
    with hooks():
        PackHookWatch().install(patches)
        hooked = node()
    free = node()
    assert [surely_without(n) for n in (hooked, free)] == [False, True]


def test_what_was_known_stays_known_and_nothing_that_is_made_later(patches: Installed) -> None:
    assert not surely_without(node())
    PackHookWatch().install(patches)
    free = node()
    patches.remove()
    assert [surely_without(n) for n in (free, node())] == [True, False]


def test_hooks_of_another_thread_are_not_meant(patches: Installed) -> None:
    PackHookWatch().install(patches)
    other = hooks()
    thread = threading.Thread(target=other.__enter__)
    thread.start()
    thread.join()
    assert surely_without(node())


@pytest.mark.parametrize("reads_saved", [True, False])
def test_nothing_is_watched_where_torch_lets_read_what_is_saved(
    reads_saved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autograd, "READS_SAVED", reads_saved)
    recorder = Recorder(torch.device("cpu"))
    recorder.start()
    recorder.cancel()
    assert (PackHookWatch.latest is None) == reads_saved
