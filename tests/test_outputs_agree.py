"""One run through every output: each says the same status, the same numbers and the same counts."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_torchmem.analysis.judge.differences import compare
from pytest_torchmem.analysis.judge.verdict import judge_baseline
from pytest_torchmem.plugin.item.sending import set_properties
from pytest_torchmem.report.page.html import run_page, window_json
from pytest_torchmem.report.text.github import error_commands
from pytest_torchmem.report.text.markdown import run_markdown, step_summary
from pytest_torchmem.report.text.tables import lines_table
from pytest_torchmem.report.text.terminal import Detail, summary_lines
from pytest_torchmem.store.run_reports import RunReport, parse_run, render_run
from pytest_torchmem.values.baseline import Allowance, BaselineEntry, Change, Reference
from pytest_torchmem.values.contributors import (
    Category,
    CategoryBytes,
    Contributor,
    Phase,
    Source,
)
from pytest_torchmem.values.findings import Finding, FindingKind
from pytest_torchmem.values.measured import MeasuredTest, Window
from pytest_torchmem.values.results import Peak, Result, Retained
from pytest_torchmem.values.units import MiB
from tests import results
from tests.chromium import launched

CPU = {"device": "cpu", "torch": "2.13"}


def measured(peak_bytes: int, **changes: Any) -> Result:
    amounts = CategoryBytes(temporary=peak_bytes)
    peak = Peak(peak_bytes, 0, amounts, amounts)
    values = {"name": "", "device": "cpu", "estimated": False, **changes}
    return Result(peak=peak, retained=Retained(0, CategoryBytes()), **values)


def window(
    change: Change, before: int, after: int, failed: FindingKind | None = None, **changes: Any
) -> Window:
    result = measured(after, **changes.pop("result", {}))
    findings = (Finding(failed, "total", f"memory failed for {failed.value}"),) if failed else ()
    return Window(result, findings, change, before, key="test", **changes)


def ended(name: str, *windows: Window, outcome: str = "", **changes: Any) -> MeasuredTest:
    record = MeasuredTest(f"tests/test_a.py::test_{name}", "tests/test_a.py", CPU, windows)
    record = replace(record, **changes)
    failed = record.raised or any(w.sentence for w in windows)
    return replace(record, outcome=outcome or ("failed" if failed else "passed"), line=7)


TOTAL = {"total": 4 * MiB}
NONE = Change.NOT_COMPARED
GROWN, OVER = FindingKind.GROWN, FindingKind.OVER_LIMIT
UNTIL_THEN = Window(measured(8 * MiB))
REGION = window(Change.GROWN, MiB, 2 * MiB, GROWN, result={"name": "forward"})

#: A test, and what each output says of it: its status, its peak, how it stands.
MODEL = [
    (
        ended("grown", window(Change.GROWN, 100 * MiB, 133 * MiB, GROWN)),
        ("failed", "133.0 MiB", "grown, +33.0 MiB (+33 %)"),
    ),
    (
        ended("over", window(NONE, 0, 5 * MiB, OVER, limits=TOTAL)),
        ("failed", "5.0 MiB", "over limit"),
    ),
    (
        ended("stored_nothing", window(Change.SAME, 0, 0)),
        ("ok", "0 B", "same as baseline"),
    ),
    (
        ended("grown_from_nothing", window(Change.GROWN, 0, 4 * MiB, GROWN)),
        ("failed", "4.0 MiB", "grown, +4.0 MiB"),
    ),
    (
        ended("within", window(Change.WITHIN, 10 * MiB, 10 * MiB + 4096)),
        ("ok", "10.0 MiB", "within tolerance, +4.0 KiB"),
    ),
    (
        ended("within_elsewhere", window(Change.WITHIN, 10 * MiB, 10 * MiB)),
        ("ok", "10.0 MiB", "within tolerance, peak as before"),
    ),
    (
        ended("shrunk", window(Change.SHRUNK, 8 * MiB, 6 * MiB, limits={"total": 12 * MiB})),
        ("shrunk", "6.0 MiB", "50% of limit; shrunk, -2.0 MiB (-25 %)"),
    ),
    (ended("new", window(Change.NEW, 0, 3 * MiB)), ("new", "3.0 MiB", "new")),
    (
        ended("of_another", window(Change.SAME, MiB, MiB, reference="cpu-torch2.12")),
        ("ok", "1.0 MiB", "same as baseline, compared with cpu-torch2.12"),
    ),
    (
        ended("limit_only", window(NONE, 0, 3 * MiB, limits=TOTAL)),
        ("ok", "3.0 MiB", "75% of limit"),
    ),
    (
        ended("raised", unjudged=(UNTIL_THEN,), raised="ValueError: no"),
        ("failed", "8.0 MiB", "not compared, ended by an exception"),
    ),
    (ended("raised_without_report", raised="ValueError: no"), ("failed", "", "")),
    (
        ended("region_grown", window(Change.SAME, 5 * MiB, 5 * MiB), REGION),
        ("failed", "5.0 MiB", "same as baseline"),
    ),
    (
        ended("expected", window(Change.GROWN, MiB, 2 * MiB, GROWN), outcome="xfailed"),
        ("xfailed", "2.0 MiB", "grown, +1.0 MiB (+100 %)"),
    ),
    (ended("unseen", not_measured="no device", environment={}), ("not measured", "", "")),
]
RUN = RunReport(tuple(test for test, _ in MODEL))
SAID = {test.test: said for test, said in MODEL}
COUNTS = "6 failed, 1 not measured, 1 shrunk, 1 new, 1 xfailed, 5 ok"


def test_the_results_file_says_it():
    data = json.loads(render_run(RUN))
    assert ", ".join(f"{count} {status}" for status, count in data["counts"].items()) == COUNTS
    assert {t["test"]: t["status"] for t in data["tests"]} == {n: s for n, (s, *_) in SAID.items()}
    told = {w["status"] for t in data["tests"] for w in t["windows"]}
    raised = {"not compared, ended by an exception", ""}
    assert {standing for _, _, standing in SAID.values()} - told == raised
    again = parse_run(data, "run.json")
    assert again.headline == COUNTS
    assert [(t.status, t.standing) for t in again.tests] == [(s, a) for s, _, a in SAID.values()]


def test_the_terminal_says_it():
    lines = [line.text for line in summary_lines(RUN, Detail.ALL, 200)]
    closing = next(line for line in lines if line.startswith("memory: "))
    assert re.sub(r" \(.*?\)", "", closing) == f"memory: {COUNTS}"
    for test in RUN.tests:
        _, peak, standing = SAID[test.test]
        if test.body:
            name = f"{test.test} "
            (row,) = (line for line in lines if line.startswith(name))
            assert row.removeprefix(name).strip().startswith(f"{peak} ")
            assert row.endswith(f"  {standing}")


@pytest.mark.parametrize("markdown", [run_markdown, step_summary])
def test_markdown_and_the_summary_of_a_job_say_it(markdown):
    text = markdown(RUN)
    assert f"### Memory: {COUNTS}\n" in text
    lines = [line for line in text.splitlines() if line.startswith("| ") and "test_a.py" in line]
    rows = [re.split(r" ?\| ?", line) for line in lines]
    assert {row[2].split("`")[1] for row in rows} == set(SAID)
    for _, status, name, peak, against, *_ in rows:
        said = SAID[name.split("`")[1]]
        assert (status.partition(" ")[2], peak) == said[:2]
        assert not peak or against.startswith(said[2])


def test_the_page_says_it():
    found = re.search(r'id="torchmem-run">(.*?)</script>', run_page(RUN))
    assert found
    page = json.loads(found.group(1))
    assert ", ".join(f"{count} {status}" for status, count in page["counts"].items()) == COUNTS
    assert {row["name"]: row["status"] for row in page["tests"]} == {
        name: status for name, (status, *_) in SAID.items()
    }


@pytest.mark.browser
def test_the_page_says_it_in_a_browser(tmp_path):
    path = tmp_path / "run.html"
    path.write_text(run_page(RUN), encoding="utf-8")
    with launched() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(path.as_uri())
        chips = page.locator(".chips button").all_inner_texts()
        assert chips == [
            f"{part.partition(' ')[2]} {part.partition(' ')[0]}" for part in COUNTS.split(", ")
        ]
        width = "document.documentElement.scrollWidth"
        assert page.evaluate(width) <= 1280
        for row in page.locator("details.test > summary").all():
            cells = [cell.inner_text() for cell in row.locator("> *").all()]
            status, peak, standing = SAID[cells[1].partition("\n")[0]]
            assert cells[0] == status
            shown = set(re.split(r"[\n;,] ?", cells[4]))
            assert shown == set(re.split(r"[;,] ?", standing)), cells
            size = re.fullmatch(r"(at most )?(.*)", peak)
            assert size
            assert (size.group(2) or "-") in cells[3]
            assert ("at most" in cells[3]) == bool(size.group(1))
        page.set_viewport_size({"width": 390, "height": 844})
        assert page.evaluate(width) <= 390


def test_junit_says_it():
    for test in RUN.tests:
        item: Any = SimpleNamespace(user_properties=[])
        set_properties(item, test)
        told = dict(item.user_properties)
        assert told.get("torchmem_raised", "") == test.raised
        for measured_window in test.windows:
            name = measured_window.result.name
            start = f"torchmem_{name}_" if name else "torchmem_"
            assert told[f"{start}peak_bytes"] == measured_window.result.peak.total
            assert (f"{start}baseline_bytes" in told) == measured_window.is_compared
        if test.windows:
            assert told["torchmem_status"] == SAID[test.test][2]


def test_github_s_annotations_are_of_the_tests_that_failed_over_memory():
    told = [line.rpartition("::")[0].rpartition("test_")[2] for line in error_commands(RUN)]
    over_memory = ["over", "grown", "grown_from_nothing", "region_grown"]
    assert sorted(told) == sorted(over_memory)


def grown_by_lines() -> tuple[Window, BaselineEntry]:
    """A window that grew by 9 MiB: three lines made more, of one in two categories, one less."""

    def made(size: int, line: int, category: str = "activation") -> Contributor:
        source = Source("net.py", line, "forward")
        return Contributor(
            Category(category), size * MiB, 1, f"aten::op{line}", "net", source, Phase.FORWARD
        )

    before = results.result(made(10, 3), made(5, 9, "temporary"))
    after = results.result(
        made(16, 3), made(2, 3, "gradient"), made(1, 9, "temporary"), made(4, 20), made(1, 30)
    )
    entry = BaselineEntry.of(before)
    judged = judge_baseline(after, Reference.of(entry), Allowance(0, 0))
    return replace(judged, key="test", baseline=entry), entry


def test_the_rows_of_what_grew_add_up_to_the_growth_in_all_outputs() -> None:
    shown, entry = grown_by_lines()
    expected = [8, 4, 1, -4]
    assert sum(expected) * MiB == shown.result.peak.total - entry.total

    def told(text: str) -> list[int]:
        return [int(float(size)) for size in re.findall(r"^\|? *([+-][\d.]+) MiB", text, re.M)]

    test = ended("grown", shown)
    read = parse_run(json.loads(render_run(RunReport((test,)))), "out.json").tests[0].windows[0]
    page: Any = window_json(shown, False)["differences"]
    compared = compare(entry, BaselineEntry.whole(shown.result), Allowance(0, 0))
    assert {
        "verdict": [line.size_bytes // MiB for line in shown.lines],
        "results file": [line.size_bytes // MiB for line in read.lines],
        "terminal": told("\n".join(lines_table(shown.lines, shown.told_by))),
        "Markdown": told(run_markdown(RunReport((test,)))),
        "page": [row[0] // MiB for row in page],
        "torchmem diff": [line.size_bytes // MiB for line in compared.lines],
    } == dict.fromkeys(
        ("verdict", "results file", "terminal", "Markdown", "page", "torchmem diff"), expected
    )
