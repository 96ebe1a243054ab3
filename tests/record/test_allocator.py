"""Requested bytes, joined from the allocator's history."""

from __future__ import annotations

import pytest
import torch

from pytest_torchmem.record.devices import AllocatorHistory, HistoryEntry, requested_bytes
from pytest_torchmem.record.torch_api import allocator

MIB = 1024 * 1024


def test_each_allocation_gets_the_request_made_at_its_address() -> None:
    assert requested_bytes([512, 1024], [512, 2 * MIB], [(512, 4), (1024, MIB + 5)]) == [4, MIB + 5]


def test_an_address_used_again_takes_its_requests_in_order() -> None:
    assert requested_bytes([512, 512, 512], [512, 1024, 512], [(512, 1), (512, 700), (512, 3)]) == [
        1,
        700,
        3,
    ]


def test_a_request_larger_than_its_block_is_not_believed() -> None:
    assert requested_bytes([512, 1024], [512, 512], [(512, 513), (1024, 512)]) == [0, 512]


def test_an_address_with_other_counts_on_both_sides_is_not_believed() -> None:
    assert requested_bytes([512, 512], [512, 512], [(512, 8)]) == [0, 0]
    assert requested_bytes([512], [512], [(512, 8), (512, 9)]) == [0]


def test_without_a_history_nothing_is_known() -> None:
    assert requested_bytes([512], [512], []) == [0]


def test_what_happens_between_two_sessions_is_none_of_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[dict[str, object]] = []
    switched: list[bool] = []
    monkeypatch.setattr(allocator, "history", lambda device: told)
    monkeypatch.setattr(allocator, "history_is_recorded", lambda: False)
    monkeypatch.setattr(allocator, "record_history", switched.append)
    now = 0

    def at(time_us: int, action: str, address: int) -> None:
        nonlocal now
        now = time_us
        told.append({"time_us": time_us, "action": action, "addr": address, "size": 10})

    monkeypatch.setattr("pytest_torchmem.record.devices.time_ns", lambda: now * 1000 + 500)
    history = AllocatorHistory(torch.device("cuda", 0))
    history.start()
    sessions = []
    for first in (100, 200):
        at(first, "alloc", 1)
        now = first + 1
        history.begin()
        at(first + 2, "alloc", 2)
        at(first + 3, "segment_alloc", 3)
        at(first + 4, "free_requested", 2)
        at(first + 4, "free_completed", 2)
        now = first + 5
        history.end()
        at(first + 6, "alloc", 4)
        sessions.append(history.read())
    history.stop()
    assert sessions == [
        [HistoryEntry(True, 2, 10, first + 2_000), HistoryEntry(False, 2, 10, first + 4_000)]
        for first in (100_000, 200_000)
    ]
    assert history.requests == [(2, 10), (2, 10)]
    assert switched == [True, False]
