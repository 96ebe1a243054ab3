"""A timeline as one HTML page that needs no network."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

import numpy as np

from pytest_torchmem.analysis.results import Category
from pytest_torchmem.analysis.timeline import Timeline
from pytest_torchmem.units import format_size

if TYPE_CHECKING:
    from numpy.typing import NDArray

COLOURS: Final = {
    Category.PARAMETER: "#2e7d32",
    Category.GRADIENT: "#1565c0",
    Category.OPTIMIZER_STATE: "#c79100",
    Category.INPUT: "#455a64",
    Category.AUTOGRAD_DETAIL: "#5c8fd6",
    Category.ACTIVATION: "#d84343",
    Category.TEMPORARY: "#8e63ce",
    Category.BUFFER: "#00897b",
    Category.WORKSPACE: "#a1887f",
    Category.UNKNOWN: "#9e9e9e",
}
_WIDTH: Final = 1200
_HEIGHT: Final = 480
_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Memory timeline: {title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root {{ color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }}
body {{ margin: 2rem auto; max-width: 1280px; padding: 0 1rem; }}
svg {{ width: 100%; height: auto; border-bottom: 1px solid; border-left: 1px solid; }}
li {{ display: inline-block; margin-right: 1.2em; }} ul {{ padding: 0; }}
i {{ display: inline-block; width: .9em; height: .9em; margin-right: .4em; }}
</style></head><body>
<h1>Memory timeline: {title}</h1>
<p>Peak {estimated}{peak} after {time_ms:.3f} ms of {span_ms:.3f} ms.</p>
<svg viewBox="0 0 {width} {height}" preserveAspectRatio="none" role="img"
 aria-label="Bytes by category over time">{areas}</svg>
<ul>{legend}</ul>
</body></html>
"""


def timeline_page(timeline: Timeline, title: str) -> str:
    """Return a page that shows bytes by category over time, stacked, with the peak in words."""
    if not len(timeline.times_ns):
        return f"<!doctype html><title>{escape(title)}</title><p>Nothing was recorded.</p>\n"
    times = timeline.times_ns - timeline.times_ns[0]
    row = timeline.peak_row
    own = timeline.largest
    shown = [category for category in Category if own[category]]
    return _PAGE.format(
        title=escape(title),
        estimated="(estimated) " if timeline.estimated else "",
        peak=format_size(timeline.at(row).total),
        time_ms=times[row] / 1e6,
        span_ms=times[-1] / 1e6,
        width=_WIDTH,
        height=_HEIGHT,
        areas="".join(_areas(timeline, times, shown)),
        legend="".join(
            f'<li><i style="background:{COLOURS[c]}"></i>{c.name}, up to {format_size(own[c])}</li>'
            for c in shown
        ),
    )


def _areas(timeline: Timeline, times: NDArray[np.int64], shown: list[Category]) -> list[str]:
    """One polygon for each category, on top of those before it; memory changes in steps."""
    x = times * (_WIDTH / max(1, int(times[-1])))
    scale = _HEIGHT / max(1, int(timeline.total.max()))
    # Between two changes a level holds: each row is drawn from its own time to the next one's.
    x_steps = np.repeat(x, 2)[1:]
    below = np.zeros(len(times))
    areas = []
    for category in shown:
        above = below + timeline.of(category)
        edges = (np.repeat(_HEIGHT - level * scale, 2)[:-1] for level in (above, below))
        top, bottom = edges
        outline = [*zip(x_steps, top, strict=True), *zip(x_steps[::-1], bottom[::-1], strict=True)]
        points = " ".join(f"{px:.1f},{py:.1f}" for px, py in outline)
        areas.append(
            f'<polygon fill="{COLOURS[category]}" points="{points}">'
            f"<title>{category.name}</title></polygon>"
        )
        below = above
    return areas
