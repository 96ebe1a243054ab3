"""Requested bytes, joined from the allocator's history."""

from __future__ import annotations

from pytest_torchmem.record.allocator import requested_bytes

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
