"""One timeline as a static picture for documents: SVG, which needs no script and scales.

The baseline and the limits that it is held against are marks, which the page draws as well.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from typing import Final

from pytest_torchmem.values.contributors import Category
from pytest_torchmem.values.findings import words
from pytest_torchmem.values.json_values import JsonFields
from pytest_torchmem.values.measured import Window
from pytest_torchmem.values.picture import Picture
from pytest_torchmem.values.units import format_size, one_line

_NEAR: Final = 2
"""A line may be this many times as high as the data; a higher one would leave them no room."""


class LineKind(enum.Enum):
    """The meaning of a line."""

    BASELINE = "baseline"
    LIMIT = "limit"


@dataclass(frozen=True, slots=True)
class Mark(JsonFields):
    """One number that a timeline is held against.

    Attributes:
        kind: What it is.
        size_bytes: Where it stands.
        text: Its label, size included.
        drawn: False where a line would mislead or leave the data no room; then only the label is
            shown, at the upper edge.
    """

    kind: LineKind
    size_bytes: int = field(metadata={"key": "bytes"})
    text: str
    drawn: bool = True


def marks_of(window: Window) -> tuple[Mark, ...]:
    """Return the baseline's peak, the limit on the total and those on categories.

    A limit on a category is a line only where nothing else is in the picture: on top of other
    categories its height would mean nothing.
    """
    highest = _NEAR * window.result.peak.total
    return tuple(
        Mark(kind, size_bytes, f"{name} {format_size(size_bytes)}", alone and size_bytes <= highest)
        for kind, size_bytes, name, alone in _numbers(window)
    )


def _numbers(window: Window) -> Iterator[tuple[LineKind, int, str, bool]]:
    if window.baseline_bytes:
        yield LineKind.BASELINE, window.baseline_bytes, "baseline", True
    if "total" in window.limits:
        yield LineKind.LIMIT, window.limits["total"], "limit", True
    own = {category for category, size in window.result.peak.by_category.items() if size}
    for category in Category:
        if category.value in window.limits:
            name = f"limit on {words(category.value)}"
            yield LineKind.LIMIT, window.limits[category.value], name, own == {category}


# One colour for each category, the same in every report.
#
# The first seven are the palette of Okabe and Ito, "Color Universal Design" (2008), the others
# from Paul Tol's "muted" scheme: told apart with each of the common kinds of colour blindness, on
# white and on black. Reports never rely on colour alone: legends, tables and hover text name the
# category.

COLOURS: Final = {
    Category.PARAMETER: "#0072B2",
    Category.GRADIENT: "#E69F00",
    Category.OPTIMIZER_STATE: "#009E73",
    Category.INPUT: "#56B4E9",
    Category.AUTOGRAD_DETAIL: "#F0E442",
    Category.ACTIVATION: "#D55E00",
    Category.TEMPORARY: "#CC79A7",
    Category.BUFFER: "#882255",
    Category.WORKSPACE: "#999933",
    Category.UNKNOWN: "#8C8C8C",
}
_WIDTH: Final = 900
_PLOT: Final = (78, 44, 800, 300)
"""Left, top, width and height of the area that the data are drawn in."""

_FAINT: Final = "#5b6672"
_LEGEND_COLUMNS: Final = 4
_TITLE_LETTERS: Final = 100
"""As many as there is room for at most; a longer title loses letters in its middle."""

_NOT_IN_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_LINES: Final = {LineKind.BASELINE: ("#0b5cad", "7 5"), LineKind.LIMIT: ("#b3261e", "2 4")}
"""The colour and the dashes of each kind of line."""

_FONT: Final = "system-ui, -apple-system, Segoe UI, Roboto, Helvetica, Arial, sans-serif"


def timeline_svg(picture: Picture, title: str, marks: Sequence[Mark] = ()) -> str:
    """Return a timeline as an SVG document: stacked categories, the peak, and ``marks`` as lines.

    Marks that are not drawn are named at the upper edge.
    """
    title = _NOT_IN_XML.sub("\ufffd", title)
    half = (_TITLE_LETTERS - 1) // 2
    shown_title = title if len(title) <= _TITLE_LETTERS else f"{title[:half]}…{title[-half:]}"
    lines = sorted((mark for mark in marks if mark.drawn), key=lambda mark: -mark.size_bytes)
    categories = [c for c in Category if c in picture.levels]
    rows = -(-len(categories) // _LEGEND_COLUMNS)
    height = _PLOT[1] + _PLOT[3] + 66 + 22 * rows
    top_bytes = max([1, *(mark.size_bytes for mark in lines), *picture.totals]) * 1.08
    scale = _PLOT[3] / top_bytes
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" role="img" font-family="{_FONT}" font-size="12">',
        f"<title>{escaped(title)}</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(_PLOT[0], 20, shown_title, 'font-size="14" font-weight="600"'),
        *(_grid(top_bytes, scale) if categories else ()),
    ]
    if not categories:
        middle = _PLOT[0] + _PLOT[2] / 2, _PLOT[1] + _PLOT[3] / 2
        parts.append(_text(*middle, "nothing was allocated", 'text-anchor="middle" font-size="14"'))
    else:
        parts += [*_areas(picture, categories, scale), *_change_axis(picture)]
        parts += _lines(lines, scale, _peak_is_late(picture))
        parts += _peak(picture, scale)
    if undrawn_marks := [mark.text for mark in marks if not mark.drawn]:
        style = f'text-anchor="end" fill="{_LINES[LineKind.LIMIT][0]}" font-weight="600"'
        text = f"not drawn: {', '.join(undrawn_marks)}"
        parts.append(_text(_PLOT[0] + _PLOT[2], _PLOT[1] - 6, text, style))
    parts += [*_legend(picture, categories), "</svg>"]
    return "\n".join(parts) + "\n"


def _y(size_bytes: float, scale: float) -> float:
    return _PLOT[1] + _PLOT[3] - size_bytes * scale


def _xs(picture: Picture) -> list[float]:
    """Return the x of each moment, and last that of the data's end; all changes are equally wide.

    With equally wide times, a body that mostly waits or compiles would be a flat line.
    """
    per_change = _PLOT[2] / picture.change_count
    return [*(_PLOT[0] + row * per_change for row in picture.rows), float(_PLOT[0] + _PLOT[2])]


def _areas(picture: Picture, categories: Sequence[Category], scale: float) -> Iterator[str]:
    """Yield one outline for each category, on top of those before it; memory changes in steps."""
    xs = _xs(picture)
    lower_edge = [0] * len(xs)
    for category in categories:
        levels = (*picture.levels[category], picture.levels[category][-1])
        upper_edge = [b + level for b, level in zip(lower_edge, levels, strict=True)]
        upper = _steps(xs, [_y(level, scale) for level in upper_edge])
        lower = _steps(xs, [_y(level, scale) for level in lower_edge])
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (*upper, *reversed(lower)))
        yield (
            f'<polygon fill="{COLOURS[category]}" stroke="#ffffff" stroke-width="0.6" '
            f'points="{points}"><title>{words(category.value)}</title></polygon>'
        )
        lower_edge = upper_edge
    # Not every colour stands out from white: the footprint has a line of its own.
    total = " ".join(f"{x:.1f},{y:.1f}" for x, y in _steps(xs, [_y(b, scale) for b in lower_edge]))
    yield f'<polyline fill="none" stroke="{_FAINT}" points="{total}"/>'


def _steps(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
    points = [(xs[0], ys[0])]
    for x, (before, y) in zip(xs[1:], pairwise(ys), strict=True):
        if y != before:  # a level that holds needs no corner
            points += [(x, before), (x, y)]
    return [*points, (xs[-1], ys[-1])]


def _grid(top_bytes: float, scale: float) -> Iterator[str]:
    step = 1
    while top_bytes / step > 6:
        step *= 2
    for number in range(int(top_bytes // step) + 1):
        y = _y(number * step, scale)
        label = format_size(number * step).replace(".0 ", " ")
        yield (
            f'<line x1="{_PLOT[0]}" x2="{_PLOT[0] + _PLOT[2]}" y1="{y:.1f}" y2="{y:.1f}" '
            'stroke="#d9dde3"/>'
        )
        yield _text(_PLOT[0] - 8, y + 4, label, f'text-anchor="end" fill="{_FAINT}"')


def _change_axis(picture: Picture) -> Iterator[str]:
    last = picture.change_count - 1
    parts = min(4, last)
    for part in range(parts + 1):
        x = _PLOT[0] + _PLOT[2] * part / (parts or 1)
        at = last * part // (parts or 1)
        # A node has two rows: while it runs, and when it is over.
        label = f"node {at // 2:,}" if picture.estimated else f"change {at:,}"
        y = _PLOT[1] + _PLOT[3] + 18
        anchor = "start" if not part else "end" if part == parts else "middle"
        yield _text(x, y, label, f'text-anchor="{anchor}" fill="{_FAINT}"')


def _peak(picture: Picture, scale: float) -> Iterator[str]:
    x, total = _xs(picture)[picture.peak], max(picture.totals)
    y = _y(total, scale)
    side = "end" if _peak_is_late(picture) else "start"
    estimated = "estimated " if picture.estimated else ""
    yield f'<path d="M{x:.1f} {y:.1f} l-5 -8 h10 z" fill="#1b2128"/>'
    label = f"{estimated}peak {format_size(total)}"
    offset = -9 if side == "end" else 9
    yield _text(x + offset, y - 1, label, f'text-anchor="{side}" font-weight="600"')


def _peak_is_late(picture: Picture) -> bool:
    return _xs(picture)[picture.peak] > _PLOT[0] + _PLOT[2] / 2


def _lines(marks: Sequence[Mark], scale: float, peak_is_late: bool) -> Iterator[str]:
    """Yield a labelled line for each mark, the highest first; labels keep clear of the peak's."""
    x, anchor = (_PLOT[0] + 6, "start") if peak_is_late else (_PLOT[0] + _PLOT[2] - 6, "end")
    for number, mark in enumerate(marks):
        colour, dashes = _LINES[mark.kind]
        y = _y(mark.size_bytes, scale)
        place = f'x1="{_PLOT[0]}" x2="{_PLOT[0] + _PLOT[2]}" y1="{y:.1f}" y2="{y:.1f}"'
        yield f'<line {place} stroke="#ffffff" stroke-width="4" stroke-opacity="0.7"/>'
        yield f'<line {place} stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>'
        # Of two lines that are close, the lower one has its label below it.
        is_below = number > 0 and y - _y(marks[number - 1].size_bytes, scale) < 22
        style = f'text-anchor="{anchor}" fill="{colour}" font-weight="600"'
        yield _text(x, y + 15 if is_below else y - 6, mark.text, style)


def _legend(picture: Picture, categories: Sequence[Category]) -> Iterator[str]:
    at_peak = picture.at(picture.peak) if picture.times_ns else None
    for number, category in enumerate(categories):
        x = _PLOT[0] + number % _LEGEND_COLUMNS * _PLOT[2] / _LEGEND_COLUMNS
        y = _PLOT[1] + _PLOT[3] + 46 + 22 * (number // _LEGEND_COLUMNS)
        size = f" {format_size(at_peak[category])}" if at_peak else ""
        yield (
            f'<rect x="{x:.0f}" y="{y - 10:.0f}" width="11" height="11" rx="2" '
            f'fill="{COLOURS[category]}"/>'
        )
        yield _text(x + 17, y, f"{words(category.value)}{size}")
    if categories:
        y = _PLOT[1] + _PLOT[3] + 46 + 22 * (-(-len(categories) // _LEGEND_COLUMNS))
        yield _text(_PLOT[0], y, "sizes at the peak", f'fill="{_FAINT}"')


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    # A halo keeps labels readable where they lie on data.
    halo = 'stroke="#ffffff" stroke-width="4" paint-order="stroke"'
    fill = "" if "fill=" in attributes else 'fill="#1b2128" '
    return f'<text x="{x:.1f}" y="{y:.1f}" {halo} {fill}{attributes}>{escaped(text)}</text>'


def escaped(text: str) -> str:
    """Return text of one line for a page: nothing in it is markup or a control character."""
    return escape(one_line(text))
