"""Each cause is told once."""

from __future__ import annotations

from dataclasses import replace

from pytest_torchmem.analysis.judge.causes import line_text
from pytest_torchmem.analysis.judge.holders import Held, explain_retained
from pytest_torchmem.analysis.judge.verdict import judge_baseline, judge_limits, rank
from pytest_torchmem.values.baseline import Allowance, BaselineEntry, Reference
from pytest_torchmem.values.contributors import Category, Contributor, Phase, Source
from pytest_torchmem.values.findings import Difference, DifferenceKind, LineDifference
from pytest_torchmem.values.measured import Window, sentences
from pytest_torchmem.values.results import Fate, Holder, Result
from pytest_torchmem.values.units import MiB
from tests import results

LEAK = Contributor(
    Category.TEMPORARY, 8 * MiB, 1, "aten::ones", "", Source("/x/net.py", 7, "f"), Phase.FORWARD
)
OTHER = Contributor(Category.GRADIENT, 20 * MiB, 2, "aten::mm", "fc", None, Phase.BACKWARD)


def result(*live: Contributor, name: str = "") -> Result:
    """A window that retains all that is live."""
    return results.result(*live, name=name, retained=live)


def test_a_leak_that_makes_three_numbers_too_large_is_named_once():
    entry = BaselineEntry.of(result(OTHER))
    verdict = judge_baseline(result(OTHER, LEAK), Reference.of(entry), Allowance(0.02, MiB))
    first, second, third = told = sentences([verdict])
    assert "".join(told).count("aten::ones") == 1
    assert first.endswith("from aten::ones at net.py:7")
    assert second == ("temporary peaked at 8.0 MiB, +8.0 MiB over the baseline of 0 B (same cause)")
    assert third == (
        "retained 28.0 MiB, +8.0 MiB (+40 %) over the baseline of 20.0 MiB (same cause)"
    )


def test_other_causes_have_sentences_of_their_own():
    findings = judge_limits(result(OTHER, LEAK), {"temporary": 1, "gradient": 1, "total": 1})
    told = sentences([Window(result(OTHER, LEAK), findings)])
    assert len(told) == 3
    assert told[0].endswith("largest 20.0 MiB from aten::mm in fc")
    assert told[1].startswith("memory peaked at 28.0 MiB")
    assert told[1].endswith("(same cause)")
    assert told[2].endswith("largest 8.0 MiB from aten::ones at net.py:7")


def test_a_region_and_its_body_share_a_cause():
    region = replace(result(LEAK, name="r"))
    verdicts = [Window(one, judge_limits(one, {"total": MiB})) for one in (region, result(LEAK))]
    told = sentences(verdicts)
    assert told[0].startswith("in 'r', memory peaked at 8.0 MiB")
    assert told[1] == (
        "memory peaked at 8.0 MiB, +7.0 MiB (+700 %) over the limit of 1.0 MiB (same cause)"
    )


def test_a_line_that_only_got_another_label_says_which_it_had():
    relabelled = Difference(LEAK, 8 * MiB, DifferenceKind.RELABELLED, was=Category.GRADIENT)
    text = line_text(LineDifference((relabelled,)))
    assert text == "8.0 MiB of temporary from aten::ones at net.py:7, gradient before"


def test_numbers_are_short_where_a_failed_assert_shows_them():
    assert repr(result(LEAK).retained) == "<Retained total=8388608, temporary=8388608>"
    assert repr(result().peak) == "<Peak total=0>"


def test_what_cannot_be_judged_is_no_consequence():
    findings = judge_limits(result(LEAK), {"allocated": 1, "growth": 1})
    told = sentences([Window(result(LEAK), findings)])
    assert [sentence.rpartition("[")[2] for sentence in told] == ["no-steps]", "no-counter]"]


def test_the_holder_that_is_named_is_that_of_the_cause_not_the_largest():
    held = (
        Held(Holder(20 * MiB, 1, Fate.HELD, "the fixture 'net'.grad"), OTHER),
        Held(
            Holder(8 * MiB, 1, Fate.HELD, "net.CACHE"),
            replace(LEAK, source=replace(LEAK.source, file="elsewhere/net.py")),  # type: ignore[type-var]
        ),
    )
    entry = BaselineEntry.of(result(OTHER))
    verdict = judge_baseline(result(OTHER, LEAK), Reference.of(entry), Allowance(0.02, MiB))
    explained = explain_retained(verdict, lambda: held)
    (retained,) = [f for f in explained.findings if f.key == "retained"]
    assert retained.sentence.endswith("from aten::ones at net.py:7, still held by net.CACHE")
    assert explained.result.retained.holders[0].by == "the fixture 'net'.grad"


def test_who_holds_a_cause_follows_it_also_where_the_peak_is_what_grew():
    held = (Held(Holder(8 * MiB, 1, Fate.HELD, "net.CACHE"), LEAK),)
    entry = BaselineEntry.of(result(replace(OTHER, size_bytes=24 * MiB)))
    verdict = judge_baseline(result(OTHER, LEAK), Reference.of(entry), Allowance(0.02, MiB))
    assert explain_retained(verdict, lambda: held).sentence == (
        "memory peaked at 28.0 MiB, +4.0 MiB (+17 %) over the baseline of 24.0 MiB: +8.0 MiB of "
        "temporary from aten::ones at net.py:7, still held by net.CACHE, 4.0 MiB less elsewhere"
    )


def test_what_each_step_leaves_behind_leads_before_a_peak_that_grew_by_the_same_line():
    held = (Held(Holder(8 * MiB, 1, Fate.HELD, "net.CACHE"), LEAK),)
    grown = replace(result(OTHER, LEAK), steps=(0, 4 * MiB, 8 * MiB), grown=(LEAK,))
    entry = BaselineEntry.of(result(OTHER))
    compared = judge_baseline(grown, Reference.of(entry), Allowance(0.02, MiB))
    found = rank([*judge_limits(grown, {"growth": 0}), *compared.findings])
    explained = explain_retained(replace(compared, findings=found), lambda: held)
    assert explained.sentence == (
        "grew by 4.0 MiB per step, +4.0 MiB over the limit of 0 B: +4.0 MiB of temporary from "
        "aten::ones at net.py:7, still held by net.CACHE"
    )
    assert all("(same cause)" in sentence for sentence in sentences([explained])[1:])
    elsewhere = replace(LEAK, source=replace(LEAK.source, line=70))  # type: ignore[type-var]
    other = judge_limits(replace(grown, grown=(elsewhere,)), {"growth": 0})
    assert rank([*other, *compared.findings])[0].key == "total"


def test_a_known_holder_is_named_before_what_was_not_looked_for():
    held = (
        Held(Holder(6 * MiB, 4, Fate.NOT_LOOKED_FOR, ""), LEAK),
        Held(Holder(2 * MiB, 1, Fate.HELD, "net.CACHE"), LEAK),
    )
    verdict = Window(result(LEAK), judge_limits(result(LEAK), {"retained": MiB}))
    (told,) = explain_retained(verdict, lambda: held).findings
    assert told.sentence.endswith(", still held by net.CACHE")
    (told,) = explain_retained(verdict, lambda: held[:1]).findings
    assert told.sentence.endswith(", still held, its holder not looked for")
