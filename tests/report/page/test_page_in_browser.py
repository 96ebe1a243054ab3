"""The HTML report in a real browser: drawn, hovered, filtered, by mouse, finger and keyboard."""

from dataclasses import replace

import pytest

from pytest_torchmem.report.page.html import picture_page, run_page
from pytest_torchmem.report.page.svg import COLOURS
from pytest_torchmem.store.run_reports import RunReport
from pytest_torchmem.values.baseline import Change
from pytest_torchmem.values.contributors import Category
from pytest_torchmem.values.measured import Window
from pytest_torchmem.values.picture import Picture, Track
from pytest_torchmem.values.results import Counters, Fate, Holder
from pytest_torchmem.values.units import GiB, KiB, MiB, format_size
from tests.report.sample_run import made, picture, report_of, result_of, sample_run, window
from tests.results import failed

FAILED = "tests/test_step.py::test_train[bf16]"

COUNT_PIXELS = """([r, g, b]) => {
  const canvas = document.querySelector(".timeline canvas");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let count = 0;
  for (let i = 0; i < data.length; i += 4) {
    const near = Math.abs(data[i] - r) + Math.abs(data[i + 1] - g) + Math.abs(data[i + 2] - b);
    if (near < 12 && data[i + 3] > 250) count += 1;
  }
  return count;
}"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(run_page(sample_run()), encoding="utf-8")
    return path


@pytest.fixture
def opened(browser, file):
    """Returns a function that opens the report; at the end there must have been no trouble."""
    trouble, pages = [], []

    def open_page(part="", **context):
        context.setdefault("viewport", {"width": 1280, "height": 900})
        page = browser.new_page(**context)
        pages.append(page)
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("dialog", lambda dialog: trouble.append(dialog.message))
        page.on("console", lambda line: trouble.append(line.text) if line.type == "error" else None)
        page.on("request", lambda r: trouble.append(r.url) if r.url[:5] != "file:" else None)
        page.goto(f"{file.as_uri()}{part}")
        return page

    yield open_page
    for page in pages:
        page.close()
    assert trouble == []


@pytest.fixture
def chart(opened):
    """The report with its failed test open and drawn."""
    page = opened()
    page.locator("details.test summary").first.click()
    page.wait_for_selector(".timeline canvas")
    return page


def rgb(colour):
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def readout(page):
    return page.locator(".readout").first.inner_text()


def shown(page):
    """The names of the tests in the list, whether or not the browser has drawn them yet."""
    return page.evaluate(
        "[...document.querySelectorAll('details.test:not([hidden]) .name')]"
        ".map((node) => node.firstChild.textContent)"
    )


def test_each_category_is_drawn_in_its_colour(chart):
    for category in picture().levels:
        assert chart.evaluate(COUNT_PIXELS, rgb(COLOURS[category])) > 4, category


def test_the_baseline_is_a_line_where_there_is_one(opened, chart):
    accent = rgb("#0b5cad")
    assert chart.evaluate(COUNT_PIXELS, accent) > 200
    page = opened("#test=tests/test_step.py::test_new")
    page.wait_for_selector(".timeline canvas")
    assert page.evaluate(COUNT_PIXELS, accent) == 0


def test_a_limit_far_above_the_data_is_named_and_leaves_them_their_room(browser, tmp_path):
    counts = []
    for limit_bytes in (100 * MiB, 4 * GiB):
        shown = replace(window("test_x", Change.NEW), limits={"total": limit_bytes})
        page = alone(browser, tmp_path, shown)
        page.wait_for_selector(".timeline canvas")
        counts.append(page.evaluate(COUNT_PIXELS, rgb(COLOURS[Category.ACTIVATION])))
        named = page.get_by_text("not drawn: limit 4.0 GiB").count()
        assert named == (limit_bytes == 4 * GiB)
        page.close()
    assert counts[1] > 0.9 * counts[0] > 1000


def test_sizes_read_as_they_do_on_the_terminal(opened):
    near = [unit + part for unit in (1, KiB, MiB, GiB) for part in (-1, 0, 1, 51, 512, 51 * KiB)]
    sizes = [0, 131_328, 264_448, -131_328, *near, *(number * 256 for number in range(2000))]
    texts = opened().evaluate("(sizes) => sizes.map(torchmemUnits.size)", sizes)
    assert texts == [format_size(size) for size in sizes]


def drawn(browser, tmp_path, picture):
    path = tmp_path / "drawn.html"
    result = result_of(picture, "GPT (estimated)" if picture.estimated else "part")
    body = Window(result, picture=picture)
    path.write_text(run_page(RunReport((report_of("test_a", body),))), encoding="utf-8")
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(path.as_uri())
    page.wait_for_selector(".timeline canvas")
    return page


SPIKE = Picture(
    times_ns=(0, 1, 2500, 2501, 5000),
    rows=(0, 1, 5000, 5001, 10_000),
    change_count=10_001,
    levels={
        Category.PARAMETER: (MiB,) * 5,
        Category.TEMPORARY: (0, 0, 3 * MiB, 0, 0),
    },
    tracks=(Track(made(3 * MiB, Category.TEMPORARY), (0, 0, 3 * MiB, 0, 0)),),
    estimated=True,
)


def test_an_estimate_is_drawn_over_the_nodes_of_its_graph(browser, tmp_path):
    page = drawn(browser, tmp_path, SPIKE)
    text = readout(page)
    assert "the peak, at node 2,500 of 5,000" in text
    assert "estimated 4.0 MiB" in text
    assert "layers.*.mlp (net.py:41)\n3.0 MiB" in text
    page.keyboard.press("Tab")
    page.get_by_role("slider").press("End")
    assert "at node 5,000 of 5,000" in readout(page)
    page.close()


def test_whatever_is_estimated_says_so(browser, tmp_path):
    page = drawn(browser, tmp_path, SPIKE)
    number = page.locator("summary .number").first
    assert number.inner_text().split() == ["4.0", "MiB", "estimated"]
    box, beside = number.bounding_box(), page.locator("summary .against").bounding_box()
    assert box["x"] + box["width"] <= beside["x"]
    assert number.evaluate("node => node.scrollWidth <= node.clientWidth")
    title = page.locator(".window .title").inner_text()
    assert title.startswith("GPT (estimated)")
    assert "estimated peak 4.0 MiB" in title
    assert "retained an estimated 1.0 MiB" in title
    headings = page.locator(".window h3").all_inner_texts()
    assert len(headings) == 3
    assert all(heading.endswith(", estimated") for heading in headings)
    page.close()


def test_a_peak_that_is_narrower_than_a_pixel_is_drawn(browser, tmp_path):
    page = drawn(browser, tmp_path, SPIKE)
    assert page.evaluate(COUNT_PIXELS, rgb(COLOURS[Category.TEMPORARY])) > 100
    page.close()


def alone(browser, tmp_path, shown):
    """Returns the page of a run of one test, opened there."""
    path = tmp_path / "one.html"
    one = report_of("test_a.py::test_x", shown, outcome="failed")
    path.write_text(run_page(RunReport((one,))), encoding="utf-8")
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto(f"{path.as_uri()}#test=test_a.py::test_x")
    page.wait_for_selector("details.test[open] .window")
    return page


def test_a_body_without_a_footprint_has_a_sentence_and_no_bare_axis(browser, tmp_path):
    nothing = replace(
        window("test_x", Change.NOT_COMPARED, "the body used no memory", 0),
        picture=Picture((0,), (0,), 1, {}),
    )
    page = alone(browser, tmp_path, nothing)
    assert page.locator(".timeline").count() == 0
    page.get_by_text("There is no timeline: the body allocated nothing").wait_for()
    page.close()


def test_each_sentence_stands_apart_and_holders_are_told(browser, tmp_path):
    shown = window("test_x", Change.NOT_COMPARED, "one")
    held = (
        Holder(3 * MiB, 2, Fate.HELD, "net.CACHE[*]"),
        Holder(MiB, 1, Fate.FREED_LATER, "loss in test_x"),
    )
    result = replace(
        shown.result,
        retained=replace(shown.result.retained, holders=held),
        grown=shown.result.peak.live[:1],
    )
    page = alone(browser, tmp_path, replace(shown, result=result, findings=failed("one", "two")))
    first, second = (page.locator(".sentences li").nth(n).bounding_box() for n in (0, 1))
    assert second["y"] - (first["y"] + first["height"]) >= 4
    rows = page.get_by_role("region", name="holders").locator("tbody tr").all_inner_texts()
    assert [row.split("\t") for row in rows] == [
        ["3.0 MiB", "2", "still held by net.CACHE[*]"],
        ["1.0 MiB", "1", "held at its end by loss in test_x, freed later"],
    ]
    page.get_by_role("heading", name="what held it").wait_for()
    page.get_by_role("region", name="made by the steps").wait_for()
    page.close()


def test_a_region_in_which_nothing_changed_is_drawn(browser, tmp_path):
    still = Picture((7,), (0,), 1, {Category.INPUT: (MiB,)})
    page = drawn(browser, tmp_path, still)
    assert page.evaluate(COUNT_PIXELS, rgb(COLOURS[Category.INPUT])) > 10_000
    assert "the peak" in readout(page)
    page.close()


def test_at_first_the_peak_is_told(chart):
    assert "the peak, at 25.5 ms, change 357 of 839, in region step <1>, backward pass" in readout(
        chart
    )
    assert "90.1 MiB" in readout(chart)


def test_hovering_tells_what_is_live_then(chart):
    area = chart.locator(".over").first
    box = area.bounding_box()
    chart.mouse.move(box["x"] + box["width"] - 4, box["y"] + 60)
    text = readout(chart)
    assert "in region step <1>" in text or "change 833" in text
    assert "optimizer state\n40.0 MiB" in text
    assert "aten::mm in model.head (net.py:41)\n20.0 MiB" in text
    chart.mouse.move(box["x"] + 2, box["y"] + 60)
    assert "optimizer state" not in readout(chart)


def test_the_timeline_can_be_read_by_keyboard_alone(chart):
    slider = chart.get_by_role("slider").first
    for _ in range(40):
        chart.keyboard.press("Tab")
        if slider.evaluate("node => node === document.activeElement"):
            break
    else:
        raise AssertionError("the timeline cannot be reached by Tab")
    now = int(slider.get_attribute("aria-valuenow"))
    chart.keyboard.press("ArrowRight")
    assert int(slider.get_attribute("aria-valuenow")) == now + 1
    chart.keyboard.press("Home")
    assert slider.get_attribute("aria-valuenow") == "0"
    assert "parameter 20.0 MiB" in slider.get_attribute("aria-valuetext")
    chart.keyboard.press("ArrowLeft")
    assert slider.get_attribute("aria-valuenow") == "0"
    chart.keyboard.press("End")
    assert slider.get_attribute("aria-valuenow") == slider.get_attribute("aria-valuemax")
    assert "change 833 of 839" in readout(chart)
    chart.keyboard.press("p")
    assert int(slider.get_attribute("aria-valuenow")) == now
    assert "the peak" in readout(chart)


def test_a_test_opens_by_keyboard(opened):
    page = opened()
    page.locator("details.test summary").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector(".timeline canvas")


def test_dragging_zooms_and_a_button_goes_back(chart):
    box = chart.locator(".over").first.bounding_box()
    before = chart.evaluate(COUNT_PIXELS, rgb(COLOURS[next(iter(picture().levels))]))
    chart.mouse.move(box["x"] + 20, box["y"] + 100)
    chart.mouse.down()
    chart.mouse.move(box["x"] + 220, box["y"] + 100, steps=4)
    chart.mouse.up()
    chart.wait_for_timeout(100)
    orange = rgb("#009E73")
    assert chart.evaluate(COUNT_PIXELS, orange) == 0  # the optimizer's state comes later
    chart.get_by_role("button", name="whole range").first.click()
    chart.wait_for_timeout(100)
    assert chart.evaluate(COUNT_PIXELS, orange) > 20
    assert before > 20


def test_the_axis_can_be_time(chart):
    button = chart.get_by_role("button", name="by time").first
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    by_change = chart.get_by_role("button", name="by change").first
    assert by_change.get_attribute("aria-pressed") == "false"
    assert chart.locator(".timeline").count() == 1
    chart.wait_for_timeout(100)
    assert "the peak" in readout(chart)  # the moment stays


def test_search_status_and_device_filter_the_tests(opened):
    page = opened()
    assert len(shown(page)) == 7
    page.get_by_role("searchbox").fill("train")
    assert len(shown(page)) == 1
    assert page.get_by_role("status").inner_text() == "1 of 7 tests"
    page.get_by_role("searchbox").fill("")
    page.get_by_role("button", name="shrunk").click()
    assert [name.split("::")[1] for name in shown(page)] == ["test_eval"]
    page.get_by_role("button", name="shrunk").click()
    page.get_by_label("device").select_option("cuda:0")
    assert [name.split("::")[1] for name in shown(page)] == ["test_gpu"]


def test_tests_can_be_sorted(opened):
    page = opened()
    page.get_by_label("sort by").select_option("peak, largest first")
    assert "test_gpu" in shown(page)[0]
    page.get_by_label("sort by").select_option("name")
    assert shown(page) == sorted(shown(page))


def test_a_link_opens_its_test(opened):
    page = opened(f"#test={FAILED}")
    page.wait_for_selector("details.test[open] .timeline canvas")
    assert FAILED in page.locator("details.test[open] .name").inner_text()


def test_a_page_of_one_test_is_open_and_has_nothing_to_choose(browser, tmp_path):
    path = tmp_path / "one.html"
    run = sample_run()
    path.write_text(run_page(replace(run, tests=run.tests[:1])), encoding="utf-8")
    page = browser.new_page()
    page.goto(path.as_uri())
    page.wait_for_selector("details.test[open] .timeline canvas")
    assert page.get_by_role("searchbox").count() == 0
    page.close()


def test_counters_of_a_simulated_allocator_are_called_estimated(browser, tmp_path):
    body = window("a")
    counters = Counters(1 << 20, 2 << 20, 3 << 20, 4 << 20, estimated=True)
    body = replace(body, result=replace(body.result, counters=counters))
    path = tmp_path / "counters.html"
    path.write_text(run_page(RunReport((report_of("a", body),))), encoding="utf-8")
    page = browser.new_page()
    page.goto(path.as_uri())
    page.wait_for_selector(".timeline canvas")
    text = page.locator(".window .title").inner_text()
    page.close()
    assert "estimated reserved 4.0 MiB" in text
    assert "true" not in text


def test_a_row_says_how_a_test_stands_to_its_baseline_and_to_its_limit(opened):
    page = opened()
    rows = page.locator("details.test summary").all()
    told = {row.locator(".name").inner_text(): row.locator(".against") for row in rows}
    told = {name.split("::")[1].split()[0]: cell.inner_text() for name, cell in told.items()}
    assert told["test_train[bf16]"].split("\n") == [
        "+16.0 MiB (+22 %)",
        "grown",
        "75% of limit",
    ]
    assert told["test_new"].split("\n") == ["new", "75% of limit"]
    assert told["test_unseen"] == ""


def test_notes_are_shown(opened):
    page = opened("#test=tests/test_step.py::test_plain")
    page.wait_for_selector(".notes")
    assert page.locator(".notes").inner_text() == "seen late"


def test_tables_name_differences_operators_and_what_is_live(chart):
    text = chart.locator("details.test[open]").inner_text()
    for heading in (
        "differences against the baseline",
        "composition",
        "what ran at the peak",
        "operators that allocated",
        "live at the peak",
        "retained at the end",
    ):
        assert heading in text
    row = chart.get_by_role("region", name="differences").locator("tbody tr").first.inner_text()
    assert row.split("\t")[:3] == ["+7.8 MiB", "grown", "activation"]
    ran = chart.get_by_role("region", name="what ran at the peak").locator("tbody tr")
    assert ran.first.inner_text().split("\t") == ["attention", "12.0 ms"]


def test_a_name_is_text_and_never_markup(opened):
    page = opened()
    name = "tests/test_step.py::test_<script>alert('x')</script>&amp;"
    assert name in shown(page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_system_s_colours_are_followed(opened, scheme):
    page = opened(color_scheme=scheme)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") == (scheme == "light")
    page.get_by_role("button", name="colours").click()
    page.get_by_role("button", name="colours: light").click()
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground != "rgb(255, 255, 255)"


def test_a_phone_needs_no_sideways_scrolling(opened):
    page = opened(f"#test={FAILED}", viewport={"width": 360, "height": 740})
    page.wait_for_selector(".timeline canvas")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.locator(".timeline").first.bounding_box()["width"] <= 360


def test_a_finger_moves_the_cursor(opened):
    page = opened(
        f"#test={FAILED}", viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True
    )
    page.wait_for_selector(".timeline canvas")
    over = page.locator(".over").first
    over.scroll_into_view_if_needed()
    box = over.bounding_box()
    page.touchscreen.tap(box["x"] + box["width"] - 6, box["y"] + 40)
    page.wait_for_timeout(100)
    assert "optimizer state\n40.0 MiB" in readout(page)


def test_a_timeline_alone_is_drawn(browser, tmp_path):
    path = tmp_path / "timeline.html"
    path.write_text(picture_page(picture(), "cuda:0"), encoding="utf-8")
    page = browser.new_page()
    page.goto(path.as_uri())
    page.wait_for_selector(".timeline canvas")
    assert page.evaluate(COUNT_PIXELS, rgb("#D55E00")) > 500
    page.close()
