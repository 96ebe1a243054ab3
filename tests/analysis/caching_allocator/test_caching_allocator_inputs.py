"""Where requests come from: lifetimes of storages, and torch's own allocator history."""

from __future__ import annotations

import numpy as np
import pytest

from pytest_torchmem.allocator import (
    Refusal,
    Request,
    RequestError,
    Requests,
    read_history,
    simulate,
)
from pytest_torchmem.values.units import MiB

INF = float("inf")


def rows(requests):
    columns = (requests.kind, requests.key, requests.size_bytes)
    return [(Request(k).name, key, size) for k, key, size in zip(*columns, strict=True)]


# --- lifetimes -------------------------------------------------------------------------------


def test_lifetimes_become_requests_in_order_of_time():
    requests = Requests.from_lifetimes([100, 200, 300], [-1.0, 2.0, 1.0], [INF, 5.0, 3.0])
    assert rows(requests) == [
        ("ALLOC", 0, 100),
        ("ALLOC", 2, 300),
        ("ALLOC", 1, 200),
        ("FREE", 2, 300),
        ("FREE", 1, 200),
    ]


def test_an_output_is_allocated_before_the_input_that_dies_with_it_is_freed():
    requests = Requests.from_lifetimes([30 * MiB, 30 * MiB], [0, 1], [1, 2])
    assert [name for name, *_ in rows(requests)] == ["ALLOC", "ALLOC", "FREE", "FREE"]
    assert simulate(requests).peak.reserved == 60 * MiB


def test_a_storage_of_one_moment_is_allocated_and_freed():
    requests = Requests.from_lifetimes([512], [3], [3])
    assert [name for name, *_ in rows(requests)] == ["ALLOC", "FREE"]


def test_lifetimes_can_have_streams():
    requests = Requests.from_lifetimes([1, 2], [0, 1], [INF, INF], stream=[7, 8])
    assert requests.stream.tolist() == [7, 8]


def test_no_lifetimes_are_no_requests():
    assert len(Requests.from_lifetimes([], [], [])) == 0


def test_impossible_lifetimes_are_refused():
    with pytest.raises(RequestError, match="storage 1 dies before it is born"):
        Requests.from_lifetimes([1, 1], [0, 2], [1, 1])
    with pytest.raises(RequestError, match="differ in length"):
        Requests.from_lifetimes([1, 1], [0, 2], [1])


# --- torch's history -------------------------------------------------------------------------


def entry(action, addr, size=0, stream=0, **more):
    return {"action": action, "addr": addr, "size": size, "stream": stream, **more}


def test_a_history_is_read_as_the_requests_that_made_it():
    history = read_history(
        [
            entry("segment_alloc", 0x1000, 20 * MiB),
            entry("alloc", 0x1000, 2 * MiB),
            entry("alloc", 0x9000, 3 * MiB, stream=5),
            entry("free_requested", 0x1000),
            entry("free_completed", 0x1000),
            entry("snapshot", 0),
            entry("alloc", 0x1000, 1 * MiB),
        ]
    )
    assert rows(history.requests) == [
        ("ALLOC", 0, 2 * MiB),
        ("ALLOC", 1, 3 * MiB),
        ("FREE", 0, 0),
        ("ALLOC", 2, 1 * MiB),
    ]
    assert history.requests.stream.tolist() == [0, 5, 0, 0]
    assert history.address.tolist() == [0x1000, 0x9000, 0, 0x1000]
    assert history.segment_addresses == (0x1000,)
    assert history.row_count.tolist() == [0, 1, 2, 3, 3, 3, 4]
    assert not history.requests.completions_given


def test_a_free_that_completes_later_waited_for_another_stream():
    history = read_history(
        [
            entry("alloc", 1, 30 * MiB),
            entry("free_requested", 1),
            entry("alloc", 2, 30 * MiB),
            entry("free_completed", 1),
            entry("alloc", 1, 30 * MiB),
        ]
    )
    assert [name for name, *_ in rows(history.requests)] == [
        "ALLOC",
        "RECORD_STREAM",
        "FREE",
        "ALLOC",
        "BLOCK_DONE",
        "ALLOC",
    ]
    reserved = simulate(history.requests).reserved_bytes
    assert [m // MiB for m in reserved.tolist()] == [30, 30, 30, 60, 60, 60]


def test_memory_given_back_is_read_as_one_emptied_cache():
    history = read_history(
        [
            entry("alloc", 1, 30 * MiB),
            entry("free_requested", 1),
            entry("free_completed", 1),
            entry("segment_free", 1, 30 * MiB),
            entry("segment_free", 7, 2 * MiB),
        ]
    )
    assert [name for name, *_ in rows(history.requests)] == ["ALLOC", "FREE", "EMPTY_CACHE"]


def test_private_pools_in_a_history_are_numbered():
    history = read_history(
        [
            entry("alloc", 1, 512, pool_id=(0, 0)),
            entry("alloc", 2, 512, pool_id=(0, 3)),
            entry("alloc", 3, 512, pool_id=(1, 0)),
            entry("alloc", 4, 512, pool_id=(0, 3)),
        ]
    )
    first, second, third, fourth = history.requests.pool.tolist()
    assert first == 0
    assert second == fourth
    assert len({first, second, third}) == 3


def test_frees_of_blocks_from_before_the_history_are_left_out():
    history = read_history([entry("free_requested", 1), entry("free_completed", 1)])
    assert len(history.requests) == 0


def test_what_the_device_refused_is_kept_beside_the_requests():
    history = read_history([{"action": "oom", "device_free": 5, "size": 99, "stream": 0}])  # type: ignore[typeddict-unknown-key]
    assert history.refused == (Refusal(0, 0, 99, 0),)
    assert history.requests_and_refused.size_bytes.tolist() == [99, 0]
    assert len(history.requests) == 0
    assert history.address.dtype == np.int64
