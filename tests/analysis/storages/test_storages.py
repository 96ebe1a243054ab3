"""Lifetimes found from pointers and time, on traces written by hand."""

from __future__ import annotations

from dataclasses import replace

from pytest_torchmem.analysis.events.op_tree import build_op_tree
from pytest_torchmem.analysis.pipeline import analyze_trace
from pytest_torchmem.analysis.storages.storages import BEFORE, NEVER, Storages, find_storages
from pytest_torchmem.values.contributors import Category
from pytest_torchmem.values.trace import MarkKind, Ownership
from tests.builders import Block, TraceBuilder


def storages_of(builder: TraceBuilder) -> Storages:
    return find_storages(build_op_tree(builder.build()))


def rows_at(storages: Storages, block: Block) -> list[int]:
    return [row for row, ptr in enumerate(storages.ptr.tolist()) if ptr == block.ptr]


def test_a_storage_lives_from_its_allocation_to_its_free():
    b = TraceBuilder()
    first = b.alloc(10)
    second = b.alloc(20)
    b.free(first)
    storages = storages_of(b)
    (one,), (two,) = rows_at(storages, first), rows_at(storages, second)
    assert storages.size_bytes[[one, two]].tolist() == [10, 20]
    assert storages.born[[one, two]].tolist() == [0, 1]
    assert storages.died[[one, two]].tolist() == [2, NEVER]


def test_a_reused_pointer_is_another_storage():
    b = TraceBuilder()
    first = b.alloc(10)
    b.free(first)
    second = b.alloc(30, at=first)
    storages = storages_of(b)
    rows = rows_at(storages, second)
    assert storages.size_bytes[rows].tolist() == [10, 30]


def test_mentions_go_to_the_storage_that_lives_at_the_pointer_then():
    b = TraceBuilder()
    first = b.alloc(10)
    b.read(first)
    b.free(first)
    second = b.alloc(30, at=first)
    b.read(second)
    storages = storages_of(b)
    assert storages.size_bytes[storages.of_tensor].tolist() == [10, 30]


def test_one_pointer_on_two_devices_is_two_storages():
    b = TraceBuilder(devices=("cpu", "cuda:0"))
    host = b.alloc(10)
    device = b.alloc(20, at=host, device=1)
    b.free(host)
    storages = storages_of(b)
    sizes = dict(zip(storages.device.tolist(), storages.size_bytes.tolist(), strict=True))
    assert sizes == {0: 10, 1: 20}
    assert storages.died[storages.device == 1].tolist() == [NEVER]
    assert device.ptr == host.ptr


def test_what_was_there_before_has_the_bytes_its_owner_says():
    b = TraceBuilder()
    weight = b.existing(100, Ownership.PARAMETER)
    b.read(weight)
    storages = storages_of(b)
    (row,) = rows_at(storages, weight)
    assert storages.born[row] == BEFORE
    assert storages.size_bytes[row] == 100
    assert storages.event[row] == -1


def test_what_is_owned_and_never_mentioned_is_known_too():
    b = TraceBuilder()
    weight = b.existing(100, Ownership.PARAMETER)
    rubbish = b.existing(999)
    storages = storages_of(b)
    assert storages.size_bytes[rows_at(storages, weight)].tolist() == [100]
    assert rows_at(storages, rubbish) == []


def test_a_free_without_an_allocation_ends_what_was_there_before():
    b = TraceBuilder()
    b.read()
    old = b.existing(64)
    b.free(old)
    storages = storages_of(b)
    (row,) = rows_at(storages, old)
    assert (storages.born[row], storages.size_bytes[row]) == (BEFORE, 64)
    assert storages.died[row] == 1


def test_a_free_that_two_sources_report_ends_one_storage():
    b = TraceBuilder()
    weight = b.existing(100, Ownership.PARAMETER)
    b.read(weight)
    b.free(weight)
    mark = b.mark(MarkKind.STORAGE_FREED)
    b.owner(weight, Ownership.LIVE, mark=mark)
    storages = storages_of(b)
    assert len(rows_at(storages, weight)) == 1
    assert storages.died[rows_at(storages, weight)].tolist() == [1]


def test_a_free_that_only_the_storage_itself_reported_counts():
    b = TraceBuilder()
    weight = b.existing(100, Ownership.PARAMETER)
    b.read(weight)
    mark = b.mark(MarkKind.STORAGE_FREED)
    b.owner(weight, Ownership.LIVE, mark=mark)
    storages = storages_of(b)
    assert storages.died[rows_at(storages, weight)].tolist() == [1]


def test_a_birth_in_a_place_still_taken_ends_what_was_there():
    b = TraceBuilder()
    weight = b.existing(100, Ownership.PARAMETER)
    b.read(weight)
    b.alloc(40, at=weight)
    storages = storages_of(b)
    rows = rows_at(storages, weight)
    assert storages.died[rows].tolist() == [1, NEVER]
    assert storages.size_bytes[rows].tolist() == [100, 40]


def test_the_death_of_who_had_left_its_place_unseen_ends_nobody_else():
    b = TraceBuilder()
    weight = b.existing(100, Ownership.PARAMETER)
    b.read(weight)
    b.alloc(40, at=weight)
    mark = b.mark(MarkKind.STORAGE_FREED)
    b.owner(weight, Ownership.LIVE, mark=mark)
    storages = storages_of(b)
    assert storages.died[rows_at(storages, weight)].tolist() == [1, NEVER]


def test_a_storage_that_an_operator_gives_another_place_has_left_its_own():
    b = TraceBuilder()
    x = b.existing(100)
    with b.op("aten::resize_", reads=[x]):
        b.alloc(400)
    with b.op("aten::resize_", reads=[y := b.existing(100)]):
        pass
    with b.op("aten::resize_", reads=[empty := replace(x, ptr=0)]):
        b.alloc(400)
    storages = storages_of(b)
    assert storages.died[rows_at(storages, x)].tolist() == [1.5]
    assert storages.died[rows_at(storages, y)].tolist() == [NEVER]
    assert storages.died[rows_at(storages, empty)].tolist() == [NEVER]


def test_an_owner_is_about_the_storage_that_was_born_last():
    b = TraceBuilder()
    first = b.alloc(10)
    b.free(first)
    second = b.alloc(30, at=first)
    b.mark(MarkKind.BACKWARD_END)
    b.owner(second, Ownership.GRADIENT)
    storages = storages_of(b)
    (row,) = storages.of_owner.tolist()
    assert storages.size_bytes[row] == 30


def test_the_only_storage_of_a_trace_has_the_name_under_which_its_module_holds_it():
    builder = TraceBuilder()
    weight = builder.existing(64)
    builder.owner(weight, Ownership.PARAMETER, module=1, name="weight")
    with builder.module(1):
        builder.read(weight)
    peak = analyze_trace(builder.build()).result().peak
    assert [c.module for c in peak.live if c.category is Category.PARAMETER] == ["Net.weight"]
