"""The results of all ranks together: the largest, the spread, and what has grown."""

from __future__ import annotations

import pytest

from pytest_torchmem.measuring.ranks import Ranks
from pytest_torchmem.values.contributors import (
    Category,
    CategoryBytes,
    Contributor,
    Phase,
    Source,
)
from pytest_torchmem.values.errors import LimitError, MarkerError, RankError
from pytest_torchmem.values.measured import Rank
from pytest_torchmem.values.results import Peak, Result, Retained
from pytest_torchmem.values.units import MiB

pytestmark = pytest.mark.slow


def held(mib: int, module: str, line: int) -> Contributor:
    source = Source("src/stage.py", line, "forward")
    where = ("aten::mm", module, source, Phase.FORWARD)
    return Contributor(Category.ACTIVATION, mib * MiB, 1, *where)


def result_of(*live: Contributor, name: str = "step") -> Result:
    ranked = tuple(sorted(live, key=lambda one: -one.size_bytes))
    amounts = CategoryBytes(activation=sum(one.size_bytes for one in live))
    peak = Peak(amounts.total, 0, amounts, amounts, ranked, ranked)
    return Result(name, "cpu", False, peak, Retained(0, CategoryBytes()))


STAGES = Ranks(
    [
        result_of(held(10, "embed", 5)),
        result_of(held(12, "block", 6)),
        result_of(held(12, "block", 6), held(30, "head", 9)),
    ]
)


def sentence(ranks: Ranks, *arguments, **keywords) -> str:
    with pytest.raises(LimitError) as caught:
        ranks.check(*arguments, **keywords)
    return caught.value.sentences[0]


def test_the_largest_the_smallest_and_the_spread():
    assert (STAGES.largest.rank, STAGES.largest.result.peak.total) == (2, 42 * MiB)
    assert (STAGES.smallest.rank, STAGES.spread_bytes) == (0, 32 * MiB)
    assert (len(STAGES), [one.rank for one in STAGES]) == (3, [0, 1, 2])
    assert STAGES.of(1).peak.total == 12 * MiB


def test_a_list_that_changes_later_changes_no_ranks():
    results = [result_of(held(1, "a", 1)), result_of(held(2, "a", 1))]
    ranks = Ranks(results)
    results.clear()
    assert len(ranks) == 2


def test_of_equal_ranks_the_first_is_the_largest():
    equal = Ranks([result_of(held(1, "a", 1))] * 2)
    assert (equal.largest.rank, equal.smallest.rank, equal.spread_bytes) == (0, 0, 0)


def test_a_rank_over_the_limit_is_named_with_its_cause():
    assert sentence(STAGES, "40MiB") == (
        "on rank 2 of 3, in 'step', memory peaked at 42.0 MiB, +2.0 MiB (+5 %) over the limit of "
        "40.0 MiB: "
        "largest 30.0 MiB of activation from aten::mm at stage.py:9 in head"
    )


def test_the_rank_that_is_furthest_over_comes_first_and_the_others_follow():
    with pytest.raises(LimitError) as caught:
        STAGES.check(activation=11 * MiB)
    starts = [text[:14] for text in caught.value.sentences]
    assert starts == ["on rank 2 of 3", "on rank 1 of 3"]
    assert str(caught.value).endswith("[over-limit]")


def test_ranks_within_their_limits_pass():
    STAGES.check("42MiB", activation=lambda: 42 * MiB, gradient=None, spread="32MiB")


def test_a_rank_without_a_reading_never_passes():
    broken = Ranks([*STAGES.results, result_of()])
    assert "the reading is 0 B" in sentence(broken, "1MiB")


def test_ranks_too_far_apart_are_named_with_what_one_has_and_the_other_has_not():
    apart = Ranks(STAGES.results[1:])
    assert sentence(apart, spread="20MiB") == (
        "rank 1 of 2 peaked at 42.0 MiB and rank 0 at 12.0 MiB, 10.0 MiB over the spread of "
        "20.0 MiB: +30.0 MiB of activation from aten::mm at stage.py:9 in head"
    )


def test_a_rank_that_grew_alone_is_found():
    grown = Ranks([*STAGES.results[:2], result_of(held(12, "block", 6), held(33, "head", 9))])
    grown.check("45MiB", before=Ranks(grown.results))
    assert sentence(grown, before=STAGES).startswith(
        "on rank 2 of 3, in 'step', memory peaked at 45.0 MiB, +3.0 MiB (+7 %) over the baseline "
        "of "
        "42.0 MiB: +3.0 MiB of activation from aten::mm at stage.py:9 in head"
    )
    grown.check(before=STAGES, floor="3MiB")
    grown.check(before=STAGES, tolerance="10%")


def test_a_rank_that_shrank_passes():
    Ranks([result_of(held(1, "a", 1))]).check(before=Ranks(STAGES.results[:1]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "needs a limit, a spread or results"),
        ({"spread": "64"}, "check, spread: cannot read"),
        ({"totl": 3}, "did you mean 'total'"),
        ({"before": STAGES, "tolerance": "x"}, "check: cannot read 'x' as a tolerance"),
    ],
)
def test_an_argument_that_cannot_be_used_is_named(arguments, message):
    with pytest.raises(MarkerError, match=message):
        STAGES.check(**arguments)


def test_ranks_that_are_not_there_are_told():
    with pytest.raises(RankError, match="there is no rank 3; there are 3"):
        STAGES.of(3)
    with pytest.raises(RankError, match="no rank -1"):
        STAGES.of(-1)
    with pytest.raises(RankError, match="no result of any rank"):
        Ranks()
    with pytest.raises(RankError, match="3 ranks cannot be compared with 1"):
        Ranks(STAGES.results[:1]).check(before=STAGES)


def test_a_process_alone_has_no_environment_of_its_own():
    assert Rank().environment == {}
    assert Rank(1, 2).environment == {"rank": "1 of 2"}
