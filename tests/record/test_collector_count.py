"""A recording's own objects do not decide when Python's collector runs."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from pytest_torchmem.record import collector_count
from pytest_torchmem.record.collector_count import KeptCount
from pytest_torchmem.record.patches import Installed
from pytest_torchmem.record.recorder import Recorder

THRESHOLD = gc.get_threshold


@pytest.fixture
def count() -> Iterator[KeptCount]:
    kept = KeptCount()
    with Installed() as patches:
        kept.install(patches)
        gc.collect()
        yield kept
        kept.remove()


def made_until_collected(most: int = 20_000) -> int:
    """Make objects until the collector has run, and return their number."""
    runs = gc.get_stats()[0]["collections"]
    made: list[object] = []
    while gc.get_stats()[0]["collections"] == runs and len(made) < most:
        made.extend(set() for _ in range(20))
    return len(made)


@pytest.mark.parametrize("left", [0, 300, 10_000])
def test_the_collector_runs_after_as_many_objects_of_the_program_as_without_the_block(count, left):
    gc.collect()
    alone = made_until_collected()
    for _ in range(3):
        gc.collect()
        before = [set() for _ in range(100)]
        with count.kept():
            ours = [set() for _ in range(left)]
        # A list and a tuple here and there are counted, too.
        assert abs(len(before) + made_until_collected() - alone) <= 60
        # The threshold is the usual one for the next run.
        assert abs(made_until_collected() - alone) <= 60
        del before, ours


def test_a_block_that_frees_objects_lets_the_collector_run_no_later(count):
    gc.collect()
    alone = made_until_collected()
    gc.collect()
    before = [set() for _ in range(500)]
    with count.kept():
        before.clear()
    assert abs(500 + made_until_collected() - alone) <= 60


def test_the_threshold_is_the_programs_own_afterwards(count):
    own = gc.get_threshold()
    with count.kept():
        ours = [set() for _ in range(1000)]
    # Who asks is told the program's own.
    assert gc.get_threshold() == own != THRESHOLD()
    count.remove()
    assert THRESHOLD() == own
    assert len(ours) == 1000


@pytest.mark.parametrize("begins_with_a_collection", [False, True])
def test_a_block_that_comes_while_another_one_ends_leaves_the_threshold_the_programs(
    count, monkeypatch, begins_with_a_collection
):
    own, set_threshold = THRESHOLD(), gc.set_threshold
    blocks = []

    def interrupted(*threshold):  # as by a pending call, after a call of a function of C
        set_threshold(*threshold)
        if not blocks:
            blocks.append([])
            with count.kept():
                blocks[0].extend(set() for _ in range(50))

    if begins_with_a_collection:
        with count.kept():
            left = [set() for _ in range(50)]
    monkeypatch.setattr(collector_count, "set_threshold", interrupted)
    if begins_with_a_collection:
        gc.collect()
    else:
        with count.kept():
            left = [set() for _ in range(50)]
    assert THRESHOLD() != own
    assert len(left) == len(blocks[0])
    count.remove()
    assert THRESHOLD() == own


def test_the_threshold_is_the_programs_own_after_two_blocks_without_a_collection_between(count):
    own = gc.get_threshold()
    ours: list[object] = []
    for _ in range(2):
        with count.kept():
            ours.extend(set() for _ in range(1000))
    count.remove()
    assert THRESHOLD() == own


def test_a_collector_that_the_program_switched_off_stays_off(count):
    gc.disable()
    try:
        with count.kept():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("first", [0, 5000])
def test_a_threshold_that_the_program_sets_stays(count, first):
    own = gc.get_threshold()
    try:
        with count.kept():
            ours = [set() for _ in range(1000)]
        gc.set_threshold(first, *own[1:])
        gc.collect()
        count.remove()
        assert gc.get_threshold() == (first, *own[1:])
        assert len(ours) == 1000
    finally:
        gc.set_threshold(*own)


def test_a_recording_leaves_no_callback_and_no_threshold():
    before = list(gc.callbacks), gc.get_threshold()
    recorder = Recorder(torch.device("cpu"))
    recorder.start()
    torch.ones(3)
    recorder.stop()
    assert (gc.callbacks, gc.get_threshold()) == before


IMPORTS_THE_COMPILER = """
import gc
import subprocess
import sys
import torch
from pytest_torchmem.record.recorder import Recorder

recorder = Recorder(torch.device("cpu"))
recorder.start()
before = gc.get_stats()[2]["collections"]
import torch._dynamo
print(gc.get_stats()[2]["collections"] - before, gc.isenabled())
recorder.stop()
"""


def test_the_import_of_the_compiler_ends_with_the_only_look_at_everything():
    command = [sys.executable, "-c", IMPORTS_THE_COMPILER]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["1", "True"]


def test_a_signal_while_the_threshold_moves_back_leaves_it_to_be_moved_later(count, monkeypatch):
    own = THRESHOLD()
    with count.kept():
        ours = [set() for _ in range(1000)]

    def interrupted(*_):  # as by a signal's handler, before the call
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(collector_count, "set_threshold", interrupted)
    with pytest.raises(KeyboardInterrupt):
        count._on_collection("start", {})
    assert gc.get_threshold() == own != THRESHOLD()
    count.remove()
    assert THRESHOLD() == own
    assert len(ours) == 1000
