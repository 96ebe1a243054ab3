"""The HTML report for everyone: contrast, tables without a mouse or without room, motion."""

import re
from dataclasses import replace
from importlib import resources

import pytest
from test_page_in_browser import COUNT_PIXELS

from pytest_torchmem.report.page.html import run_page
from pytest_torchmem.store.run_reports import RunReport
from pytest_torchmem.values.baseline import Change
from tests.report.sample_run import picture, report_of, sample_run, window

FAILED = "tests/test_step.py::test_train[bf16]"
CSS = (resources.files("pytest_torchmem.report") / "assets" / "page.css").read_text("utf-8")
TEXT_CONTRAST = 4.5
"""What WCAG 2.2 asks of text (1.4.3, AA)."""


@pytest.fixture
def open_page(browser, tmp_path):
    """Returns a function that opens the page of a run."""
    pages = []

    def opened(run=None, part=f"#test={FAILED}", width=390, **context):
        path = tmp_path / "report.html"
        path.write_text(run_page(run or sample_run()), encoding="utf-8")
        page = browser.new_page(viewport={"width": width, "height": 844}, **context)
        pages.append(page)
        page.goto(f"{path.as_uri()}{part}")
        return page

    yield opened
    for page in pages:
        page.close()


# --- contrast, by the formulas of WCAG 2.2


def channels(colour):
    """Red, green, blue and opacity, each from 0 to 1."""
    if colour.startswith("#"):
        return (*(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)), 1.0)
    *rgb, alpha = map(float, re.findall(r"[\d.]+", colour))
    return (*(channel / 255 for channel in rgb), alpha)


def over(colour, ground):
    *rgb, alpha = channels(colour)
    below = channels(ground)
    return [alpha * a + (1 - alpha) * b for a, b in zip(rgb, below, strict=False)]


def luminance(rgb):
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(text, ground, below="#ffffff"):
    lightest, darkest = sorted(
        (luminance(over(text, "#000000")), luminance(over(ground, below))), reverse=True
    )
    return (lightest + 0.05) / (darkest + 0.05)


def schemes():
    """The colours of the page by scheme: each block of variables in its style sheet."""
    blocks = re.findall(r"(:root[^{]*)\{([^}]*--ground[^}]*)\}", CSS)
    assert len(blocks) == 3
    return {
        head.strip(): dict(re.findall(r"--([\w-]+):\s*([^;]+);", body)) for head, body in blocks
    }


def test_the_contrast_of_two_colours_is_what_wcag_says():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("scheme", schemes())
def test_text_stands_out_from_its_ground(scheme):
    colours = schemes()[scheme]
    on_any = [(name, "ground") for name in ("ink", "faint", "accent", "bad", "good", "warn")]
    on_panel = [(name, "panel") for name in ("ink", "faint", "accent", "bad", "good", "warn")]
    others = [("ink", "bad-ground"), ("bad", "bad-ground"), ("ground", "accent")]
    others += [("faint", "shade")]
    for text, ground in (*on_any, *on_panel, *others):
        found = contrast(colours[text], colours[ground], colours["ground"])
        assert found >= TEXT_CONTRAST, (scheme, text, ground, round(found, 2))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_a_field_asks_for_can_be_read(open_page, scheme):
    page = open_page(part="", width=1200, color_scheme=scheme)
    style = "getComputedStyle(document.querySelector('input'), '::placeholder').color"
    ground = page.evaluate("getComputedStyle(document.querySelector('input')).backgroundColor")
    hexes = [
        "#" + "".join(f"{int(n):02x}" for n in re.findall(r"\d+", c)[:3])
        for c in (page.evaluate(style), ground)
    ]
    assert contrast(*hexes) >= TEXT_CONTRAST


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_footprint_stands_out_where_a_category_s_colour_does_not(open_page, scheme):
    page = open_page(width=1200, color_scheme=scheme)
    page.wait_for_selector(".timeline canvas")
    line = schemes()[":root" if scheme == "light" else ':root[data-scheme="dark"]']["faint"]
    shown = [round(255 * channel) for channel in channels(line)[:3]]
    assert page.evaluate(COUNT_PIXELS, shown) > 1200  # labels alone have 500


def test_colours_of_categories_stay_where_the_system_chooses_the_others(open_page):
    page = open_page(width=1200, forced_colors="active")
    page.wait_for_selector(".timeline canvas")
    colours = page.evaluate(
        "[...document.querySelectorAll('.legend .swatch, .bar.big i')]"
        ".map((node) => getComputedStyle(node).backgroundColor)"
    )
    assert len(colours) > 6
    assert len(set(colours)) == len(picture().levels)


# --- tables


CUT = """[...document.querySelectorAll(".scroll")]
  .filter((box) => box.scrollWidth > box.clientWidth)
  .map((box) => box.getAttribute("aria-label"))"""


@pytest.mark.parametrize("width", [390, 768, 1400])
def test_no_table_is_cut(open_page, width):
    page = open_page(width=width)
    page.wait_for_selector(".timeline canvas")
    assert page.evaluate(CUT) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_table_without_room_is_a_list_that_names_its_numbers(open_page):
    page = open_page()
    composition = page.get_by_role("region", name="composition")
    cell = composition.locator("tbody tr").first.locator("td").nth(1)
    label = cell.evaluate("node => getComputedStyle(node, '::before').content")
    assert label.startswith('"own peak"')
    header = composition.locator("thead").bounding_box()
    assert header["height"] <= 2
    # A list to the eye; to who cannot see it, the table that it is.
    assert composition.get_by_role("row").count() > 2
    assert composition.get_by_role("rowheader", name="parameter").count() == 1
    assert composition.get_by_role("columnheader", name="own peak").count() == 1


def test_header_cells_say_what_they_head(open_page):
    page = open_page(width=1400)
    scopes = page.evaluate(
        "[...document.querySelectorAll('th')].map((cell) => cell.getAttribute('scope'))"
    )
    assert set(scopes) == {"col", "row"}
    assert page.evaluate(
        "[...document.querySelectorAll('thead th')].every((cell) => cell.textContent)"
    )


def test_only_what_scrolls_is_a_stop_of_the_tab_key(open_page):
    page = open_page(width=390)
    page.wait_for_selector(".timeline canvas")
    page.wait_for_timeout(50)
    stops = page.evaluate(
        "[...document.querySelectorAll('.scroll')].map((box) => [box.tabIndex === 0, "
        "box.scrollWidth > box.clientWidth])"
    )
    assert len(stops) >= 4
    assert all(stop == scrolls for stop, scrolls in stops)
    page.add_style_tag(content=".scroll table { min-width: 60rem; }")
    page.wait_for_timeout(50)
    assert page.locator(".scroll[tabindex='0']").count() == len(stops)


def test_the_table_for_who_has_no_scripts_fits_a_phone(browser, tmp_path):
    path = tmp_path / "report.html"
    long = report_of(f"test_a[{'long' * 60}]", window("a"))
    path.write_text(run_page(RunReport((long, *sample_run().tests))), encoding="utf-8")
    context = browser.new_context(java_script_enabled=False, viewport={"width": 390, "height": 844})
    page = context.new_page()
    page.goto(path.as_uri())
    assert page.get_by_role("columnheader").all_inner_texts() == [
        "status",
        "peak",
        "against",
        "test",
    ]
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    context.close()


# --- keyboard


FOCUSED = """(({ tagName, textContent, ariaLabel }) =>
  `${tagName} ${ariaLabel ?? textContent}`)(document.activeElement)"""


def test_the_tab_key_goes_from_top_to_bottom(open_page):
    page = open_page(part="", width=1200)
    order = []
    for _ in range(9):
        page.keyboard.press("Tab")
        order.append(page.evaluate(FOCUSED))
    assert order[0].startswith("BUTTON colours")
    assert order[1] == "INPUT search tests"
    assert order[2].startswith("BUTTON failed")
    assert [name.split()[0] for name in order[-2:]] == ["SELECT", "SELECT"]
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") == "SUMMARY"


def test_a_linked_test_is_not_below_the_bar_that_stays(open_page):
    many = tuple(report_of(f"test_{n:02}", window(f"test_{n:02}")) for n in range(40))
    page = open_page(RunReport(many), "#test=tests/test_step.py::test_20", width=1200)
    page.wait_for_selector(".timeline canvas")
    bar = page.locator(".tools").bounding_box()
    row = page.locator("details.test[open] > summary").bounding_box()
    assert row["y"] >= bar["y"] + bar["height"]
    assert row["y"] < 844


# --- motion, and what the chart is called


def test_nothing_moves_unless_motion_is_welcome():
    welcome = re.search(r"@media \(prefers-reduced-motion: no-preference\) \{.*?\} \}", CSS).group()
    assert "transition" in welcome
    rest = CSS.replace(welcome, "")
    assert not re.search(r"transition|animation|scroll-behavior", rest)


def test_the_chart_has_a_name_a_value_and_a_help(open_page):
    page = open_page(width=1200)
    chart = page.get_by_role("slider", name="memory over time, by category").first
    assert chart.get_attribute("aria-valuetext").startswith("25.5 ms: 90.1 MiB")
    hint = page.locator(f"#{chart.get_attribute('aria-describedby')}")
    assert "arrow keys move" in hint.inner_text()
    assert int(chart.get_attribute("aria-valuemax")) == len(picture().times_ns) - 1


# --- nothing to show


def test_a_run_that_measured_nothing_says_so(open_page):
    page = open_page(RunReport(), part="")
    page.get_by_text("No test of this run has a memory marker or the fixture.").wait_for()


def test_a_test_without_a_timeline_says_why(open_page):
    plain = report_of("a", replace(window("a"), picture=None))
    page = open_page(RunReport((plain,)), part="")
    page.get_by_text("A folder has those of failed tests alone").wait_for()


def test_a_failure_that_was_expected_is_no_alarm(open_page):
    body = window("a", Change.NOT_COMPARED, "memory peaked")
    page = open_page(RunReport((report_of("a", body, outcome="xfailed"),)), part="")
    page.get_by_text("failed as expected:", exact=True).wait_for()
    assert page.locator("ul.sentences.expected").inner_text() == "memory peaked"
