"""The timeline's frame in a real browser: zoom and pan by mouse, wheel and keys; many moments."""

from importlib import resources

import pytest

from pytest_torchmem.report.page.html import picture_page
from pytest_torchmem.values.contributors import Category
from pytest_torchmem.values.picture import Picture, Span
from pytest_torchmem.values.units import KiB, MiB
from tests.report.sample_run import picture

POINTS_PER_PIXEL = 8
"""Each layer is drawn with up to two corners for a pixel, and steps of it twice."""


@pytest.fixture
def open_picture(browser, tmp_path):
    """Returns a function that opens a timeline's page, with the range that it shows on its host."""
    pages = []

    def opened(drawn, **context):
        path = tmp_path / "timeline.html"
        path.write_text(picture_page(drawn, "cpu"), encoding="utf-8")
        page = browser.new_page(viewport={"width": 1280, "height": 900}, **context)
        pages.append(page)
        page.goto(path.as_uri())
        page.wait_for_selector(".timeline canvas")
        return page

    yield opened
    for page in pages:
        page.close()


def at(page, share):
    """Moves the pointer along the timeline and returns the change that is read there."""
    box = page.locator(".over").first.bounding_box()
    page.mouse.move(box["x"] + share * (box["width"] - 1), box["y"] + 120)
    page.wait_for_timeout(60)
    text = page.locator(".readout .moment").first.inner_text()
    return int(text.partition("change ")[2].split(" ")[0].replace(",", ""))


def zoomed(page):
    box = page.locator(".over").first.bounding_box()
    page.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 100)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 100, steps=4)
    page.mouse.up()
    page.wait_for_timeout(60)


def until(page, condition):
    """Waits for a condition; the page's policy forbids playwright to wait in the page itself."""
    for _ in range(100):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(30)
    raise AssertionError(f"never: {condition}")


def wheel(page, x, y):
    """Turns the wheel, which playwright alone does not wait for."""
    page.evaluate("window.turned = 0; addEventListener('wheel', () => { turned = 1; })")
    page.mouse.wheel(x, y)
    until(page, "turned")
    page.wait_for_timeout(60)


def test_every_script_of_the_page_is_written_to_be_read():
    assets = resources.files("pytest_torchmem.report") / "assets"
    for asset in assets.iterdir():
        lines = asset.read_text("utf-8").splitlines()
        assert max(map(len, lines)) < 240, asset.name
        assert ".min." not in asset.name


def test_a_drag_shows_what_it_marked(open_picture):
    page = open_picture(picture())
    assert at(page, 0) == 0
    zoomed(page)
    assert 190 <= at(page, 0) <= 224
    assert 399 <= at(page, 1) <= 420


def test_shift_and_drag_move_along(open_picture):
    page = open_picture(picture())
    zoomed(page)
    before = at(page, 0.5)
    page.keyboard.down("Shift")
    page.mouse.down()
    box = page.locator(".over").first.bounding_box()
    page.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + 120, steps=5)
    page.mouse.up()
    page.keyboard.up("Shift")
    page.wait_for_timeout(60)
    assert before + 35 <= at(page, 0.5) <= before + 70


def test_the_wheel_zooms_with_control_and_pans_sideways(open_picture):
    page = open_picture(picture())
    assert at(page, 1) > 800
    at(page, 0)
    page.keyboard.down("Control")
    wheel(page, 0, -1200)
    page.keyboard.up("Control")
    right = at(page, 1)
    assert right < 300
    wheel(page, 300, 0)
    assert at(page, 1) > right


def test_the_wheel_alone_scrolls_the_page(open_picture):
    page = open_picture(picture())
    page.set_viewport_size({"width": 1280, "height": 400})
    at(page, 0.5)
    page.mouse.wheel(0, 200)
    until(page, "scrollY > 100")
    page.evaluate("scrollTo(0, 0)")
    assert at(page, 1) > 800


def test_keys_zoom_pan_and_go_back(open_picture):
    page = open_picture(picture())
    page.get_by_role("slider").focus()
    for key in "++":
        page.keyboard.press(key)
    page.wait_for_timeout(60)
    left = at(page, 0)
    assert left > 150
    page.keyboard.press("Shift+ArrowRight")
    page.wait_for_timeout(60)
    assert at(page, 0) > left
    page.keyboard.press("Escape")
    page.wait_for_timeout(60)
    assert at(page, 0) == 0


def test_a_moment_out_of_sight_comes_into_it(open_picture):
    page = open_picture(picture())
    page.get_by_role("slider").focus()
    page.keyboard.press("Home")
    for key in "+++":
        page.keyboard.press(key)
    page.keyboard.press("End")
    page.wait_for_timeout(60)
    page.locator(".cursor").first.wait_for()
    assert at(page, 0) > 500


def test_a_hundred_thousand_moments_are_drawn_with_as_many_points_as_there_are_pixels(open_picture):
    count = 100_000
    spike = 61_803
    many = Picture(
        times_ns=tuple(range(count)),
        rows=tuple(range(count)),
        change_count=count,
        levels={
            Category.PARAMETER: (MiB,) * count,
            Category.TEMPORARY: tuple(
                4 * MiB if n == spike else KiB * (n % 1000) for n in range(count)
            ),
        },
    )
    page = open_picture(many)
    page.evaluate("""() => {
      window.points = 0;
      const lineTo = Path2D.prototype.lineTo;
      Path2D.prototype.lineTo = function (...place) {
        window.points += 1;
        lineTo.apply(this, place);
      };
    }""")
    page.get_by_role("slider").focus()
    page.keyboard.press("+")
    page.wait_for_timeout(200)
    width = page.locator(".over").first.bounding_box()["width"]
    layers = len(many.levels) + 1
    assert width < page.evaluate("points") < POINTS_PER_PIXEL * width * layers
    page.keyboard.press("p")
    assert "5.0 MiB" in page.locator(".readout").inner_text()
    assert f"change {spike:,}" in page.locator(".readout").inner_text()


def test_regions_and_phases_are_named_apart(open_picture):
    both = picture()
    spans = (Span("region", "backward", 0, 30_000_000), Span("backward", "", 0, 30_000_000))
    page = open_picture(
        Picture(both.times_ns, both.rows, both.change_count, both.levels, spans=spans)
    )
    at(page, 0.2)
    told = page.locator(".readout .moment").inner_text()
    assert told.endswith("in region backward, backward pass")
