"""Texts for a terminal, from values alone."""

from dataclasses import replace

import pytest

from pytest_torchmem.analysis.judge.verdict import judge_limits
from pytest_torchmem.report.text.tables import change_table, lines_table
from pytest_torchmem.report.text.terminal import Detail, failure_text, summary_lines
from pytest_torchmem.store.run_reports import RunReport
from pytest_torchmem.values.baseline import Change, ChangedNumber
from pytest_torchmem.values.contributors import (
    Category,
    CategoryBytes,
    Contributor,
    Phase,
    Source,
)
from pytest_torchmem.values.findings import (
    Difference,
    DifferenceKind,
    Finding,
    FindingKind,
    LineDifference,
)
from pytest_torchmem.values.measured import BaselineChange, MeasuredTest, Window
from pytest_torchmem.values.results import Peak, Result, Retained
from pytest_torchmem.values.units import MiB
from tests.results import failed


def made(size, module="net"):
    source = Source("src/net.py", 3, "forward")
    return Contributor(Category.ACTIVATION, size, 2, "aten::mm", module, source, Phase.FORWARD)


def line_of(*contributors):
    parts = (Difference(c, c.size_bytes, DifferenceKind.NEW) for c in contributors)
    return LineDifference(tuple(parts))


def result(*live, name="", **changes):
    total = CategoryBytes(activation=sum(c.size_bytes for c in live))
    peak = Peak(total.total, 0, total, total, live)
    values = {"device": "cpu", "estimated": False, "peak": peak, "retained": Retained(0, total)}
    return Result(name=name, **{**values, **changes})


def window(key="test_a", sentence="", change=Change.SAME, size=MiB, limits=(), before=MiB):
    findings = failed(*filter(None, [sentence]))
    return Window(result(made(size)), findings, change, before, key=key, limits=dict(limits))


def one(name, *windows, not_measured=""):
    return MeasuredTest(name, "t.py", {"device": "cpu"}, windows, not_measured)


def run_of(*tests, changes=(), problems=()):
    failed = [test.problem or any(w.sentence for w in test.windows) for test in tests]
    ended = zip(tests, failed, strict=True)
    reports = tuple(replace(t, outcome="failed" if f else "passed") for t, f in ended)
    return RunReport(reports, changes=changes, problems=problems)


def texts(run, detail=Detail.SHORT, width=120):
    return [line.text for line in summary_lines(run, detail, width)]


def test_a_summary_without_room_becomes_a_list():
    run = run_of(one("t.py::test_a_long_name_of_a_test", window("test_a", "over")))
    table = summary_lines(run, Detail.SHORT, 70)
    widest = max(len(line.text) for line in table)
    assert [line.text for line in summary_lines(run, Detail.SHORT, 70, widest - 1)][:2] == [
        "t.py::test_a_long_name_of_a_test",
        "  1.0 MiB, same as baseline",
    ]
    assert summary_lines(run, Detail.SHORT, 70, widest) == table


@pytest.mark.parametrize("width", [50, 80, 120])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\x0b", "\x85", "\u2028"])
def test_a_line_break_in_a_name_takes_no_line(width, end):
    region = replace(window("test_a::two"), result=result(made(MiB), name=f"fore{end}ward"))
    run = run_of(
        one(f"t.py::test_a[x{end}y]", window("test_a", "over"), region),
        one(f"t.py::test_b[{end}]", not_measured="no"),
        changes=(BaselineChange("b.json", f"test_c[x{end}y]", Change.NEW, 0, MiB),),
    )
    for detail in Detail:
        told = texts(run, detail, width)
        assert all(line.splitlines() == [line] for line in told if line), told
    assert any("test_a[x y]::fore ward" in line for line in texts(run, Detail.ALL, 120))


def test_a_line_break_in_an_entry_takes_no_line_of_a_dry_run_s_table():
    change = BaselineChange("b/t.json", "test_a[x\ny]", Change.GROWN, MiB, 2 * MiB, False)
    assert len(change_table((change,))) == 3


def test_a_dry_run_s_table_without_room_becomes_a_list():
    change = BaselineChange("b/t.json", "test_a", Change.GROWN, MiB, 2 * MiB, False)
    table = change_table((change,))
    assert table[0].split() == ["change", "entry", "before", "now", "file"]
    widest = max(map(len, table))
    assert change_table((change,), widest - 1) == [
        "grown: test_a",
        "    peak 1.0 MiB -> 2.0 MiB, +100 %",
        "    b/t.json",
        "dry run: 1 grown; nothing written",
    ]
    assert change_table((change,), widest) == table


def test_a_table_without_room_becomes_a_list():
    grown = line_of(made(3 * MiB, "net.new"))
    verdict = Window(
        result(made(3 * MiB, "net.layers.*.mlp")),
        (Finding(FindingKind.OVER_LIMIT, "total", "x", 1),),
    )
    lines = failure_text([verdict], "", "", width=50).splitlines()
    assert max(map(len, lines)) <= 50
    at = lines.index("live at the peak, 3.0 MiB on cpu:")
    assert lines[at + 1 : at + 5] == [
        "   size        category      count",
        "3.0 MiB  100%  activation        2",
        "    aten::mm in net.layers.*.mlp (src/net.py:3",
        "        forward)",
    ]
    assert "operator" in failure_text([verdict], "", "", width=100)
    lines = lines_table((grown,), ChangedNumber("total", 0, 3 * MiB), width=50)
    assert lines == [
        "  change       of",
        "+3.0 MiB  new  activation",
        "    aten::mm in net.new (src/net.py:3 forward)",
    ]


def test_what_is_too_small_to_be_listed_is_a_row_of_what_grew():
    grown = line_of(made(3 * MiB))
    lines = lines_table((grown,), ChangedNumber("total", 0, 3 * MiB + 5))
    assert lines[-1] == "and +5 B in parts that are not listed"


def test_a_failure_shows_what_grew_and_how_to_accept_it():
    grown = line_of(made(3 * MiB, "net.new"), replace(made(MiB), category=Category.TEMPORARY))
    finding = Finding(FindingKind.GROWN, "activation", "memory peaked too high", 4 * MiB, (grown,))
    finding = replace(finding, allowed="tolerance 2 %")
    verdict = Window(
        result(made(5 * MiB), made(3 * MiB, "net.new"), notes=("seen late",)),
        (finding,),
        Change.GROWN,
        changed=ChangedNumber("total", 4 * MiB, 8 * MiB),
        lines=(grown,),
    )
    assert failure_text([verdict], "", "pytest t.py --accept").splitlines() == [
        "memory peaked too high",
        "",
        "grown against the baseline (tolerance 2 %), in all +4.0 MiB (+100 %), all at that line",
        "note: seen late",
        "",
        "if this change is wanted, accept it: pytest t.py --accept",
    ]
    nowhere = line_of(replace(made(4 * MiB), source=None))
    assert failure_text([replace(verdict, lines=(nowhere,))], "", "").splitlines()[2] == (
        "grown against the baseline (tolerance 2 %), in all +4.0 MiB (+100 %)"
    )
    more = replace(verdict, changed=ChangedNumber("total", 4 * MiB, 9 * MiB))
    assert failure_text([more], "", "").splitlines()[2:6] == [
        "grown against the baseline (tolerance 2 %), in all +5.0 MiB (+125 %):",
        "  change       of                             operator    module    source",
        "+4.0 MiB  new  activation 3.0, temporary 1.0  aten::mm    net       src/net.py:3 forward",
        "and +1.0 MiB in parts that are not listed",
    ]
    over = replace(finding, kind=FindingKind.OVER_LIMIT, key="total", lines=())
    both = replace(verdict, findings=(finding, over))
    assert "live at the peak, 8.0 MiB on cpu:" in failure_text([both], "", "")


def test_a_limit_names_no_command_since_none_raises_it():
    verdict = Window(result(made(1)), (Finding(FindingKind.GROWN, "total", "memory peaked", 1),))
    assert "pytest" not in failure_text([verdict], "", "pytest t.py")


def test_a_long_table_says_what_it_leaves_out():
    verdict = Window(
        result(*(made(MiB, f"m{i}") for i in range(14))),
        (Finding(FindingKind.GROWN, "total", "x", 1),),
    )
    assert "... and 4 more, 4.0 MiB together" in failure_text([verdict], "", "")


def test_a_problem_comes_before_numbers():
    verdict = Window(result(made(1)), (Finding(FindingKind.GROWN, "total", "memory peaked", 1),))
    lines = failure_text([verdict], "the file is broken", "").splitlines()
    assert lines[:2] == ["the file is broken", "also: memory peaked"]


def test_of_several_windows_the_most_telling_failure_leads():
    body = Window(
        result(made(1)), (Finding(FindingKind.OVER_LIMIT, "total", "the body is large", 10),)
    )
    region = Window(
        result(made(1), name="r"), (Finding(FindingKind.GROWN, "activation", "the region grew", 5),)
    )
    assert failure_text([body, region], "", "").startswith("in 'r', the region grew")


def test_an_estimated_number_is_never_shown_without_the_word():
    estimated = result(made(MiB), estimated=True)
    verdict = Window(estimated, (Finding(FindingKind.GROWN, "total", "x", 1),))
    assert "live at the peak, an estimated 1.0 MiB on cpu:" in failure_text([verdict], "", "")
    row = Window(estimated, change=Change.SAME, key="test_a")
    assert "1.0 MiB (estimated)" in texts(run_of(one("t", row)))[1]


def test_failed_tests_come_first_then_the_largest():
    tests = (
        one("t::small", window(size=1)),
        one("t::large", window(size=9)),
        one("t::failed", window(size=5, sentence="over the limit")),
    )
    rows = texts(run_of(*tests))
    assert [row.split()[0] for row in rows[1:4]] == ["t::failed", "t::large", "t::small"]


def test_what_changed_comes_before_what_is_large():
    tests = (
        one("t::large", window(size=9)),
        one("t::shrunk", window(size=2, change=Change.SHRUNK)),
        one("t::grown", window(size=1, change=Change.GROWN)),
    )
    rows = texts(run_of(*tests))
    assert [row.split()[0] for row in rows[1:4]] == ["t::grown", "t::shrunk", "t::large"]


def test_a_slim_terminal_gets_two_lines_for_each_test():
    summary = run_of(one("tests/deep/test_it.py::test_a", window()))
    rows = texts(summary, width=30)
    assert len(rows[0]) < 30
    assert rows[0].endswith("test_it.py::test_a")
    assert rows[1] == "  1.0 MiB, same as baseline"


def test_the_most_detail_has_each_category_s_own_peak():
    rows = texts(run_of(one("t", window())), Detail.COMPOSITION)
    assert "t: activation 1.0 MiB" in rows
    assert "t: activation 1.0 MiB" not in texts(run_of(one("t", window())), Detail.ALL)


def test_a_timeline_stands_above_what_was_live():
    verdict = Window(
        result(made(1), name="r"), (Finding(FindingKind.GROWN, "total", "memory peaked", 1),)
    )
    lines = failure_text([verdict], "", "", {"r": ["drawn", "^ peak"]}).splitlines()
    at = lines.index("footprint of 'r', change by change:")
    assert lines[at : at + 3] == ["footprint of 'r', change by change:", "drawn", "^ peak"]
    assert at < lines.index("live at the peak of 'r', 1 B on cpu:")


def test_each_status_is_named():
    tests = (
        one("a", window(limits={"total": 4 * MiB}.items(), change=Change.NOT_COMPARED)),
        one("b", window(limits={"retained": 1}.items(), change=Change.NEW)),
        one("c", window(change=Change.SHRUNK, before=3 * MiB)),
        one("d", window(sentence="activation peaked at 1, 1 over the limit of 2: x")),
    )
    rows = {row.split()[0]: row for row in texts(run_of(*tests))}
    assert rows["a"].endswith("25% of limit")
    assert rows["b"].endswith("within limits; new")
    assert rows["c"].endswith("shrunk, -2.0 MiB (-67 %)")


def test_a_long_name_is_cut_at_its_front():
    name = "tests/" + "deep/" * 30 + "test_it.py::test_a"
    row = texts(run_of(one(name, window())), width=80)[1]
    assert row.startswith("...")
    assert "test_it.py::test_a" in row
    assert len(row) <= 80


def test_one_reason_is_said_once_for_all_its_tests():
    tests = tuple(one(f"t{i}", not_measured="no device") for i in range(5))
    assert "not measured: t0, t1, t2 and 2 more: no device" in texts(run_of(*tests))


def test_changes_are_listed_in_the_order_of_the_four_words():
    kinds = (Change.UNUSED, Change.SHRUNK, Change.GROWN, Change.NEW)
    changes = tuple(BaselineChange("f.json", f"k{i}", kind) for i, kind in enumerate(kinds))
    lines = texts(run_of(changes=changes))
    words = [line.split(":")[0] for line in lines]
    assert words == ["f.json", "  new", "  grown", "  shrunk", "  unused", "baseline updated"]


def test_a_file_is_named_once_above_its_entries():
    changes = tuple(
        BaselineChange(file, f"k{i}", Change.NEW, 0, MiB) for i in range(2) for file in ("a", "b")
    )
    assert texts(run_of(changes=changes)) == [
        *("a:", "  new: k0: 1.0 MiB", "  new: k1: 1.0 MiB"),
        *("b:", "  new: k0: 1.0 MiB", "  new: k1: 1.0 MiB"),
        "baseline updated: 4 entries in 2 files",
    ]


def test_a_failure_tells_the_growth_of_each_step():
    def told(*steps):
        grown = replace(result(made(MiB)), steps=steps)
        text = failure_text(
            [Window(grown, (Finding(FindingKind.GROWN, "growth", "it grew"),))], "", "pytest"
        )
        return next(line for line in text.splitlines() if line.startswith("growth from"))

    assert told(0, MiB, MiB, 3 * MiB) == "growth from step to step: +1.0 MiB, +0 B, +2.0 MiB"
    assert told(*range(0, 500, 5)) == "growth from step to step: 99 times +5 B"
    assert told(*(n * n for n in range(20))).endswith("+17 B, +19 B, ... and 9 more")


def test_problems_are_shown_at_every_detail():
    for detail in Detail:
        assert texts(run_of(problems=("broken",)), detail) == ["broken"]


def test_an_empty_summary_says_nothing():
    assert summary_lines(RunReport(), Detail.ALL, 80) == []


def test_the_closing_line_tells_what_is_over_from_what_could_not_be_judged():
    changes = {FindingKind.SHRUNK: Change.SHRUNK, FindingKind.NO_BASELINE: Change.NEW}
    kinds = ("over-limit", "no-reading", "no-steps", "shrunk", "unstable", "no-baseline")
    windows = (
        replace(
            window(change=changes.get(kind, Change.SAME)), findings=failed("it failed", kind=kind)
        )
        for kind in map(FindingKind, kinds)
    )
    tests = (one(f"test_{number}", judged) for number, judged in enumerate(windows))
    summary = run_of(*tests)
    assert texts(summary, Detail.COUNTS)[0] == (
        "memory: 6 failed (1 over a limit or baseline, 2 not judged, 1 not stable, 1 shrunk, "
        "1 without a baseline)"
    )


def test_what_is_over_counts_as_that_whatever_else_failed():
    unseen = failed("not everything was seen", kind=FindingKind.UNSEEN)
    over = failed("+1 B (+100 %) over the limit of 1 B", kind=FindingKind.OVER_LIMIT)
    both = replace(window(), findings=(*unseen, *over))
    counts = texts(run_of(one("both", both)), Detail.COUNTS)[0]
    assert counts == "memory: 1 failed (1 over a limit or baseline)"


def test_a_test_whose_baseline_cannot_be_read_counts_as_not_judged():
    unread = replace(one("unread", window()), problem="the baseline t.json cannot be read")
    assert texts(run_of(unread), Detail.COUNTS)[0] == "memory: 1 failed (1 not judged)"


def test_what_an_update_would_not_store_is_not_said_to_be_stored():
    test = one("t.py::test_a", window("test_a", change=Change.NEW))
    hint = "1 measurement has no baseline; --torchmem-update-baseline stores it"
    assert hint in texts(RunReport((test,)))
    assert hint not in texts(RunReport((replace(test, outcome="xfailed"),)))


def test_a_limit_on_a_category_shows_what_that_held_and_not_what_the_total_did():
    kept = made(4 * MiB)
    scratch = replace(made(9 * MiB), category=Category.TEMPORARY, operator="aten::cat")
    at_peak = CategoryBytes(temporary=9 * MiB)
    own_peaks = CategoryBytes(temporary=9 * MiB, activation=4 * MiB)
    peak = Peak(9 * MiB, 0, at_peak, own_peaks, (scratch,), (scratch, kept))
    over = result(peak=peak)
    text = failure_text([Window(over, judge_limits(over, {"activation": MiB}))], "", "")
    assert "activation at its own peak, 4.0 MiB on cpu:" in text
    assert "aten::cat" not in text
    limits = {"activation": MiB, "total": MiB}
    text = failure_text([Window(over, judge_limits(over, limits))], "", "")
    assert text.index("activation at its own peak") < text.index("live at the peak, 9.0 MiB")
