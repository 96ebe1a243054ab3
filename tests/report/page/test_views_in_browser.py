"""Blocks, modules, steps and the list in a real browser: what is told, and what stands alone."""

from dataclasses import replace

import pytest

from pytest_torchmem.analysis.sampling import sketch
from pytest_torchmem.report.page.html import picture_page, run_page
from pytest_torchmem.report.page.svg import COLOURS
from pytest_torchmem.store.run_reports import RunReport
from pytest_torchmem.values.baseline import Change
from pytest_torchmem.values.contributors import Category, Contributor, Phase, Source
from pytest_torchmem.values.measured import Window
from pytest_torchmem.values.picture import Blocks, Picture, Span, StorageBlock
from pytest_torchmem.values.units import KiB, MiB, format_size
from tests.report.page.test_page_in_browser import COUNT_PIXELS, rgb
from tests.report.sample_run import report_of, result_of, sample_run, window

ROWS = 100


def who(category, module):
    return Contributor(category, 0, 0, "aten::mm", module, Source("net.py", 4, "f"), Phase.FORWARD)


def drawn():
    """A parameter for the whole time, an activation for a part of it, and small ones."""
    calls = (Source("net.py", 41, "forward"), Source("test_net.py", 7, "test_net"))
    return Picture(
        times_ns=tuple(range(ROWS)),
        rows=tuple(range(ROWS)),
        change_count=ROWS,
        levels={
            Category.PARAMETER: (4 * MiB,) * ROWS,
            Category.ACTIVATION: tuple(
                8 * MiB if 20 <= n < 60 else KiB if n < 80 else 0 for n in range(ROWS)
            ),
        },
        blocks=Blocks(
            blocks=(StorageBlock(0, ROWS, 4 * MiB, 0), StorageBlock(20, 60, 8 * MiB - KiB, 1, 1)),
            who=(who(Category.PARAMETER, "net.head"), who(Category.ACTIVATION, "net.body")),
            stacks=((-1, 1), (0, 0)),
            frames=calls,
            rest=tuple(KiB if n < 80 else 0 for n in range(ROWS)),
            count=50,
        ),
    )


@pytest.fixture
def open_page(browser, tmp_path):
    """Returns a function that opens a page; at the end no script may have failed."""
    pages, trouble = [], []

    def opened(text, part="", **context):
        path = tmp_path / "page.html"
        path.write_text(text, encoding="utf-8")
        page = browser.new_page(viewport={"width": 1280, "height": 900}, **context)
        page.on("pageerror", lambda error: trouble.append(str(error)))
        pages.append(page)
        page.goto(path.as_uri() + part)
        page.wait_for_timeout(150)
        return page

    yield opened
    for page in pages:
        page.close()
    assert trouble == []


@pytest.fixture
def blocks(open_page):
    page = open_page(picture_page(drawn(), "cpu"))
    view(page, "blocks")
    return page


def view(page, name):
    page.get_by_role("group", name="view").get_by_role("button", name=name).click()
    page.wait_for_timeout(80)


def point(page, share, height):
    """Moves the pointer to a share of the time, and of the height of the frame from below."""
    box = page.locator(".over").bounding_box()
    page.mouse.move(box["x"] + share * box["width"], box["y"] + (1 - height) * box["height"])
    page.wait_for_timeout(60)


def readout(page):
    return page.locator(".readout").first.inner_text()


def coloured(page, category):
    return page.evaluate(COUNT_PIXELS, rgb(COLOURS[category]))


# --- blocks


def test_a_block_tells_its_life_and_its_python_calls(blocks):
    point(blocks, 0.4, 0.6)
    text = readout(blocks)
    assert "made at change 20, gone at change 60" in text
    assert "net.body" in text
    calls = blocks.locator(".calls li").all_inner_texts()
    assert calls == ["forward net.py:41", "test_net test_net.py:7"]


def test_a_block_without_calls_tells_its_line(blocks):
    point(blocks, 0.4, 0.1)
    assert "there at the start, alive at the end" in readout(blocks)
    assert "net.py:4" in readout(blocks)
    assert blocks.locator(".calls").count() == 0


def test_blocks_that_are_left_out_are_counted_and_their_bytes_named(blocks):
    assert "largest of 50 allocations" in readout(blocks)
    assert "other 48 are the grey layer on top, 1.0 KiB at most" in readout(blocks)


def test_a_click_keeps_a_block_while_the_pointer_goes_on(blocks):
    point(blocks, 0.4, 0.6)
    box = blocks.locator(".over").bounding_box()
    blocks.mouse.click(box["x"] + 0.4 * box["width"], box["y"] + 0.4 * box["height"])
    point(blocks, 0.4, 0.1)
    assert "gone at change 60" in readout(blocks)
    blocks.get_by_role("slider").focus()
    blocks.keyboard.press("Escape")
    point(blocks, 0.4, 0.1)
    assert "alive at the end" in readout(blocks)


def test_blocks_are_read_by_keyboard_in_the_order_they_were_made(blocks):
    slider = blocks.get_by_role("slider", name="allocations over time, one by one")
    slider.focus()
    blocks.keyboard.press("ArrowRight")
    assert slider.get_attribute("aria-valuetext").startswith("4.0 MiB of parameter")
    blocks.keyboard.press("ArrowRight")
    assert slider.get_attribute("aria-valuenow") == "1"
    assert "activation, aten::mm in net.body" in slider.get_attribute("aria-valuetext")


def test_a_category_stands_alone_by_a_click_on_the_legend_and_comes_back_by_another(blocks):
    assert coloured(blocks, Category.PARAMETER) > 1000
    key = blocks.locator(".legend").get_by_role("button", name="activation")
    for alone in (True, False):
        key.click()
        blocks.wait_for_timeout(60)
        assert key.get_attribute("aria-pressed") == str(alone).lower()
        assert (coloured(blocks, Category.PARAMETER) == 0) == alone
        assert coloured(blocks, Category.ACTIVATION) > 1000
    view(blocks, "categories")
    key.click()
    blocks.wait_for_timeout(60)
    assert coloured(blocks, Category.PARAMETER) == 0


def test_a_module_stands_alone_by_a_click_on_its_block(blocks):
    point(blocks, 0.4, 0.1)
    box = blocks.locator(".over").bounding_box()
    blocks.mouse.click(box["x"] + 0.4 * box["width"], box["y"] + 0.9 * box["height"])
    blocks.get_by_role("button", name="only this module").click()
    blocks.wait_for_timeout(60)
    assert coloured(blocks, Category.ACTIVATION) == 0
    assert coloured(blocks, Category.PARAMETER) > 1000
    blocks.get_by_role("button", name="only net.head").click()
    blocks.wait_for_timeout(60)
    assert coloured(blocks, Category.ACTIVATION) > 1000


def test_a_thousand_blocks_are_drawn_with_few_points(open_page):
    count = 1000
    lives = tuple(StorageBlock(n, 2 * count - n, KiB, 0) for n in range(count))
    crossing = tuple(StorageBlock(n, n + count, KiB, 0) for n in range(count))
    for some in (lives, crossing):
        many = Blocks(some, (who(Category.INPUT, ""),), rest=(0,), count=100_000)
        levels = {Category.INPUT: (count * KiB,)}
        page = open_page(picture_page(Picture((0,), (0,), 2 * count, levels, blocks=many), "cpu"))
        page.evaluate("""() => {
          window.points = 0;
          const lineTo = Path2D.prototype.lineTo;
          Path2D.prototype.lineTo = function (...place) {
            window.points += 1;
            lineTo.apply(this, place);
          };
        }""")
        view(page, "blocks")
        assert 1000 < page.evaluate("points") < 4 * 2 * 1280 * count
        assert coloured(page, Category.INPUT) > 1000
        page.close()


def test_pointing_at_a_block_draws_no_other_again(blocks):
    blocks.evaluate("""() => {
      window.fills = 0;
      const fill = CanvasRenderingContext2D.prototype.fill;
      CanvasRenderingContext2D.prototype.fill = function (...path) {
        window.fills += 1;
        fill.apply(this, path);
      };
    }""")
    point(blocks, 0.4, 0.6)
    point(blocks, 0.4, 0.1)
    assert blocks.evaluate("fills") == 0
    blocks.get_by_role("slider").press("+")
    blocks.wait_for_timeout(60)
    assert blocks.evaluate("fills") == 2


def test_what_was_recorded_is_drawn_with_the_calls_of_the_body(open_page, profile):
    picture = sketch(profile)
    page = open_page(picture_page(picture, "cpu"))
    view(page, "blocks")
    page.get_by_role("slider").focus()
    page.keyboard.press("p")
    largest = max(block.size_bytes for block in picture.blocks.blocks)
    assert format_size(largest) in readout(page)
    assert any("train_two_steps" in text for text in page.locator(".calls li").all_inner_texts())


# --- steps


def test_steps_are_drawn_with_what_each_left_alive(open_page):
    spans = tuple(Span("step", "", at, at) for at in (30, 60, 90))
    picture = replace(drawn(), spans=spans)
    result = result_of(picture, steps=(MiB, MiB, MiB + 4))
    page = open_page(
        run_page(RunReport((report_of("test_a", Window(result, picture=picture)),))),
    )
    rows = page.get_by_role("region", name="steps").locator("tbody tr").all_inner_texts()
    assert [row.split("\t")[:3] for row in rows] == [
        ["step 1", "1.0 MiB", ""],
        ["step 2", "1.0 MiB", "+0 B"],
        ["step 3", "1.0 MiB", "+4 B"],
    ]
    over = page.locator(".over").first
    box = over.bounding_box()
    told = []
    for part in (0.2, 0.8):
        page.mouse.move(box["x"] + part * box["width"], box["y"] + 8)
        page.wait_for_timeout(60)
        told.append(over.get_attribute("title"))
    assert told == ["step 1, and what came before it", "step 3: +4 B"]


# --- the list


def rows_of(page):
    cells = page.locator("details.test > summary").all()
    return {
        cell.locator(".name").evaluate("node => node.firstChild.textContent"): cell
        for cell in cells
    }


def listed(open_page, *reports):
    return rows_of(open_page(run_page(RunReport(tuple(reports)))))


def test_a_search_without_hits_says_so_and_leads_back(open_page):
    page = open_page(run_page(sample_run()))
    page.get_by_role("searchbox").fill("nothing like it")
    page.get_by_text("No test matches.").wait_for()
    page.get_by_role("button", name="show all").click()
    assert not page.get_by_text("No test matches.").is_visible()
    assert page.get_by_role("status").inner_text() == "7 tests"


def test_the_list_names_its_colours(open_page):
    page = open_page(run_page(sample_run()))
    legend = page.locator(".legend.list").inner_text()
    assert "optimizer state" not in legend  # none is live at a peak
    for name in ("parameter", "gradient", "activation", "temporary"):
        assert name in legend


def test_bars_have_one_scale(open_page):
    page = open_page(run_page(sample_run()))
    widths = {
        name.split("::")[1].split("[")[0]: row.locator(".bar").bounding_box()["width"]
        for name, row in rows_of(page).items()
    }
    assert widths["test_gpu"] / widths["test_eval"] == pytest.approx(4, rel=0.05)
    assert widths["test_unseen"] < 4


def test_what_is_within_the_tolerance_is_not_red_and_says_so(open_page):
    rows = listed(
        open_page,
        report_of("test_a", window("test_a", Change.WITHIN, share=0.99)),
        report_of("test_b", window("test_b", Change.GROWN, "grown", share=0.75), outcome="failed"),
    )
    kinds = {name.rpartition("_")[2]: row.locator(".against") for name, row in rows.items()}
    assert "within tolerance" in kinds["a"].inner_text()
    assert kinds["a"].locator(".up").count() == 0
    assert kinds["b"].locator(".up").count() == 1
    assert "(+22 %)" in kinds["b"].inner_text()


def test_a_baseline_of_nothing_is_a_baseline(open_page):
    body = window("test_a", Change.SAME)
    nothing = replace(
        body,
        result=result_of(Picture((0,), (0,), 1, {Category.INPUT: (0,)})),
        limits={},
        baseline_bytes=0,
    )
    rows = listed(open_page, report_of("test_a", nothing))
    assert [row.locator(".against").inner_text() for row in rows.values()] == ["same as baseline"]


def test_a_test_that_raised_was_not_compared(open_page):
    body = Window(result_of(drawn()))
    report = report_of("test_a", outcome="failed", unjudged=(body,), raised="ValueError: x")
    rows = listed(open_page, report)
    assert [row.locator(".against").inner_text() for row in rows.values()] == [
        "not compared, ended by an exception"
    ]


def test_the_legend_names_lanes_where_they_are_drawn(open_page):
    page = open_page(picture_page(replace(drawn(), spans=(Span("region", "fit", 0, 50),)), "x"))
    lanes = page.locator(".legend .of-lane")
    lanes.first.wait_for()
    view(page, "blocks")
    assert not lanes.first.is_visible()


# --- paper


def test_on_paper_colours_stay_and_the_ground_is_light(open_page):
    page = open_page(run_page(sample_run()), color_scheme="dark")
    page.locator("details.test summary").first.click()
    page.wait_for_selector(".timeline canvas")
    page.emulate_media(media="print", color_scheme="dark")
    page.wait_for_timeout(100)
    style = "getComputedStyle(document.querySelector('{}')).{}"
    assert page.evaluate(style.format("body", "backgroundColor")) == "rgb(255, 255, 255)"
    assert page.evaluate(style.format(".swatch", "printColorAdjust")) == "exact"
    assert page.evaluate(style.format(".bar i", "printColorAdjust")) == "exact"
    page.locator(".drawing .legend").first.wait_for()
    assert page.evaluate(COUNT_PIXELS, rgb("#1b2128")) > 20  # the peak's label, in the ink of day


def test_every_row_is_drawn_without_being_scrolled_to(open_page):
    many = tuple(report_of(f"test_{n:03}", window(f"t{n}")) for n in range(60))
    page = open_page(run_page(RunReport(many)))
    last = page.locator("details.test").last
    assert last.evaluate("node => node.checkVisibility({contentVisibilityAuto: true})")
