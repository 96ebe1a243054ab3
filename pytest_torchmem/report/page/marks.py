"""Draw the lines that a timeline is held against: its baseline and its limits."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from pytest_torchmem.values.contributors import Category
from pytest_torchmem.values.findings import words
from pytest_torchmem.values.json_values import Json
from pytest_torchmem.values.measured import Window
from pytest_torchmem.values.units import format_size

_NEAR: Final = 2
"""A line may be this many times as high as the data; a higher one would leave them no room."""


class LineKind(enum.Enum):
    """The meaning of a line."""

    BASELINE = "baseline"
    LIMIT = "limit"


@dataclass(frozen=True, slots=True)
class Mark:
    """One number that a timeline is held against.

    Attributes:
        kind: What it is.
        size_bytes: Where it stands.
        text: Its label, size included.
        drawn: False where a line would mislead or leave the data no room; then only the label is
            shown, at the upper edge.
    """

    kind: LineKind
    size_bytes: int
    text: str
    drawn: bool = True

    def to_json(self) -> dict[str, Json]:
        """Return plain builtins, for the page."""
        return {
            "kind": self.kind.value,
            "bytes": self.size_bytes,
            "text": self.text,
            "drawn": self.drawn,
        }


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
