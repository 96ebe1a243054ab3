"""A timeline on one line of a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from pytest_torchmem.values.picture import Picture
from pytest_torchmem.values.units import format_size

BLOCKS: Final = "▁▂▃▄▅▆▇█"
ASCII: Final = "_.:-=+*#"


def sparkline(levels: Sequence[int], width: int, plain: bool = False) -> str:
    """Return ``width`` characters for levels at equal distances, the highest of each stretch.

    Zero is the lowest character. The line is shorter where there are fewer levels. ``plain`` keeps
    to ASCII, for a terminal that cannot show blocks.
    """
    marks = ASCII if plain else BLOCKS
    top = max(levels, default=0) or 1
    count = min(width, len(levels))
    edges = [len(levels) * i // count for i in range(count + 1)] if count else [0]
    highest = [max(levels[a:b]) for a, b in pairwise(edges)]
    return "".join(marks[-(-level * (len(marks) - 1) // top)] for level in highest)


def timeline_lines(picture: Picture, width: int, plain: bool = False) -> list[str]:
    """Return a timeline as lines of text: the footprint over time, and where its peak is.

    It runs in equal numbers of changes, not in equal times: a body that waits or imports for most
    of its time would be a flat line, and the same body draws the same line again.
    """
    if not picture.times_ns:
        return []
    levels, peak = _over_time(picture, width)
    estimated = "an estimated " if picture.estimated else ""
    text = f"peak {estimated}{format_size(max(picture.totals))} {_moment(picture)}"
    # The marker stands below the character that holds the peak, its text where there is room.
    marker = " " * peak + "^"
    if peak + 2 + len(text) <= width:
        below = [f"{marker} {text}"]
    elif len(text) < peak:
        below = [f"{text} ^".rjust(peak + 1)]
    else:
        below = [marker, text]
    return [sparkline(levels, width, plain), *below]


def _moment(picture: Picture) -> str:
    return f"at change {picture.rows[picture.peak]} of {picture.change_count - 1}"


def _over_time(picture: Picture, width: int) -> tuple[list[int], int]:
    """Return the highest footprint within each of ``width`` stretches, and the peak's stretch."""
    width = min(width, picture.change_count)
    levels = [-1] * width
    places = [row * width // picture.change_count for row in picture.rows]
    held = 0
    for place, total in zip(places, picture.totals, strict=True):
        for empty in range(place, -1, -1):
            if levels[empty] >= 0:
                break
            levels[empty] = held  # nothing changed here: what was there before stays
        levels[place] = max(levels[place], total)
        held = total
    levels = [held if level < 0 else level for level in levels]
    return levels, places[picture.peak]
