"""A program has one answer: measured again, each category and each origin has the same bytes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.analysis.storages.small_programs import PROGRAMS
from tests.measured import measured

pytestmark = [pytest.mark.slow, pytest.mark.compiles]

TIMES = 3
OFTEN = 10
"""How often a program is measured in which other tensors become a model's."""


def test_there_are_sixty_programs() -> None:
    assert len(PROGRAMS) >= 60


def is_odd(name: str) -> bool:
    return any(word in name for word in ("exchanged", "anew", "moves", "loaded"))


def programs() -> Iterator[Any]:
    """By day the odd ones and a third of the others."""
    for number, name in enumerate(PROGRAMS):
        by_day = is_odd(name) or number % 3 == 0
        yield name if by_day else pytest.param(name, marks=pytest.mark.nightly)


@pytest.mark.nightly(
    "weights_set_anew", "weights_exchanged_with_an_average", "weights_loaded_from_a_state"
)
@pytest.mark.parametrize("name", programs())
def test_labels_do_not_depend_on_when_the_recorder_looked(name: str) -> None:
    torch.manual_seed(0)
    body = PROGRAMS[name]()
    body()  # a first run imports, and makes what stays
    answers = set()
    for number in range(OFTEN if is_odd(name) else TIMES):
        # What a collection frees, and when, is another one each time.
        if number % 3 == 0:
            gc.collect()
        litter = [[i] for i in range(number * 97)]
        result = measured(body)
        live = {(c.category, c.size_bytes, c.count, c.module, c.source) for c in result.peak.live}
        answers.add(
            (result.peak.by_category, result.peak.at_peak, result.retained.total, frozenset(live))
        )
        del litter
    assert len(answers) == 1
