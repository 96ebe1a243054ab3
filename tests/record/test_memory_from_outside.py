"""Memory that was not seen to be made counts from where an operator meets it."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from pytest_torchmem.values.contributors import Category
from tests.measured import measured

pytestmark = pytest.mark.slow

MiB = 2**20


def from_numpy() -> torch.Tensor:
    return torch.from_numpy(np.ones(MiB, np.float32))


def test_an_array_of_numpys_is_an_input() -> None:
    result = measured(lambda: from_numpy().sum())
    assert result.peak.input == 4 * MiB
    assert not result.blind_spots


def test_arrays_one_after_the_other_count_as_one() -> None:
    def body() -> None:
        for _ in range(5):
            from_numpy().sum()

    result = measured(body)
    assert result.peak.input == 4 * MiB
    assert result.retained.total == 0


def test_arrays_that_are_kept_add_up_and_are_retained() -> None:
    kept: list[torch.Tensor] = []

    def body() -> None:
        for _ in range(3):
            kept.append(from_numpy())
            kept[-1].sum()

    result = measured(body)
    assert result.peak.input == result.retained.total == 3 * 4 * MiB


def test_an_array_that_was_there_before_counts_as_what_was_there() -> None:
    there = from_numpy()
    result = measured(there.sum)
    assert result.peak.input == 4 * MiB
    assert result.retained.total == 0


def test_a_file_that_is_mapped_counts_by_what_is_read_of_it(tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    torch.save({"w": torch.ones(MiB)}, file)
    kept: list[torch.Tensor] = []

    def body() -> None:
        kept.append(torch.load(file, mmap=True)["w"])
        kept[0][:3].sum()

    assert measured(body).peak.input == 4 * MiB


def test_shared_memory_counts_once() -> None:
    kept: list[torch.Tensor] = []

    def body() -> None:
        kept.append(torch.ones(MiB).share_memory_())
        kept[0].sum()

    result = measured(body)
    assert result.retained.total == 4 * MiB


def test_a_deep_copy_is_made_by_the_line_that_copies() -> None:
    weights, kept = {"w": torch.ones(MiB)}, list[object]()

    def body() -> None:
        kept.append(copy.deepcopy(weights))

    result = measured(body)
    assert result.retained.total == result.retained.temporary == 4 * MiB
    assert result.peak.input == 4 * MiB  # the one that is copied
    (cause,) = [c for c in result.peak.live if c.category is Category.TEMPORARY]
    assert cause.source is not None
    assert cause.source.line == body.__code__.co_firstlineno + 1


@pytest.mark.parametrize("was_there", [False, True])
def test_memory_that_moves_to_be_shared_counts_where_it_is(was_there: bool) -> None:
    kept = [from_numpy()] if was_there else []

    def body() -> None:
        if not kept:
            kept.append(from_numpy())
        kept[0].sum()
        kept[0].share_memory_()
        kept[0].sum()

    # What numpy had is freed, and what is shared was made in the body.
    result = measured(body)
    assert result.retained.total == 4 * MiB
    assert result.peak.total == 2 * 4 * MiB
