"""``torchmem diff -o``: two runs on one page, or a run and its baseline."""

import json
import re
from dataclasses import replace

import pytest

from pytest_torchmem.cli.main import Exit
from pytest_torchmem.store.run_reports import RunReport, render_run
from pytest_torchmem.values.baseline import Change
from pytest_torchmem.values.contributors import Category
from pytest_torchmem.values.units import MiB
from tests.cli.files import A, baseline, results
from tests.report.page.test_page_in_browser import COUNT_PIXELS, rgb
from tests.report.sample_run import report_of, window

ACCENT = rgb("#0b5cad")


@pytest.fixture
def open_page(browser, tmp_path):
    """Returns a function that opens ``diff.html``; at the end no script may have failed."""
    pages, trouble = [], []

    def opened():
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.on("pageerror", lambda error: trouble.append(str(error)))
        pages.append(page)
        page.goto((tmp_path / "diff.html").as_uri())
        page.wait_for_selector("details.test")
        return page

    yield opened
    for page in pages:
        page.close()
    assert trouble == []


def run_of(path, **scales):
    """A results file with the timeline of each test, of which scales say how large it is."""
    tests = (
        report_of(name, window(name, Change.NOT_COMPARED, scale=scale))
        for name, scale in scales.items()
    )
    path.write_text(render_run(RunReport(tuple(tests))), encoding="utf-8")
    return str(path)


def facts(page):
    """What the rows say: status, name, and how the peak stands to before."""
    return {
        row.locator(".name").evaluate("node => node.firstChild.textContent").split("::")[-1]: (
            row.locator(".badge").inner_text(),
            row.locator(".against").inner_text().split("\n"),
        )
        for row in page.locator("details.test > summary").all()
    }


def test_each_test_of_both_runs_has_a_row_with_its_change(command, open_page, tmp_path):
    before = run_of(tmp_path / "a.json", test_x=MiB, test_y=MiB, test_gone=MiB)
    after = run_of(tmp_path / "b.json", test_x=2 * MiB, test_y=MiB, test_new=MiB)
    code, _, err = command("diff", before, after, "-o", "diff.html")
    assert code == Exit.GROWN
    assert err == "report written: diff.html\n"
    page = open_page()
    assert facts(page) == {
        "test_x": ("grown", ["+90.1 MiB (+100 %)", "grown"]),
        "test_new": ("new", [f"only in {after}"]),
        "test_gone": ("gone", [f"only in {before}"]),
        "test_y": ("same", ["same"]),
    }
    assert page.locator("details.test .up").count() == 1


def test_the_timelines_of_both_runs_are_drawn_over_each_other(command, open_page, tmp_path):
    counts = []
    for with_timeline in (True, False):
        before = run_of(tmp_path / "a.json", test_x=MiB)
        if not with_timeline:
            before = results(tmp_path / "a.json", {"tests/test_step.py::test_x": MiB})
        after = run_of(tmp_path / "b.json", test_x=2 * MiB)
        command("diff", before, after, "-o", "diff.html")
        page = open_page()
        page.wait_for_selector(".timeline canvas")
        counts.append(page.evaluate(COUNT_PIXELS, ACCENT))
        assert page.locator(".drawing .legend .lane.before").count() == with_timeline
        page.close()
    assert counts[0] > counts[1] + 500


def test_causes_stand_in_the_order_of_their_size(command, open_page, tmp_path):
    before = run_of(tmp_path / "a.json", test_x=MiB)
    after = run_of(tmp_path / "b.json", test_x=2 * MiB)
    command("diff", before, after, "-o", "diff.html")
    page = open_page()
    table = page.get_by_role("region", name="differences")
    rows = [row.split("\t") for row in table.locator("tbody tr").all_inner_texts()]
    sizes = [float(re.match(r"\+([\d.]+) MiB", row[0]).group(1)) for row in rows]
    assert sizes == sorted(sizes, reverse=True)
    assert rows[0][1] == "grown"
    assert rows[0][2].startswith("activation")
    assert "causes, the largest first" in page.locator(".tables").inner_text()


def test_a_run_can_be_held_against_its_baseline(command, open_page, tmp_path):
    before = baseline(tmp_path / "test_a.json", A)
    after = results(tmp_path / "b.json", {**A, "test_x": 30 * MiB})
    assert command("diff", before, after, "-o", "diff.html")[0] == Exit.GROWN
    page = open_page()
    assert facts(page)["test_x"] == ("grown", ["+20.0 MiB (+200 %)", "grown"])
    page.locator("details.test summary").first.click()
    # The row opens a moment after the click.
    page.get_by_text(f"{after} has no timeline of this").wait_for()
    page.get_by_role("region", name="composition").first.wait_for()


def test_what_grew_outside_the_peak_is_told(command, open_page, tmp_path):
    body = window("test_x", Change.NOT_COMPARED)
    larger = replace(
        body.result.peak.by_category,
        activation=body.result.peak.by_category[Category.ACTIVATION] + 4 * MiB,
    )
    grown = replace(
        body, result=replace(body.result, peak=replace(body.result.peak, by_category=larger))
    )
    for name, shown in (("a.json", body), ("b.json", grown)):
        run = RunReport((report_of("test_x", shown),))
        (tmp_path / name).write_text(render_run(run), encoding="utf-8")
    command("diff", tmp_path / "a.json", tmp_path / "b.json", "-o", "diff.html")
    page = open_page()
    assert page.locator(".notes").inner_text() == "+4.0 MiB in the own peak of activation"
    assert page.locator("details.test > summary .up").inner_text().startswith("activation +4.0")


def test_a_page_of_another_kind_is_refused(command, tmp_path):
    one = results(tmp_path / "a.json", A)
    code, out, err = command("diff", one, one, "-o", "diff.md")
    assert code == Exit.BAD_INPUT
    assert err.endswith("end it in .html [bad-report]\n")
    assert out == ""
    assert not (tmp_path / "diff.md").exists()


def test_the_differences_stay_what_a_program_reads(command, tmp_path):
    one = results(tmp_path / "a.json", A)
    _, out, _ = command("diff", one, one, "--format=json", "-o", "diff.html")
    assert json.loads(out)["kind"] == "torchmem-diff"
    text = (tmp_path / "diff.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    assert "<td>same</td>" in text[text.index("<noscript>") :]


def test_a_change_within_the_tolerance_is_counted_and_fits_a_phone(command, open_page, tmp_path):
    before = run_of(tmp_path / "a.json", test_x=MiB)
    after = run_of(tmp_path / "b.json", test_x=MiB + 4096, test_y=MiB)
    command("diff", before, after, "-o", "diff.html")
    page = open_page()
    assert "within tolerance 1" in page.locator(".tools .chips button").all_inner_texts()
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
