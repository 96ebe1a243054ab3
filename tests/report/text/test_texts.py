"""Markdown, annotations, sparklines and pictures for documents."""

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html import unescape
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_torchmem.analysis.judge.verdict import judge_limits
from pytest_torchmem.report.page.svg import COLOURS, LineKind, Mark, marks_of, timeline_svg
from pytest_torchmem.report.text.github import ANNOTATIONS, LINES, error_commands, line_commands
from pytest_torchmem.report.text.markdown import (
    COMMENT_LIMIT,
    MARKER,
    STEP_SUMMARY_LIMIT_BYTES,
    run_markdown,
    step_summary,
)
from pytest_torchmem.report.text.tables import ASCII, BLOCKS, sparkline, timeline_lines
from pytest_torchmem.report.writing import kind_of
from pytest_torchmem.store.run_reports import RunReport
from pytest_torchmem.values.baseline import Change
from pytest_torchmem.values.contributors import Category, CategoryBytes, Source
from pytest_torchmem.values.errors import ReportError
from pytest_torchmem.values.findings import FindingKind
from pytest_torchmem.values.measured import Rank, Window
from pytest_torchmem.values.picture import Picture
from pytest_torchmem.values.results import Peak
from pytest_torchmem.values.units import MiB
from tests.report.sample_run import (
    GROWN,
    made,
    picture,
    report_of,
    result_of,
    sample_run,
    window,
)
from tests.results import failed

SVG = "{http://www.w3.org/2000/svg}"

# --- Markdown


def test_a_comment_can_be_found_again_and_leads_with_the_counts():
    lines = run_markdown(sample_run()).splitlines()
    assert lines[0] == MARKER
    assert lines[1] == "### Memory: 1 failed, 1 not measured, 1 shrunk, 1 new, 3 ok"


def test_a_failure_has_its_sentence_and_its_causes():
    text = run_markdown(sample_run())
    assert "activation peaked at 64.0 MiB, +16.0 MiB (+33 %) over the baseline of 48.0 MiB" in text
    place = ("`aten::_to_copy`", "`model.layers.*.norm`", "`src/net.py:41 forward`")
    assert f"| +7.8 MiB | grown | activation | {' | '.join(place)} |" in text


def test_a_simulated_gpu_is_told_with_the_cudnn_that_plans_for_it():
    run = sample_run()
    environment = {"device": "simulated H100", "torch": "2.13", "cudnn": "9.20"}
    tests = tuple(replace(test, environment=environment) for test in run.tests)
    text = run_markdown(replace(run, tests=tests))
    assert "measured on simulated H100 with cuDNN 9.20" in text


def test_problems_are_told_and_cut_where_they_would_fill_a_comment():
    run = replace(sample_run(), problems=tuple(f"problem {n}: {'x' * 300}" for n in range(900)))
    text = run_markdown(run)
    assert len(text) <= COMMENT_LIMIT
    shown = text.count("> problem")
    assert f"... and {900 - shown} more problems" in text
    assert "`tests/test_step.py::test_train[bf16]`" in text


def test_a_sentence_says_which_region_it_is_about():
    body = window("a", Change.GROWN, "memory peaked", share=0.75)
    region = replace(body, result=replace(body.result, name="forward"), findings=failed("more"))
    text = run_markdown(RunReport((report_of("a", body, region, outcome="failed"),)))
    before, after = text.split("\n\nIn `forward`:\n\n- more")
    assert "- memory peaked" in before
    assert "- memory peaked" not in after
    assert "In `" not in before


def test_a_row_tells_what_failed_without_a_baseline_and_in_which_region():
    over = replace(
        window(
            "a", Change.NOT_COMPARED, "memory peaked at 9 B, +1 B (+12 %) over the limit of 8 B"
        ),
        baseline=None,
    )
    over = replace(over, findings=failed(over.sentence, kind=OVER))
    region = window("a::forward", Change.GROWN, "memory peaked", share=0.75)
    region = replace(region, result=replace(region.result, name="forward"))
    text = run_markdown(RunReport((report_of("a", over, region, outcome="failed"),)))
    assert "| over limit; `forward` 75% of limit; grown, +16.0 MiB (+22 %) |" in text


OVER, GROWN_KIND = FindingKind.OVER_LIMIT, FindingKind.GROWN
LIMIT = "grew by 9 B per step, +9 B over the limit of 0 B"


@pytest.mark.parametrize("kinds", [(GROWN_KIND, OVER), (OVER, GROWN_KIND)])
def test_a_limit_that_failed_is_told_wherever_it_stands(kinds):
    findings = tuple(failed(GROWN, kind=kind)[0] for kind in kinds)
    body = replace(window("a", Change.GROWN, GROWN, share=0.75), findings=findings)
    text = run_markdown(RunReport((report_of("a", body, outcome="failed"),)))
    assert "| over limit; grown, +16.0 MiB (+22 %) |" in text


def test_a_limit_that_could_not_be_judged_is_told():
    nothing = replace(window("a").result, peak=Peak(0, 0, CategoryBytes(), CategoryBytes()))
    for result, limits in ((nothing, {"total": 1}), (window("a").result, {"growth": 0})):
        findings = (*failed(GROWN), *judge_limits(result, limits))
        body = replace(window("a"), limits=limits, findings=findings)
        assert body.limit_status == "limit not judged"


def test_a_baseline_that_grew_is_no_limit_whatever_its_sentence_says():
    body = window("a", Change.GROWN, GROWN.replace("net.py", "x over the limit of y.py"))
    assert body.limit_status == "75% of limit"


def test_a_region_that_failed_is_told_beside_its_body():
    well = window("a::forward", Change.SAME, scale=2 * MiB)
    well = replace(well, result=replace(well.result, name="forward"))
    over = replace(well, findings=failed(LIMIT, kind=OVER))
    over = replace(over, result=replace(over.result, name="backward"))
    body = replace(window("a", Change.NOT_COMPARED), baseline=None, baseline_bytes=0)
    text = run_markdown(RunReport((report_of("a", body, well, over, outcome="failed"),)))
    assert "| 75% of limit; `backward` over limit; same as baseline |" in text


def test_what_ended_a_test_early_is_told():
    ended_by = failed("ran out of memory", "also live: 3 B", kind=FindingKind.OUT_OF_MEMORY)
    body = Window(window("a").result, ended_by)
    test = report_of("a", outcome="failed", unjudged=(body,), raised="OutOfMemoryError: no")
    text = run_markdown(RunReport((test,)))
    assert "| 90.1 MiB | not compared, ended by an exception | 1.0 MiB |" in text
    assert "- ran out of memory\n- also live: 3 B\n- OutOfMemoryError: no" in text


def test_a_comment_of_one_rank_says_which():
    run = replace(sample_run(), rank=Rank(1, 2))
    assert "rank 1 of 2" in run_markdown(run).splitlines()[-1]
    assert "rank" not in run_markdown(sample_run())


def test_no_name_is_markup():
    text = run_markdown(
        RunReport(
            (
                report_of("test_<b>|`x`|@me", window("a")),
                report_of("test_b", not_measured="see #1 <img> @all | *bold*"),
            )
        )
    )
    rows = [line for line in text.splitlines() if "test_" in line]
    assert "`` tests/test_step.py::test_<b>\\|`x`\\|@me ``" in rows[1]
    assert r"see \#1 &lt;img&gt; @<!-- -->all \| \*bold\*" in rows[0]


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1_000, 5_000, COMMENT_LIMIT])
def test_a_comment_fits_and_says_what_it_leaves_out(limit):
    many = tuple(
        report_of(f"test_{i}", window("a", Change.GROWN, GROWN, share=0.7)) for i in range(900)
    )
    text = run_markdown(RunReport(many), limit)
    assert len(text) <= limit
    shown = len(re.findall(r"^\| ❌", text, re.MULTILINE))
    assert f"... and {900 - shown} more" in text


def named(name, status="ok"):
    """A test with a name, that is well or failed."""
    if status == "ok":
        body = replace(window("a"), picture=None)
        test = report_of("a", body)
    else:
        test = report_of("a", window("a", Change.GROWN, GROWN, share=0.7), outcome="failed")
    return replace(test, test=f"tests/test_a.py::{name}")


def rendered(text):
    """Markdown as GitHub renders it: tables, and HTML as it stands."""
    markdown_it = pytest.importorskip("markdown_it", reason="markdown-it-py is not installed")
    return markdown_it.MarkdownIt("commonmark").enable("table").render(text)


@pytest.mark.slow
def test_failures_keep_their_sentences_beside_thousands_of_tests_that_are_well():
    failed = tuple(named(f"test_bad[{n}]", "failed") for n in range(3))
    run = RunReport((*failed, *(named(f"test_{n}") for n in range(2_000))))
    text = run_markdown(run)
    assert len(text) <= COMMENT_LIMIT
    assert text.count(r"+16.0 MiB from aten::\_to\_copy") == 3
    assert text.index("</details>") < text.index("<details><summary>2000 ok</summary>")
    shown = len(re.findall(r"^\| ✅", text, re.MULTILINE))
    assert shown > 100
    assert f"... and {2_000 - shown} more tests" in text


@pytest.mark.slow
def test_the_summary_of_a_job_is_below_github_s_limit_in_bytes():
    names = [f"test_größe[日本語-{n}-{'🙂' * 120}]" for n in range(2_000)]
    states = ["failed" if n % 4 == 0 else "ok" for n in range(2_000)]
    run = RunReport(tuple(map(named, names, states)))
    text = step_summary(run)
    assert 900_000 < len(text.encode()) <= STEP_SUMMARY_LIMIT_BYTES
    shown = len(re.findall(r"^\| (?:✅|❌)", text, re.MULTILINE))
    left_out = [int(n) for n in re.findall(r"and (\d+) more tests", text)]
    assert shown + sum(left_out) == 2_000
    assert left_out
    assert len(step_summary(run, 500_000).encode()) <= STEP_SUMMARY_LIMIT_BYTES - 500_000
    assert step_summary(run, STEP_SUMMARY_LIMIT_BYTES - 100) == ""


def test_github_renders_each_row_of_a_table_with_its_name_as_it_is():
    names = [
        "test_a[x|y]",
        "test_a[<b>bold</b>]",
        "test_a[`one` ``two``]",
        "test_a[a\\\\|b\\\\]",
        "test_a[*x*_y_~z~]",
        "test_a[https://x.org @me #1]",
        "test_a[größe-日本語-🙂]",
        "test_a[&amp;'\"]",
        "`",
    ]
    states = ["failed", "ok"]
    for state in states:
        html = rendered(run_markdown(RunReport(tuple(named(name, state) for name in names))))
        rows = re.findall(r"<tr>\n<td>(?:✅|❌).*?</tr>", html, re.DOTALL)
        cells = [re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL) for row in rows]
        assert [len(row) for row in cells] == [5] * len(names)
        shown = {unescape(re.fullmatch(r"<code>(.*)</code>", row[1]).group(1)) for row in cells}
        assert shown == {f"tests/test_a.py::{name}" for name in names}
        assert "<b>" not in html


def test_a_fold_holds_a_table_that_is_rendered():
    html = rendered(run_markdown(RunReport(tuple(named(f"test_{n}") for n in range(30)))))
    fold = re.search(r"<details><summary>30 ok</summary>(.*?)</details>", html, re.DOTALL).group(1)
    assert fold.count("<tr>") == 31
    assert "|" not in fold


def test_what_was_not_measured_says_why_in_its_details():
    test = report_of("test_a", outcome="failed", not_measured="another profiler [not-measured]")
    text = run_markdown(RunReport((test,)))
    assert r"- another profiler \[not-measured\]" in text.partition("<details>")[2]


def test_a_failure_of_something_else_has_no_empty_details():
    """A test that was expected to fail, strictly, and did not raises nothing."""
    well = replace(window("a"), baseline=None, baseline_bytes=0)
    text = run_markdown(RunReport((report_of("a", well, outcome="failed"),)))
    assert "- it failed for a reason other than memory\n" in text.partition("<details>")[2]


def test_a_failure_that_was_expected_is_told_as_such_in_a_comment():
    over = window(
        "a", Change.NOT_COMPARED, "memory peaked at 9 B, +1 B (+12 %) over the limit of 8 B"
    )
    over = replace(over, baseline=None, findings=failed(over.sentence, kind=OVER))
    text = run_markdown(RunReport((report_of("a", over, outcome="xfailed"),)))
    assert "| over limit, as expected |" in text


def test_an_estimated_number_is_named_so_in_a_comment():
    body = window("a")
    body = replace(body, result=replace(body.result, estimated=True))
    text = run_markdown(RunReport((report_of("a", body),)))
    assert "90.1 MiB (estimated)" in text


def test_a_run_without_tests_says_so():
    assert "nothing was measured" in run_markdown(RunReport())


# --- annotations


def test_a_failure_is_an_error_at_its_line():
    (command,) = error_commands(sample_run())
    assert command.startswith(
        "::error file=tests/test_step.py,line=12,title=memory grown%3A test_train["
    )
    assert "(+33 %25)" in command


def test_a_command_is_one_line_whatever_is_in_it():
    test = report_of("test_a,b:c\nd", window("a", Change.GROWN, "50 %\r\n::warning::x"))
    (command,) = error_commands(RunReport((test,)))
    assert command.splitlines() == [command]
    assert "title=memory grown%3A test_a%2Cb%3Ac%0Ad::50 %25%0A::warning::x" in command


def test_an_annotation_s_title_has_the_whole_name_of_its_test():
    test = report_of("TestNet::test_a[aten::mm]", window("a", Change.GROWN, GROWN))
    (command,) = error_commands(RunReport((test,)))
    assert "title=memory grown%3A TestNet%3A%3Atest_a[aten%3A%3Amm]::" in command


def test_github_is_given_no_more_than_it_shows():
    many = tuple(report_of(f"t{i}", window("a", Change.GROWN, GROWN)) for i in range(30))
    assert len(error_commands(RunReport(many))) == ANNOTATIONS


def of_line(name, line, file="src/net.py", **changes):
    cause = replace(made(MiB), source=Source(file, line, "forward"))
    grown = window(name, Change.GROWN, GROWN, share=0.75)
    (finding,) = grown.findings
    grown = replace(grown, findings=(replace(finding, causes=(cause,)),))
    return report_of(name, grown, **{"outcome": "failed", **changes})


def test_a_line_that_several_tests_name_is_told_once():
    run = RunReport((of_line("a", 3), of_line("b", 3), of_line("c", 4)))
    first, second = line_commands(run, {"src/net.py": "python/src/net.py"})
    start = "::warning file=python/src/net.py,line=3,title=memory grown here::"
    assert first.startswith(f"{start}tests/test_step.py::a (and 1 more): activation peaked at 64")
    assert second.startswith("::warning file=python/src/net.py,line=4,")


@pytest.mark.parametrize(
    "test",
    [
        of_line("elsewhere", 3, "torch/nn/functional.py"),
        of_line("unknown line", 0),
        of_line("expected", 3, outcome="xfailed"),
    ],
)
def test_no_line_is_told_of_other_people_s_files_and_of_what_did_not_fail(test):
    assert line_commands(RunReport((test,)), {"src/net.py": "src/net.py"}) == []


def test_github_is_given_no_more_lines_than_it_shows():
    many = tuple(of_line(f"t{line}", line) for line in range(1, 40))
    assert len(line_commands(RunReport(many), {"src/net.py": "src/net.py"})) == LINES < ANNOTATIONS


# --- sparklines


def test_a_sparkline_shows_the_highest_of_each_stretch():
    assert sparkline([0, 0, 0, 8, 0, 0], 3) == "▁█▁"
    assert sparkline([1, 2, 3, 4, 5, 6, 7], 7) == "▂▃▄▅▆▇█"
    assert sparkline([0, 7], 2, plain=True) == "_#"
    assert sparkline([], 5) == ""


@given(st.lists(st.integers(0, 1 << 50), min_size=1, max_size=200), st.integers(1, 120))
def test_every_mark_of_a_sparkline_is_right(levels, width):
    drawn = sparkline(levels, width)
    assert len(drawn) == min(width, len(levels))
    assert (BLOCKS[-1] in drawn) == (max(levels) > 0)
    assert (BLOCKS[0] in drawn) >= (max(levels) == 0)


@given(st.lists(st.integers(0, 99), min_size=1, max_size=150), st.integers(20, 110))
def test_the_marker_stands_below_the_peak(totals, width):
    picture = Picture(
        tuple(range(len(totals))),
        tuple(range(len(totals))),
        len(totals),
        {Category.ACTIVATION: tuple(totals)},
    )
    drawn, marked, *rest = timeline_lines(picture, width)
    if max(totals):
        assert drawn[marked.index("^")] == BLOCKS[-1]
    assert all(len(line) <= max(width, 50) for line in (drawn, marked, *rest))
    assert "peak" in "".join((marked, *rest))


def test_a_plain_terminal_gets_plain_characters():
    assert "".join(timeline_lines(picture(), 60, True)).isascii()
    assert set(timeline_lines(picture(), 60, True)[0]) <= set(ASCII)


def test_an_estimated_timeline_says_so():
    assert "an estimated" in " ".join(timeline_lines(replace(picture(), estimated=True), 100))


# --- SVG


def test_an_svg_is_well_formed_and_its_areas_have_the_colours_of_their_categories():
    baseline = Mark(LineKind.BASELINE, 74 * MiB, "baseline 74.0 MiB")
    root = ElementTree.fromstring(timeline_svg(picture(), "a <b> & 'c'", (baseline,)))
    fills = {polygon.get("fill") for polygon in root.iter(f"{SVG}polygon")}
    assert fills == {COLOURS[category] for category in picture().levels}
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert "a <b> & 'c'" in texts
    assert "peak 90.1 MiB" in texts
    assert "baseline 74.0 MiB" in texts


def test_the_highest_point_of_an_svg_is_the_peak():
    root = ElementTree.fromstring(timeline_svg(picture(), "t"))
    corners = [
        tuple(map(float, point.split(",")))
        for polygon in root.iter(f"{SVG}polygon")
        for point in polygon.get("points").split()
    ]
    marker = next(path.get("d") for path in root.iter(f"{SVG}path"))
    x, y = map(float, re.match(r"M([\d.]+) ([\d.]+)", marker).groups())  # type: ignore[arg-type]
    assert y == pytest.approx(min(corner[1] for corner in corners), abs=0.1)
    assert any(abs(corner[0] - x) < 0.1 and abs(corner[1] - y) < 0.1 for corner in corners)


def lines_of(shown):
    """The height of each line above the axis in bytes, by its colour, and all texts."""
    root = ElementTree.fromstring(timeline_svg(shown.picture, "t", marks_of(shown)))
    corners = [
        float(point.split(",")[1])
        for polygon in root.iter(f"{SVG}polygon")
        for point in polygon.get("points").split()
    ]
    top, bottom = min(corners), max(corners)
    per_pixel = shown.result.peak.total / (bottom - top)
    lines = [line for line in root.iter(f"{SVG}line") if line.get("stroke-dasharray")]
    assert all(44 <= float(line.get("y1")) <= bottom for line in lines)  # type: ignore[arg-type]
    heights = {n.get("stroke"): (bottom - float(n.get("y1"))) * per_pixel for n in lines}  # type: ignore[arg-type]
    return heights, [text.text for text in root.iter(f"{SVG}text")]


def test_a_limit_is_a_line_beside_the_baseline_in_an_svg():
    heights, texts = lines_of(replace(window("a", share=0.75), limits={"total": 120 * MiB}))
    assert "limit 120.0 MiB" in texts
    assert heights["#b3261e"] == pytest.approx(120 * MiB, rel=0.01)
    assert "baseline 74.1 MiB" in texts
    assert len(heights) == 2


def test_a_limit_far_above_the_peak_is_named_and_leaves_the_data_their_room():
    far = replace(window("a", Change.NEW), limits={"total": 900 * MiB, "activation": 70 * MiB})
    heights, texts = lines_of(far)
    assert heights == {}
    assert "not drawn: limit 900.0 MiB, limit on activation 70.0 MiB" in texts


def test_a_category_s_limit_is_a_line_where_nothing_else_is_in_the_picture():
    levels = {Category.ACTIVATION: (MiB, 4 * MiB, 0)}
    drawn = Picture((0, 5, 9), (0, 1, 2), 3, levels)
    one = Window(result_of(drawn), picture=drawn)
    heights, texts = lines_of(replace(one, limits={"activation": 3 * MiB}))
    assert heights["#b3261e"] == pytest.approx(3 * MiB, rel=0.01)
    assert "limit on activation 3.0 MiB" in texts


def test_labels_of_lines_that_are_close_do_not_overlap():
    shown = replace(window("a", share=0.75), limits={"total": 75 * MiB})
    root = ElementTree.fromstring(timeline_svg(shown.picture, "t", marks_of(shown)))
    places = {node.text: float(node.get("y")) for node in root.iter(f"{SVG}text")}  # type: ignore[arg-type]
    assert places["baseline 74.1 MiB"] - places["limit 75.0 MiB"] >= 15


def test_a_pause_of_the_machine_is_not_most_of_an_svg():
    paused = Picture((0, 10, 10**9), (0, 1, 2), 3, {Category.INPUT: (MiB, 2 * MiB, MiB)})
    root = ElementTree.fromstring(timeline_svg(paused, "t"))
    points = next(root.iter(f"{SVG}polygon")).get("points").split()
    corners = sorted({float(point.split(",")[0]) for point in points})
    gaps = [after - before for before, after in pairwise(corners)]
    assert len(gaps) == 3
    assert max(gaps) < 1.1 * min(gaps)
    assert "change 2" in [node.text for node in root.iter(f"{SVG}text")]


def test_a_long_title_is_cut_in_its_middle_and_whole_in_the_svg_s_title():
    name = f"tests/test_a.py::test_b[{'x' * 200}-last]"
    root = ElementTree.fromstring(timeline_svg(picture(), name))
    shown = next(root.iter(f"{SVG}text")).text
    assert len(shown) <= 100  # type: ignore[arg-type]
    assert shown.startswith("tests/test_a.py::")
    assert shown.endswith("-last]")
    assert root.findtext(f"{SVG}title") == name


def test_a_name_with_what_xml_cannot_hold_is_drawn_all_the_same():
    svg = timeline_svg(picture(), "test_a[\x00\x1b[31m-\udc80-\ufffe-é🙂]")
    texts = [node.text for node in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert "test_a[\ufffd\ufffd[31m-\ufffd-\ufffd-é🙂]" in texts


@pytest.mark.parametrize("empty", [Picture((), (), 0, {}), Picture((0,), (0,), 1, {})])
def test_an_svg_of_nothing_has_a_sentence_and_no_bare_axis(empty):
    root = ElementTree.fromstring(timeline_svg(empty, "nothing"))
    assert [node.text for node in root.iter(f"{SVG}text")] == ["nothing", "nothing was allocated"]
    assert not list(root.iter(f"{SVG}line"))
    _, said = (float(node.get("y")) for node in root.iter(f"{SVG}text"))  # type: ignore[arg-type]
    assert 44 < said < float(root.get("height")) - 44  # type: ignore[arg-type]


def test_the_legend_stands_in_the_svg_and_above_what_its_sizes_are():
    root = ElementTree.fromstring(timeline_svg(picture(), "t"))
    nodes = [(node.text, float(node.get("y"))) for node in root.iter(f"{SVG}text")]  # type: ignore[arg-type]
    legend = [y for text, y in nodes if text and text.startswith(("activation", "parameter"))]
    (said,) = (y for text, y in nodes if text == "sizes at the peak")
    assert len(legend) == 2
    assert max(legend) < said < float(root.get("height"))  # type: ignore[arg-type]


@pytest.mark.parametrize("times", [(7,), (7, 7)])
def test_a_timeline_of_one_moment_fills_its_svg(times):
    still = Picture(
        times, tuple(range(len(times))), len(times), {Category.INPUT: (MiB,) * len(times)}
    )
    root = ElementTree.fromstring(timeline_svg(still, "t"))
    points = next(root.iter(f"{SVG}polygon")).get("points").split()
    xs = [float(point.split(",")[0]) for point in points]
    assert max(xs) - min(xs) == 800
    assert [node.text for node in root.iter(f"{SVG}text")].count("change 0") == 1


def test_a_picture_of_pixels_is_refused_and_the_svg_named():
    with pytest.raises(ReportError, match=r"write x\.svg instead \[bad-report\]$"):
        kind_of(Path("deep/x.png"))


def test_each_category_has_a_colour_of_its_own():
    assert set(COLOURS) == set(Category)
    assert len(set(COLOURS.values())) == len(Category)
