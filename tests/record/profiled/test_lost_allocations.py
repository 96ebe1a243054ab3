"""What the event tree lacks comes from the allocator's history."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pytest_torchmem.record.devices import HistoryEntry
from pytest_torchmem.record.tables import Tables
from pytest_torchmem.record.profiled.lost_allocations import with_lost
from pytest_torchmem.values.trace import ALLOCATION, EVENT, MODULE_CALL, OVERLOAD, TENSOR, EventKind

GPU = 1
MS = 1_000_000
# Time, address, bytes of the block: two tensors, the second of which is made and freed twice.
STORY = [
    (1 * MS, 0x100, 512),
    (2 * MS, 0x300, 1024),
    (3 * MS, 0x300, -1024),
    (4 * MS, 0x300, 1024),
    (5 * MS, 0x300, -1024),
    (6 * MS, 0x100, -512),
]
BEFORE = 4096
TOTALS = [512, 1536, 512, 1536, 512, 0]
TEXTS = ("/work.py", "", "/pool.py", "work", "run")
NUMBER = TEXTS.index


def entries(requested: int = 12) -> list[HistoryEntry]:
    """The history; each block is ``requested`` bytes larger than its request."""
    return [
        HistoryEntry(size > 0, ptr, max(1, abs(size) - requested), time)
        for time, ptr, size in STORY
    ]


def tables(*numbers: int, delay_ns: int = 700) -> Tables:
    """Those parts of the story that stand in the tree, a little later than in the history."""
    events, allocations = np.zeros(len(numbers), EVENT), np.zeros(len(numbers), ALLOCATION)
    for row, number in enumerate(numbers):
        time, pointer, size = STORY[number]
        events[row]["kind"], events[row]["start_ns"] = EventKind.ALLOCATION, time + delay_ns
        allocations[row]["event"], allocations[row]["device"] = row, GPU
        allocations[row]["ptr"], allocations[row]["size_bytes"] = pointer, size
        allocations[row]["total_allocated"] = BEFORE + TOTALS[number]
    return Tables(
        events, np.zeros(0, TENSOR), allocations, np.zeros(0, MODULE_CALL), np.zeros(0, OVERLOAD)
    )


def told(found: Tables) -> list[tuple[int, int]]:
    """(address, bytes of the block) in the order of time."""
    order = np.argsort(found.events["start_ns"][found.allocations["event"]], kind="stable")
    columns = (found.allocations[name][order].tolist() for name in ("ptr", "size_bytes"))
    return list(zip(*columns, strict=True))


@pytest.mark.parametrize("delay_ns", [-1000, 700, 400_000])
@pytest.mark.parametrize(
    "seen", [(0, 5), (0, 1), (1, 2, 5), (3, 4), (0, 1, 4), (0, 3), (0, 2, 3, 5), (5,), ()]
)
def test_every_allocation_is_there_once_in_its_place(seen: tuple[int, ...], delay_ns: int) -> None:
    found = with_lost(tables(*seen, delay_ns=delay_ns), GPU, entries(), number=NUMBER)
    assert told(found) == [(pointer, size) for _, pointer, size in STORY]
    assert (found.allocations["device"] == GPU).all()
    new = found.events[len(seen) :]
    assert (new["parent"] == -1).all()
    assert (new["name"] == NUMBER("")).all()
    assert new["end"].tolist() == list(range(len(seen) + 1, len(STORY) + 1))


def test_totals_go_on_from_what_was_seen() -> None:
    found = with_lost(tables(0, 5), GPU, entries(), number=NUMBER)
    order = np.argsort(found.events["start_ns"][found.allocations["event"]])
    assert (found.allocations["total_allocated"][order] - BEFORE).tolist() == TOTALS


def test_totals_of_a_session_without_events_begin_with_what_was_there() -> None:
    """A thread that is not recorded made all. With a total of 0 it would be shared memory."""
    found = with_lost(tables(), GPU, entries(), allocated=BEFORE, number=NUMBER)
    assert (found.allocations["total_allocated"] - BEFORE).tolist() == TOTALS


def test_the_rest_of_a_block_that_was_not_split_is_its_own() -> None:
    # 900 bytes less were requested than the block has, which rounding up does not explain.
    found = with_lost(tables(0, 2, 3, 4, 5), GPU, entries(requested=900), number=NUMBER)
    assert told(found)[1] == (0x300, 1024)
    assert found.allocations["total_allocated"][-1] == BEFORE + TOTALS[1]


def test_a_block_is_as_large_as_its_own_request_and_not_as_one_before_it_at_its_address() -> None:
    later = [
        HistoryEntry(True, 0x300, 3000, 7 * MS),
        HistoryEntry(False, 0x300, 3000, 8 * MS),
        HistoryEntry(True, 0x300, 500, 9 * MS),
        HistoryEntry(False, 0x300, 500, 10 * MS),
    ]
    found = with_lost(tables(0, 1, 2, 3, 4, 5), GPU, [*entries(), *later], number=NUMBER)
    sizes = [size for _, size in told(found)]
    assert sizes[len(STORY) :] == [3072, -3072, 512, -512]


def test_nothing_changes_where_nothing_is_missing() -> None:
    whole = tables(*range(len(STORY)))
    assert with_lost(whole, GPU, entries(), number=NUMBER) is whole


def test_a_history_with_less_than_the_tree_changes_nothing() -> None:
    seen = tables(0, 1, 2)
    assert with_lost(seen, GPU, entries()[:1], number=NUMBER) is seen


def test_other_devices_are_left_alone() -> None:
    found = with_lost(tables(0, 5), 0, entries(), number=NUMBER)
    assert (found.allocations["device"] == 0).sum() == len(STORY)
    assert (found.allocations["device"] == GPU).sum() == 2


def test_what_the_history_has_after_an_event_comes_after_it_whatever_their_clocks_say() -> None:
    found = with_lost(tables(0, 5, delay_ns=3 * MS), GPU, entries(), number=NUMBER)
    assert told(found) == [(pointer, size) for _, pointer, size in STORY]
    times = found.events["start_ns"][found.allocations["event"]]
    assert len(set(times.tolist())) == len(STORY)


def test_the_calls_around_an_allocation_are_rows_above_it() -> None:
    calls = (("/work.py", 3, "work"), ("/pool.py", 20, "run"))
    story = [
        replace(entry, calls=calls if number == 1 else ()) for number, entry in enumerate(entries())
    ]
    found = with_lost(tables(0, 2, 3, 5), GPU, story, number=NUMBER)
    run, work, made, freed = found.events[4:]
    assert [TEXTS[row["name"]] for row in (run, work, made)] == ["run", "work", ""]
    assert [TEXTS[row["file"]] for row in (run, work)] == ["/pool.py", "/work.py"]
    # A row's line is the one of its caller that ran.
    assert [row["line"] for row in (work, made)] == [20, 3]
    assert [row["parent"] for row in (run, work, made, freed)] == [-1, 4, 5, -1]
    assert [row["end"] for row in (run, work, made, freed)] == [7, 7, 7, 8]
    assert found.allocations["event"][4:].tolist() == [6, 7]
    assert told(found) == [(pointer, size) for _, pointer, size in STORY]
