"""A verdict names what is over, by how much, and the largest cause."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_torchmem.analysis.judge.verdict import (
    judge_baseline,
    judge_blind_spots,
    judge_limits,
    judge_shrinking,
    judge_spread,
)
from pytest_torchmem.values.baseline import Allowance, BaselineEntry, Change
from pytest_torchmem.values.contributors import (
    Category,
    CategoryBytes,
    Contributor,
    Phase,
    Source,
)
from pytest_torchmem.values.findings import LIMIT_KEYS, FindingKind
from pytest_torchmem.values.results import Counters, Peak, Result, Retained
from pytest_torchmem.values.units import GiB, MiB

ALLOWANCE = Allowance(tolerance=0.02, floor_bytes=MiB)


def live(size, category="activation", operator="aten::mm", module="net.fc", line=7, file="net.py"):
    source = Source(file, line, "forward")
    return Contributor(Category(category), size, 1, operator, module, source, Phase.FORWARD)


def amounts(contributors):
    total = dict.fromkeys(Category, 0)
    for contributor in contributors:
        total[contributor.category] += contributor.size_bytes
    return CategoryBytes.of(total)


def measured(*at_peak, retained=(), **changes):
    at_peak = sorted(at_peak, key=lambda c: -c.size_bytes)
    composition, kept = amounts(at_peak), amounts(retained)
    fields = {
        "name": "",
        "device": "cpu",
        "estimated": False,
        "peak": Peak(composition.total, 0, composition, composition, tuple(at_peak)),
        "retained": Retained(kept.total, kept, tuple(retained)),
        **changes,
    }
    return Result(**fields)


def against(before, after, allowance=ALLOWANCE):
    return judge_baseline(after, BaselineEntry.of(before), allowance)


def test_the_first_line_has_both_numbers_and_the_largest_cause():
    before = measured(live(178 * MiB))
    cast = live(
        32 * MiB, operator="aten::_to_copy", module="model.layers.*.norm", line=41, file="norm.py"
    )
    after = measured(live(178 * MiB), cast, live(4 * MiB, operator="aten::mul"))
    assert against(before, after).sentence == (
        "activation peaked at 214.0 MiB, 36.0 MiB over the baseline of 178.0 MiB (tolerance 2 %): "
        "+32.0 MiB from aten::_to_copy in model.layers.*.norm (norm.py:41)"
    )


@pytest.mark.parametrize(("moved", "aside"), [(39, True), (4, True), (3.2, False), (3, False)])
def test_a_cause_that_is_larger_than_what_it_explains_says_so(moved, aside):
    before = measured(live(40 * MiB, operator="aten::repeat"), live(40 * MiB, line=8))
    other = live(int((43 - moved) * MiB), operator="aten::repeat")
    after = measured(other, live(40 * MiB, line=8), live(int(moved * MiB), operator="aten::clone"))
    sentence = against(before, after).sentence
    assert "3.0 MiB over the baseline of 80.0 MiB" in sentence
    assert "from aten::clone" in sentence
    assert sentence.endswith("or the peak is at another moment)") is aside


def test_a_limits_first_line_names_the_largest_contributor():
    result = measured(live(512 * MiB), live(717 * MiB, "temporary"))
    (finding,) = judge_limits(result, {"total": GiB})
    assert finding.sentence == (
        "memory peaked at 1.2 GiB, 205.0 MiB over the limit of 1.0 GiB: "
        "largest 717.0 MiB of temporary from aten::mm in net.fc (net.py:7)"
    )


def test_the_cause_of_a_total_was_alive_when_it_peaked():
    before = measured(live(10 * MiB))
    grown = live(13 * MiB)
    after = measured(grown)
    spike = live(5 * MiB, "temporary", operator="aten::ones")
    own_peaks = amounts([grown, spike])
    peak = replace(after.peak, by_category=own_peaks, live_by_category=(grown, spike))
    verdict = against(before, replace(after, peak=peak))
    (total,) = [finding for finding in verdict.findings if finding.key == "total"]
    assert "+3.0 MiB of activation from aten::mm" in total.sentence
    assert [growth.contributor for growth in total.growths] == [grown]


def test_a_category_says_more_than_the_total_it_is_part_of():
    before = measured(live(10 * MiB), live(10 * MiB, "gradient"))
    after = measured(live(13 * MiB), live(15 * MiB, "gradient"))
    verdict = against(before, after)
    assert [finding.key for finding in verdict.findings] == ["gradient", "activation", "total"]


def test_of_two_equal_excesses_the_one_with_the_larger_single_cause_leads():
    before = measured(live(10 * MiB), live(10 * MiB, "autograd_detail"))
    after = measured(
        live(4 * MiB, operator="aten::mm"),
        live(8 * MiB, operator="aten::_to_copy", module="norm"),
        live(12 * MiB, "autograd_detail"),
    )
    assert against(before, after).findings[0].key == "activation"


def test_scratch_that_grew_with_its_cause_does_not_hide_it():
    before = measured(live(2 * MiB, "optimizer_state"))
    cast = live(4 * MiB, "temporary", "aten::_to_copy")
    after = measured(live(4 * MiB, "optimizer_state"), cast)
    assert against(before, after).findings[0].key == "optimizer_state"


def test_scratch_made_further_up_in_the_same_function_is_no_consequence():
    before = measured(live(4 * MiB, operator="aten::log_softmax", line=17))
    cast = live(8 * MiB, "temporary", "aten::_to_copy", line=16)
    after = measured(live(8 * MiB, operator="aten::log_softmax", line=17), cast)
    assert against(before, after).sentence.startswith("temporary peaked at 8.0 MiB")
    assert "+8.0 MiB from aten::_to_copy in net.fc (net.py:16)" in against(before, after).sentence


def test_a_category_is_blamed_at_its_own_peak():
    before, scratch = live(2 * MiB, "gradient"), live(9 * MiB, "temporary", "aten::sum")
    result = measured(before)
    peak = replace(
        result.peak,
        by_category=CategoryBytes(gradient=2 * MiB, temporary=9 * MiB),
        live_by_category=(scratch, before),
    )
    verdict = against(result, replace(result, peak=peak))
    assert verdict.sentence.endswith("+9.0 MiB from aten::sum in net.fc (net.py:7)")


def test_scratch_that_grew_far_more_leads():
    before = measured(live(2 * MiB, "optimizer_state"))
    mask = live(64 * MiB, "temporary", "aten::ones")
    after = measured(live(4 * MiB, "optimizer_state"), mask)
    assert against(before, after).findings[0].key == "temporary"


def test_a_number_that_cannot_be_judged_comes_first():
    result = measured(live(5 * MiB))
    findings = judge_limits(result, {"total": 1, "reserved": 1})
    assert [finding.key for finding in findings] == ["reserved", "total"]


def test_an_estimated_number_says_so():
    (finding,) = judge_limits(measured(live(2 * MiB), estimated=True), {"total": MiB})
    assert finding.sentence.startswith("memory peaked at an estimated 2.0 MiB")


def test_a_region_is_named():
    verdict = against(measured(live(1)), measured(live(5 * MiB), name="forward"))
    assert verdict.sentence.startswith("in 'forward', activation peaked at 5.0 MiB")


def test_what_is_retained_is_compared_too():
    kept = live(4 * MiB, operator="aten::exp", module="loss", line=9)
    verdict = against(measured(kept), measured(kept, retained=[kept]))
    assert verdict.sentence == (
        "retained 4.0 MiB, 4.0 MiB over the baseline of 0 B (floor 1.0 MiB): "
        "+4.0 MiB of activation from aten::exp in loss (net.py:9)"
    )


@pytest.mark.parametrize(
    ("size", "change"),
    [
        (97 * MiB, Change.SHRUNK),
        (98 * MiB, Change.WITHIN),
        (102 * MiB, Change.WITHIN),
        (102 * MiB + 1, Change.GROWN),
    ],
)
def test_a_change_is_what_exceeds_the_larger_of_tolerance_and_floor(size, change):
    assert against(measured(live(100 * MiB)), measured(live(size))).change is change


def test_one_grown_category_outweighs_a_shrunk_one():
    before = measured(live(10 * MiB), live(10 * MiB, "gradient"))
    after = measured(live(2 * MiB), live(15 * MiB, "gradient"))
    verdict = against(before, after)
    assert verdict.change is Change.GROWN
    assert [finding.key for finding in verdict.findings] == ["gradient"]


def test_shrinking_is_no_finding():
    assert not against(measured(live(10 * MiB)), measured(live(2 * MiB))).failed


def test_a_reading_of_zero_does_not_pass_as_shrunk():
    verdict = against(measured(live(10 * MiB)), measured())
    assert verdict.sentence.endswith("[no-reading]")
    assert verdict.change is Change.NOT_COMPARED


def test_each_reason_for_no_judgement_has_a_kind_and_ends_with_its_slug():
    forward_only = measured(live(1, "temporary"), has_backward=False)
    no_counts = measured(live(1), device="cuda:0", counters=Counters(1, 0, 0, 0))
    stored = BaselineEntry.of(measured(live(9)))
    shrunk = judge_baseline(measured(live(1)), stored, Allowance(0, 0))
    findings = [
        judge_limits(forward_only, {"activation": 1})[0],
        judge_limits(measured(live(1)), {"reserved": 1})[0],
        judge_limits(no_counts, {"reserved": 1})[0],
        judge_limits(measured(live(1), steps=(5,)), {"growth": 1})[0],
        judge_limits(measured(), {"total": 1})[0],
        judge_shrinking(shrunk)[0],
        judge_spread([measured(live(1)), measured(live(9))], Allowance(0, 0))[0],
        judge_blind_spots(replace(measured(live(1)), blind_spots=("another thread",)))[0],
    ]
    assert {finding.kind for finding in findings} == {*FindingKind} - {
        FindingKind.OVER_LIMIT,
        FindingKind.GROWN,
        FindingKind.NO_BASELINE,
    }
    assert all(f.shown == f"{f.sentence} [{f.kind.value}]" for f in findings)


def test_two_numbers_need_no_slug():
    (over,) = judge_limits(measured(live(9)), {"total": 1})
    (grown, _) = against(measured(live(1)), measured(live(9 * MiB))).findings
    assert (over.kind, grown.kind) == (FindingKind.OVER_LIMIT, FindingKind.GROWN)
    assert (over.shown, grown.shown) == (over.sentence, grown.sentence)


def test_no_limit_asks_for_no_reading():
    assert judge_limits(measured(), {}) == ()


@pytest.mark.parametrize("key", LIMIT_KEYS)
def test_every_key_is_judged(key):
    everything = [live(10, category.value) for category in Category]
    result = measured(
        *everything, retained=everything, steps=(0, 10), counters=Counters(9, 10, 10, 10)
    )
    measured_bytes = 100 if key in ("total", "retained") else 10
    assert judge_limits(result, {key: measured_bytes}) == ()
    (finding,) = judge_limits(result, {key: measured_bytes - 1})
    assert finding.excess_bytes == 1


def test_a_leak_of_fewer_bytes_than_steps_is_growth():
    leaks = measured(live(MiB), steps=(0, 0, 0, 1))
    assert leaks.growth == 1
    (finding,) = judge_limits(leaks, {"growth": 0})
    assert (finding.key, finding.excess_bytes) == ("growth", 1)
    assert judge_limits(measured(live(MiB), steps=(5, 5, 5, 5)), {"growth": 0}) == ()


@pytest.mark.parametrize(("above_bytes", "leads"), [(2 * MiB, True), (2 * MiB - 1, False)])
def test_the_cause_further_up_leads_from_half_the_size_of_the_largest(above_bytes, leads):
    above = live(above_bytes, "activation", line=3)
    below = live(4 * MiB, "gradient", line=8)
    weights = live(8 * MiB, "parameter")
    first = against(measured(weights), measured(weights, above, below)).findings[0]
    assert first.key == ("activation" if leads else "gradient")
