"""A verdict names what is over, by how much, and the largest cause."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_torchmem.analysis.judge.verdict import (
    CodeChanges,
    judge_baseline,
    judge_blind_spots,
    judge_limits,
    judge_shrinking,
    judge_spread,
    with_changes,
)
from pytest_torchmem.report.text.tables import line_place, line_word
from pytest_torchmem.values.baseline import (
    Allowance,
    BaselineEntry,
    Change,
    Numbers,
    Reference,
    told_change,
)
from pytest_torchmem.values.contributors import (
    Category,
    CategoryBytes,
    Contributor,
    Phase,
    Source,
)
from pytest_torchmem.values.findings import COUNTERS, LIMIT_KEYS, CodeLines, FindingKind
from pytest_torchmem.values.results import Counters, Peak, Result, Retained
from pytest_torchmem.values.units import GiB, KiB, MiB

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
    at_peak = sorted(at_peak, key=lambda c: -c.size_bytes)  # type: ignore[assignment]
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


def against(before, after, allowance=ALLOWANCE, changed=()):
    """Judge against a baseline, since which these lines of ``net.py`` have changed."""
    places = {line: CodeLines("net.py", line, line) for line in changed}
    code = CodeChanges(lambda source: places.get(source.line), lambda: tuple(places.values()))
    return told(before, after, code, allowance)


def told(before, after, code, allowance=ALLOWANCE):
    """Judge against a baseline and say what has changed since."""
    reference = Reference.of(BaselineEntry.of(before))
    verdict = judge_baseline(after, reference, allowance, code)
    return replace(verdict, findings=with_changes(verdict.findings, code, reference))


def test_the_first_line_has_both_numbers_and_the_cause():
    before = measured(live(178 * MiB))
    cast = live(
        32 * MiB, operator="aten::_to_copy", module="model.layers.*.norm", line=41, file="norm.py"
    )
    after = measured(live(178 * MiB), cast, live(4 * MiB, operator="aten::mul"))
    assert against(before, after).sentence == (
        "memory peaked at 214.0 MiB, +36.0 MiB (+20 %) over the baseline of 178.0 MiB: "
        "+32.0 MiB of activation from aten::_to_copy at norm.py:41 in model.layers.*.norm, "
        "4.0 MiB more elsewhere"
    )


def test_what_shrank_meanwhile_is_a_number_too():
    before = measured(live(40 * MiB, operator="aten::repeat"), live(40 * MiB, line=8))
    other = live(31 * MiB, operator="aten::repeat")
    after = measured(other, live(40 * MiB, line=8), live(12 * MiB, operator="aten::clone", line=9))
    assert against(before, after).sentence == (
        "memory peaked at 83.0 MiB, +3.0 MiB (+4 %) over the baseline of 80.0 MiB: "
        "+12.0 MiB of activation from aten::clone at net.py:9 in net.fc, 9.0 MiB less elsewhere"
    )


def test_a_limits_first_line_names_the_largest_contributor():
    result = measured(live(512 * MiB), live(717 * MiB, "temporary"))
    (finding,) = judge_limits(result, {"total": GiB})
    assert finding.sentence == (
        "memory peaked at 1.2 GiB, +205.0 MiB (+20 %) over the limit of 1.0 GiB: "
        "largest 1.2 GiB from aten::mm at net.py:7 in net.fc (temporary 0.7, activation 0.5)"
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
    assert [line.contributors for line in total.lines] == [(grown,)]


def test_the_whole_leads_where_it_grew():
    before = measured(live(10 * MiB), live(10 * MiB, "gradient"))
    after = measured(live(13 * MiB), live(15 * MiB, "gradient"))
    findings = against(before, after).findings
    assert [finding.key for finding in findings] == ["total", "gradient", "activation"]


def test_a_category_leads_where_the_whole_is_as_it_was():
    before = measured(live(10 * MiB), live(10 * MiB, "gradient", "aten::sum"))
    after = measured(live(13 * MiB), live(7 * MiB, "gradient", "aten::sum"))
    assert against(before, after).sentence == (
        "activation peaked at 13.0 MiB, +3.0 MiB (+30 %) over the baseline of 10.0 MiB: "
        "+3.0 MiB from aten::mm at net.py:7 in net.fc"
    )


def test_a_limit_on_a_part_says_more_than_one_on_the_total():
    result = measured(live(10 * MiB), live(10 * MiB, "gradient"))
    findings = judge_limits(result, {"total": MiB, "gradient": MiB})
    assert [finding.key for finding in findings] == ["gradient", "total"]


def test_scratch_that_grew_with_its_cause_does_not_hide_it():
    before = measured(live(2 * MiB, "optimizer_state"))
    cast = live(4 * MiB, "temporary", "aten::_to_copy", line=9)
    after = measured(live(4 * MiB, "optimizer_state"), cast)
    assert "+2.0 MiB of optimizer state from aten::mm" in against(before, after).sentence


def test_scratch_made_further_up_in_the_same_function_is_no_consequence():
    before = measured(live(4 * MiB, operator="aten::log_softmax", line=17))
    cast = live(8 * MiB, "temporary", "aten::_to_copy", line=16)
    after = measured(live(8 * MiB, operator="aten::log_softmax", line=17), cast)
    sentence = against(before, after).sentence
    assert "+8.0 MiB of temporary from aten::_to_copy at net.py:16 in net.fc" in sentence


def test_what_the_peak_held_before_at_another_moment_is_no_cause():
    scratch = live(9 * MiB, "temporary", "aten::sum")
    spike = live(2 * MiB, operator="aten::mul", line=9)
    kept = live(10 * MiB, "gradient")
    before = measured(kept)
    peak = replace(before.peak, live_by_category=(kept, scratch))
    after = measured(kept, scratch, spike)
    sentence = against(replace(before, peak=peak), after).sentence
    assert "+2.0 MiB of activation from aten::mul" in sentence


def test_what_lives_longer_is_the_cause_where_nothing_else_grew():
    scratch, kept = live(9 * MiB, "temporary", "aten::sum"), live(10 * MiB, "gradient")
    before = measured(kept)
    peak = replace(before.peak, live_by_category=(kept, scratch))
    total = against(replace(before, peak=peak), measured(kept, scratch)).findings[0]
    assert total.cause.endswith("from aten::sum at net.py:7 in net.fc, which lives longer")


def test_what_is_read_is_no_cause_of_what_is_made():
    copied = live(32 * MiB, "parameter", "aten::clone")
    read = Contributor(
        Category.PARAMETER, 32 * MiB, 1, "", "net.fc.weight", None, Phase.PREEXISTING
    )
    before = measured(live(MiB))
    sentence = against(before, measured(live(MiB), read, copied)).sentence
    assert "+32.0 MiB of parameter from aten::clone at net.py:7 in net.fc, 32.0" in sentence
    sentence = against(before, measured(live(MiB), read)).sentence
    assert sentence.endswith("+32.0 MiB of parameter in net.fc.weight, there before and read now")


def test_a_wider_model_of_a_fixture_is_larger_not_read_for_the_first_time():
    narrow, wide = (
        Contributor(Category.PARAMETER, size * MiB, 1, "", "net.fc.weight", None, Phase.PREEXISTING)
        for size in (32, 48)
    )
    verdict = against(measured(live(MiB), narrow), measured(live(MiB), wide))
    assert verdict.sentence.endswith(
        "+16.0 MiB of parameter in net.fc.weight, there before and larger now"
    )
    assert line_word(verdict.lines[0]) == "grown"


def test_what_got_another_label_is_a_note_and_fails_only_a_limit():
    before = measured(live(4 * MiB, "temporary"), live(9 * MiB, "gradient", "aten::add"))
    after = measured(live(4 * MiB, "activation"), live(9 * MiB, "gradient", "aten::add"))
    verdict = against(before, after)
    assert (verdict.change, verdict.findings) == (Change.WITHIN, ())
    assert verdict.result.notes == (
        "4.0 MiB of activation from aten::mm at net.py:7 in net.fc counted as temporary before",
    )
    (over,) = judge_limits(after, {"activation": MiB})
    assert over.key == "activation"
    # Something else of the category that lost them may be there now.
    other = measured(live(4 * MiB, "activation"), live(2 * MiB, "temporary", "aten::exp"))
    small = measured(live(4 * MiB, "temporary"), live(2 * MiB, "gradient", "aten::add"))
    assert not against(small, other).failed
    grown = measured(live(4 * MiB, "activation"), live(14 * MiB, "gradient", "aten::add"))
    assert [finding.key for finding in against(before, grown).findings] == ["total", "gradient"]


def test_what_is_new_in_a_category_fails_beside_what_only_got_its_label():
    before = measured(live(4 * MiB, "temporary"), live(30 * MiB, "gradient", "aten::add"))
    kept = live(6 * MiB, "activation", "aten::exp", line=9)
    after = measured(
        live(4 * MiB, "activation"), kept, live(24 * MiB, "gradient", "aten::add", line=3)
    )
    verdict = against(before, after)
    assert [finding.key for finding in verdict.findings] == ["activation"]
    assert "+6.0 MiB from aten::exp at net.py:9 in net.fc" in verdict.sentence


def test_of_equal_causes_the_new_one_leads_then_the_one_that_was_made_first():
    before = measured(live(4 * MiB, operator="aten::addmm", line=15))
    grown = live(8 * MiB, operator="aten::addmm", line=15)
    late = replace(live(4 * MiB, operator="aten::bmm", line=3), order=9)
    early = replace(live(4 * MiB, operator="aten::div", line=16), order=5)
    sentence = against(before, measured(grown, late, early)).sentence
    assert "+4.0 MiB of activation from aten::div at net.py:16 in net.fc" in sentence


def test_of_equal_causes_the_one_whose_line_has_changed_leads():
    before = measured(live(4 * MiB))
    after = measured(
        live(4 * MiB), live(8 * MiB, operator="aten::bmm", line=3), live(9 * MiB, line=30)
    )
    verdict = against(before, after, changed=[30])
    assert "from aten::mm at the changed line net.py:30 in net.fc" in verdict.sentence
    verdict = against(before, after, changed=[3])
    assert "from aten::bmm at the changed line net.py:3 in net.fc" in verdict.sentence


def test_a_changed_line_that_explains_the_whole_leads_before_what_took_a_place():
    before = measured(live(8 * MiB, "temporary", "aten::clone"))
    swapped, cast = (
        live(8 * MiB, "temporary", "aten::relu", line=13),
        live(2 * MiB, "temporary", "aten::_to_copy", line=12),
    )
    sentence = against(before, measured(swapped, cast), changed=[12]).sentence
    assert sentence.endswith(
        "+2.0 MiB of temporary from aten::_to_copy at the changed line net.py:12 in net.fc, "
        "8.0 MiB more and 8.0 MiB less elsewhere"
    )


def test_where_the_cause_itself_is_as_it_was_the_lines_that_changed_are_named():
    before, after = measured(live(2 * MiB)), measured(live(8 * MiB))
    sentence = against(before, after, changed=[26, 40]).sentence
    assert sentence.endswith("at net.py:7 in net.fc; changed since: net.py:26, net.py:40")
    many = against(before, after, changed=[26, 40, 50, 60]).sentence
    assert many.endswith("; changed since: net.py:26, net.py:40, net.py:50 and 1 more")


def test_beside_a_changed_line_that_makes_more_of_the_same_other_changes_are_named():
    before, after = measured(live(2 * MiB)), measured(live(8 * MiB))
    verdict = against(before, after, changed=[7, 26])
    assert verdict.sentence.endswith(
        "at the changed line net.py:7 in net.fc; also changed: net.py:26"
    )
    assert verdict.findings[0].place == CodeLines("net.py", 7, 7)
    assert "also" not in against(before, after, changed=[7]).sentence


def test_a_changed_line_that_makes_a_little_more_of_the_same_names_others_too():
    before, after = measured(live(16 * MiB)), measured(live(18 * MiB))
    assert against(before, after, changed=[7, 26]).sentence.endswith("; also changed: net.py:26")


def test_of_many_lines_that_were_changed_together_none_is_named_beside_another():
    before, after = measured(live(2 * MiB)), measured(live(8 * MiB))
    assert "also" not in against(before, after, changed=[4, 5, 6, 7]).sentence
    apart = against(before, after, changed=[4, 6, 7]).sentence
    assert apart.endswith("; also changed: net.py:4")


def test_a_changed_line_of_something_new_is_the_cause_unless_what_it_reads_grew_too():
    batch = live(2 * MiB, "input", "aten::ones", "", line=3)
    mul, div = (live(2 * MiB, operator=f"aten::{name}", line=7) for name in ("mul", "div"))
    larger, made = (replace(c, size_bytes=16 * MiB, order=n) for n, c in ((1, batch), (2, div)))
    other = against(measured(batch, mul), measured(batch, made), changed=[7, 26]).sentence
    assert other.endswith(
        "+14.0 MiB of activation from aten::div at the changed line net.py:7 in net.fc"
    )
    read = against(measured(batch, mul), measured(larger, made), changed=[7, 26]).sentence
    assert read.endswith("14.0 MiB more elsewhere; also changed: net.py:26")


def test_a_changed_line_that_makes_more_of_one_thing_and_another_one_anew_names_others():
    linear, silu = live(2 * MiB), live(2 * MiB, operator="aten::silu")
    wide, gelu = live(8 * MiB), live(8 * MiB, operator="aten::gelu")
    sentence = against(measured(linear, silu), measured(wide, gelu), changed=[7, 26]).sentence
    assert "+12.0 MiB of activation from aten::gelu and others" in sentence
    assert sentence.endswith("; also changed: net.py:26")


def test_what_a_changed_line_made_before_at_another_moment_is_not_new():
    big, scratch = live(16 * MiB, "input", line=3), live(2 * MiB, "temporary", "aten::mul")
    before = measured(big)
    peak = replace(before.peak, live_by_category=(big, scratch))
    before, after = replace(before, peak=peak), measured(replace(scratch, size_bytes=32 * MiB))
    assert against(before, after, changed=[7, 26]).sentence.endswith("; also changed: net.py:26")
    new = measured(live(32 * MiB, "temporary", "aten::exp"))
    assert "also" not in against(before, new, changed=[7, 26]).sentence


def test_a_changed_line_whose_memory_is_kept_now_does_not_hide_what_keeps_it():
    before, after = measured(live(2 * MiB)), measured(live(2 * MiB), retained=[live(2 * MiB)])
    sentence = against(before, after, changed=[7, 26]).sentence
    assert sentence.endswith("at the changed line net.py:7 in net.fc; also changed: net.py:26")


def test_changes_in_the_files_that_made_the_memory_come_first():
    far, near = CodeLines("config.py", 3, 3), CodeLines("net.py", 26, 26)
    before, after = measured(live(2 * MiB)), measured(live(8 * MiB))

    def finding(*places):
        return told(before, after, CodeChanges(places=lambda: places)).findings[0]

    assert finding(far, near).sentence.endswith("; changed since: net.py:26, config.py:3")
    assert finding(far, near).changed_since == (near, far)
    assert finding(far, near).place == CodeLines("net.py", 7, 7)
    # One change is what the failure is about.
    assert finding(far).place == far


def test_settings_come_after_code_that_is_as_far():
    before, after = measured(live(2 * MiB)), measured(live(8 * MiB))
    places = [CodeLines(file, 1, 1) for file in ("a.yaml", "m.py", "net.py", "b.yaml")]
    sentence = told(before, after, CodeChanges(places=lambda: places)).sentence
    assert sentence.endswith("changed since: net.py:1, m.py:1, a.yaml:1 and 1 more")


def test_lines_that_are_gone_are_told_as_that():
    before, after = measured(live(2 * MiB)), measured(live(8 * MiB))
    gone = CodeChanges(places=lambda: [CodeLines("net.py", 26, 25)])
    told_since = "; changed since: net.py:26 (lines before it are gone)"
    assert told(before, after, gone).sentence.endswith(told_since)


def test_a_call_above_an_equal_one_is_the_new_one():
    before, after = measured(live(4 * MiB)), measured(live(4 * MiB), live(4 * MiB, line=8))
    assert "at net.py:8 in" in told(before, after, CodeChanges()).sentence
    moved = CodeChanges(now_at=lambda source: replace(source, line=source.line + 1))
    assert "at net.py:7 in" in told(before, after, moved).sentence


def test_only_the_first_sentence_says_what_has_changed():
    findings = against(measured(live(2 * MiB)), measured(live(8 * MiB)), changed=[26]).findings
    assert [finding.sentence.count("changed since") for finding in findings] == [1, 0]


def test_growth_of_a_whole_model_is_told_as_such():
    lines = {"embed": 3, "blocks.*.attn": 10, "blocks.*.mlp": 20, "blocks.*.norm": 30, "head": 40}

    def step(times):
        return measured(
            *(
                replace(live(times * n * MiB, module=f"LM.{m}", line=n), order=n)
                for m, n in lines.items()
            )
        )

    verdict = against(step(1), step(4))
    causes = [cause.module for cause in verdict.findings[0].causes]
    assert (causes[0], sorted(causes)) == ("LM.embed", sorted(f"LM.{module}" for module in lines))
    assert verdict.lines[0].parts[0].contributor.module == "LM.embed"
    assert verdict.sentence == (
        "memory peaked at 412.0 MiB, +309.0 MiB (+300 %) over the baseline of 103.0 MiB: "
        "+309.0 MiB of activation throughout LM, 4 times over, "
        "first +9.0 MiB from aten::mm at net.py:3 in LM.embed"
    )


def test_an_entry_that_lost_its_contributors_says_so_and_names_what_is_largest():
    entry = replace(BaselineEntry.of(measured(live(4 * MiB))), live=(), at_peak_live=())
    verdict = judge_baseline(measured(live(9 * MiB)), Reference.of(entry), ALLOWANCE)
    assert verdict.sentence.endswith(
        "largest 9.0 MiB of activation from aten::mm at net.py:7 in net.fc; the cause is not "
        "known: the .origins file beside the baseline lacks this entry, and an update writes it"
    )


def test_a_category_is_blamed_at_its_own_peak():
    before, scratch = live(2 * MiB, "gradient"), live(9 * MiB, "temporary", "aten::sum")
    result = measured(before)
    peak = replace(
        result.peak,
        by_category=CategoryBytes(gradient=2 * MiB, temporary=9 * MiB),
        live_by_category=(scratch, before),
    )
    verdict = against(result, replace(result, peak=peak))
    assert verdict.sentence.endswith("+9.0 MiB from aten::sum at net.py:7 in net.fc")


def test_scratch_that_grew_far_more_leads():
    before = measured(live(2 * MiB, "optimizer_state"))
    mask = live(64 * MiB, "temporary", "aten::ones", line=9)
    after = measured(live(4 * MiB, "optimizer_state"), mask)
    assert "+64.0 MiB of temporary from aten::ones" in against(before, after).sentence


def test_a_number_that_cannot_be_judged_comes_first():
    result = measured(live(5 * MiB))
    findings = judge_limits(result, {"total": 1, "reserved": 1})
    assert [finding.key for finding in findings] == ["reserved", "total"]


def test_an_estimated_number_says_so():
    (finding,) = judge_limits(measured(live(2 * MiB), estimated=True), {"total": MiB})
    assert finding.sentence.startswith("memory peaked at an estimated 2.0 MiB")


def test_a_region_is_named():
    verdict = against(measured(live(1)), measured(live(5 * MiB), name="forward"))
    assert verdict.sentence.startswith("in 'forward', memory peaked at 5.0 MiB")


def test_what_is_retained_is_compared_too():
    kept = live(4 * MiB, operator="aten::exp", module="loss", line=9)
    verdict = against(measured(kept), measured(kept, retained=[kept]))
    assert verdict.sentence == (
        "retained 4.0 MiB, +4.0 MiB over the baseline of 0 B: "
        "+4.0 MiB of activation from aten::exp at net.py:9 in loss"
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


def test_the_workspace_of_a_library_hides_no_growth_of_a_small_test():
    share_of_peak = Allowance(tolerance=0.02, floor_bytes=MiB, floor_share=0.05)
    workspace = live(32 * MiB, "workspace")
    before = measured(workspace, live(200 * KiB))
    grown = measured(workspace, live(300 * KiB))
    findings = against(before, grown, share_of_peak).findings
    assert [(f.key, f.allowed) for f in findings] == [
        ("total", "floor 10.0 KiB"),
        ("activation", "floor 10.0 KiB"),
    ]
    (told,) = judge_spread([before, grown], share_of_peak)
    assert "a spread of 100.0 KiB (floor 10.0 KiB)" in told.numbers
    change, number = told_change(Numbers.measured(before), Numbers.measured(grown), share_of_peak)
    assert (change, number.key) == (Change.GROWN, "total")
    larger = measured(live(33 * MiB, "workspace"), live(200 * KiB))
    assert against(before, larger, share_of_peak).change is Change.WITHIN


def test_a_total_is_held_against_its_baseline_without_the_workspaces():
    """Below 64 MiB of them an untied weight is less than 2 %, and all that a floor allows."""
    allowance = Allowance(tolerance=0.02, floor_bytes=MiB, floor_share=0.05)
    workspace, twice = live(32 * MiB, "workspace"), live(64 * MiB, "workspace", "aten::mm")
    made = live(9 * MiB, "parameter", "aten::empty", "", line=3)
    leak = live(300 * KiB, "temporary", "aten::zeros", "", line=9)
    before = measured(twice, made, leak)
    grown = measured(twice, made, replace(leak, size_bytes=800 * KiB))
    (told,) = (f for f in against(before, grown, allowance).findings if f.key == "total")
    assert told.allowed == "floor 475.8 KiB"
    # One more of them is told by its own number, and is no cause of what grew beside it.
    before, grown = measured(workspace, made), measured(twice, made, leak)
    assert {f.key for f in against(before, grown, allowance).findings} == {"workspace"}
    wider = measured(twice, made, replace(leak, size_bytes=2 * MiB))
    total, *rest = against(before, wider, allowance).findings
    assert total.sentence == (
        "memory peaked at 75.0 MiB, +34.0 MiB (+83 %) over the baseline of 41.0 MiB: +2.0 MiB of "
        "temporary from aten::zeros at net.py:9, 32.0 MiB more elsewhere"
    )
    assert {f.key for f in rest} == {"temporary", "workspace"}
    by_share = against(before, wider, replace(allowance, floor_bytes=0)).findings[0]
    assert by_share.allowed == "tolerance 2 % of all but workspaces"
    (spread,) = judge_spread([before, wider], allowance)
    assert spread.excess_bytes > MiB


def test_a_limit_names_what_the_program_made_beside_the_workspaces():
    result = measured(
        live(64 * MiB, "workspace"), live(MiB, "temporary", "aten::zeros", "", line=9)
    )
    (finding,) = judge_limits(result, {"total": 64 * MiB})
    assert finding.sentence.endswith(
        ": largest 1.0 MiB of temporary from aten::zeros at net.py:9, beside 64.0 MiB of workspace"
    )
    (finding,) = judge_limits(result, {"workspace": 32 * MiB})
    assert finding.causes[0].category is Category.WORKSPACE


def test_one_grown_category_outweighs_a_shrunk_one():
    before = measured(live(10 * MiB), live(10 * MiB, "gradient", "aten::sum"))
    after = measured(live(2 * MiB), live(15 * MiB, "gradient", "aten::sum"))
    verdict = against(before, after)
    assert verdict.change is Change.GROWN
    assert [finding.key for finding in verdict.findings] == ["gradient"]


def test_shrinking_is_no_finding():
    assert not against(measured(live(10 * MiB)), measured(live(2 * MiB))).failed


def test_of_what_shrank_the_largest_saving_is_told():
    before = measured(live(100 * MiB), live(1000 * MiB, "gradient"))
    after = measured(live(60 * MiB), live(1015 * MiB, "gradient"))
    assert against(before, after).notice == (
        "activation peaked at 60.0 MiB, 40 % below the baseline of 100.0 MiB"
    )


def test_a_reading_of_zero_does_not_pass_as_shrunk():
    verdict = against(measured(live(10 * MiB)), measured())
    assert verdict.sentence.endswith("[no-reading]")
    assert verdict.change is Change.NOT_COMPARED


def test_each_reason_for_no_judgement_has_a_kind_and_ends_with_its_slug():
    forward_only = measured(live(1, "temporary"), has_backward=False)
    no_counts = measured(live(1), device="cuda:0", counters=Counters(1, 0, 0, 0))
    stored = BaselineEntry.of(measured(live(9)))
    shrunk = judge_baseline(measured(live(1)), Reference.of(stored), Allowance(0, 0))
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
        FindingKind.OUT_OF_MEMORY,
    }
    assert all(f.shown == f"{f.sentence} [{f.kind.value}]" for f in findings)


@pytest.mark.parametrize("estimated", [False, True])
def test_a_limit_between_the_ends_of_a_peak_is_not_judged(estimated):
    result = replace(measured(live(4 * MiB), estimated=estimated), at_most=9 * MiB)
    (finding,) = judge_limits(result, {"total": 6 * MiB})
    peak = "estimated peak" if estimated else "peak"
    assert finding.kind is FindingKind.UNSEEN
    assert finding.sentence.endswith(f"judged: the {peak} is between 4.0 MiB and 9.0 MiB")
    assert judge_limits(result, {"total": 9 * MiB, "activation": 4 * MiB}) == ()
    (over,) = judge_limits(result, {"total": 3 * MiB})
    assert over.kind is FindingKind.OVER_LIMIT


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
    measured_bytes = 100 if key in ("total", "retained", "net_retained") else 10
    assert judge_limits(result, {key: measured_bytes}) == ()
    (finding,) = judge_limits(result, {key: measured_bytes - 1})
    assert finding.excess_bytes == 1


@pytest.mark.parametrize("key", COUNTERS)
def test_what_was_there_before_the_body_is_named_where_it_is_much_of_what_is_too_much(key):
    before = {f"{key}_before": 6 * MiB}
    counters = Counters(*[10 * MiB] * 4, **before)  # type: ignore[arg-type]
    result = measured(live(4 * MiB), device="cuda:0", counters=counters)
    (finding,) = judge_limits(result, {key: 4 * MiB})
    assert finding.cause == (
        f"6.0 MiB of that was {key} before the body began, for fixtures or for what ran earlier; "
        "the body added 4.0 MiB"
    )
    assert finding.causes == ()
    began = f"6.0 MiB of that was {key} before the body began, for fixtures or for what ran earlier"
    (finding,) = judge_limits(result, {key: 3 * MiB})
    assert finding.cause.startswith(f"{began}; largest 4.0 MiB of activation from aten::mm")
    little = Counters(*[10 * MiB] * 4, **{f"{key}_before": MiB})  # type: ignore[arg-type]
    (finding,) = judge_limits(replace(result, counters=little), {key: 3 * MiB})
    assert finding.cause.startswith("largest 4.0 MiB of activation from aten::mm")


def test_a_leak_of_fewer_bytes_than_steps_is_growth():
    leaks = measured(live(MiB), steps=(0, 0, 0, 1))
    assert leaks.growth == 1
    (finding,) = judge_limits(leaks, {"growth": 0})
    assert (finding.key, finding.excess_bytes) == ("growth", 1)
    assert judge_limits(measured(live(MiB), steps=(5, 5, 5, 5)), {"growth": 0}) == ()


def test_the_operator_that_a_sentence_names_is_the_first_one_of_the_tables_first_row():
    before = measured(live(20 * MiB, operator="aten::bmm"))
    modules = [live(n * MiB, operator="aten::mul", module=f"net.{n}") for n in (14, 15)]
    after = measured(*modules, live(16 * MiB, operator="aten::exp", module="net.exp"))
    verdict = against(before, after)
    assert "+25.0 MiB of activation from aten::mul and others at" in verdict.sentence
    assert line_place(verdict.lines[0])[0] == "aten::mul, 2 more"
    assert line_word(verdict.lines[0]) == "new"


def test_growth_in_three_modules_is_told_of_the_whole_and_in_two_by_its_line():
    def step(times, modules):
        operators = ("aten::mm", "aten::bmm", "aten::add", "aten::mul")
        return measured(
            *(
                replace(live(times * MiB, operator=operator, module=module, line=n), order=n)
                for n, (operator, module) in enumerate(zip(operators, modules, strict=True))
            )
        )

    three, two = ("LM.a", "LM.a", "LM.b", "LM.c"), ("LM.a", "LM.a", "LM.b", "LM.b")
    assert "throughout LM" in against(step(10, three), step(40, three)).sentence
    assert "throughout" not in against(step(10, two), step(40, two)).sentence


def test_one_byte_is_a_reading_and_none_is_not():
    one = BaselineEntry.of(measured(live(1)))
    assert judge_baseline(measured(), Reference.of(one), ALLOWANCE).change is Change.NOT_COMPARED
    assert judge_baseline(measured(live(1)), Reference.of(one), ALLOWANCE).change is Change.SAME
    nothing = BaselineEntry.of(measured())
    assert judge_baseline(measured(), Reference.of(nothing), ALLOWANCE).change is Change.SAME


def test_growth_is_what_the_steps_left_and_all_else_what_was_live():
    left, peak = live(6, operator="aten::cat"), live(9, operator="aten::mm")
    result = measured(peak, steps=(2, 5, 8), grown=(left,))
    growth, total = judge_limits(result, {"growth": 0, "total": 1})
    if growth.key != "growth":
        growth, total = total, growth
    assert "aten::cat" in growth.cause
    assert "aten::mm" in total.cause


def test_a_spread_is_told_in_bytes():
    (finding,) = judge_spread([measured(live(7 * MiB)), measured(live(9 * MiB))], Allowance(0, 0))
    assert "2 runs had 7.0 MiB, 9.0 MiB, a spread of 2.0 MiB" in finding.numbers


def test_the_largest_line_alone_is_the_cause_where_there_is_nothing_to_compare_with():
    parts = live(5 * MiB, line=9), live(6 * MiB, "temporary", line=9)
    result = measured(live(9 * MiB), *parts)
    (finding,) = judge_limits(result, {"total": MiB})
    assert sorted(cause.size_bytes for cause in finding.causes) == [5 * MiB, 6 * MiB]
    assert finding.place == CodeLines("net.py", 9, 9)


def on_a_simulated_gpu(size_bytes, reserved_bytes, before=0, free=0):
    counted = Counters(
        size_bytes,
        size_bytes,
        size_bytes,
        before + reserved_bytes,
        reserved_before=before,
        active_before=before - free,
        repeatable=True,
    )
    return measured(live(size_bytes), device="cuda:0", counters=counted)


def test_reserved_memory_of_a_simulated_gpu_is_compared() -> None:
    before = on_a_simulated_gpu(100 * MiB, 120 * MiB)
    verdict = against(before, on_a_simulated_gpu(100 * MiB, 160 * MiB))
    assert verdict.change is Change.GROWN
    (finding,) = verdict.findings
    assert finding.key == "reserved"
    assert finding.numbers == (
        "the body reserved 160.0 MiB, +40.0 MiB (+33 %) over the baseline of 120.0 MiB"
    )
    # A real GPU may count otherwise in another run.
    counters = replace(before.counters, repeatable=False)
    assert against(replace(before, counters=counters), verdict.result).change is Change.SAME


@pytest.mark.parametrize(
    ("size_bytes", "reserved_bytes", "change", "keys"),
    [
        (100 * MiB, 140 * MiB, Change.WITHIN, []),  # a segment more
        (100 * MiB, 90 * MiB, Change.SHRUNK, []),
        (150 * MiB, 170 * MiB, Change.GROWN, ["total", "activation"]),  # as the peak has it
        (150 * MiB, 220 * MiB, Change.GROWN, ["total", "activation", "reserved"]),
        (50 * MiB, 70 * MiB, Change.SHRUNK, []),
        (50 * MiB, 120 * MiB, Change.SHRUNK, []),
    ],
)
def test_reserved_memory_grows_by_what_goes_beyond_the_peak(
    size_bytes, reserved_bytes, change, keys
):
    before = on_a_simulated_gpu(100 * MiB, 120 * MiB)
    verdict = against(before, on_a_simulated_gpu(size_bytes, reserved_bytes))
    assert (verdict.change, [finding.key for finding in verdict.findings]) == (change, keys)
    if change is Change.SHRUNK:
        assert verdict.changed.key == ("reserved" if size_bytes == 100 * MiB else "total")


def test_room_that_was_there_may_be_reserved_one_time_and_found_another() -> None:
    alone = on_a_simulated_gpu(100 * MiB, 120 * MiB)
    found = on_a_simulated_gpu(100 * MiB, 50 * MiB, before=200 * MiB, free=70 * MiB)
    assert against(alone, found).change is Change.WITHIN
    assert against(found, alone).change is Change.WITHIN
    more = on_a_simulated_gpu(100 * MiB, 141 * MiB)
    assert [f.key for f in against(found, more).findings] == ["reserved"]
