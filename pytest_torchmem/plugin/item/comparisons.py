"""A failed assert of a number of bytes, explained.

Results are plain ints, and only that the body has just read one of that value tells that it is
bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import pytest

from pytest_torchmem.analysis.judge.holders import explain_retained
from pytest_torchmem.analysis.judge.verdict import judge_limits
from pytest_torchmem.plugin.item.body import RUNNING
from pytest_torchmem.plugin.item.judging import MeasuredWindow
from pytest_torchmem.report.text.tables import largest
from pytest_torchmem.values.contributors import Category, CategoryBytes
from pytest_torchmem.values.measured import Window
from pytest_torchmem.values.results import Result
from pytest_torchmem.values.units import KiB, format_apart, format_size

_ORDERS: Final = ("<", "<=", ">", ">=", "==", "!=")
_TOLD: Final = 3
"""A message names so many results with such a number, and so many categories of each."""


def explain_comparison(
    config: pytest.Config, op: str, left: object, right: object
) -> list[str] | None:
    """Return a comparison of two numbers of bytes in lines for people; None if it is none.

    Numbers are of bytes when the body has read either one. Small ones read well as they are. The
    lines also say where the numbers come from: pytest drops its own lines about that.
    """
    body = config.stash.get(RUNNING, None)
    if body is None or op not in _ORDERS or type(left) is not int or type(right) is not int:
        return None
    sizes = {left, right} - {0}
    windows = [w for w in body.windows_read() if any(p[0] in sizes for p in _parts(w.result))]
    if not windows or max(left, right) < KiB:
        return None
    one, other = format_apart(left, right)
    difference = f", {format_size(abs(left - right))} apart" if left != right else ""
    lines = [f"{left} {op} {right}", f"{one} {op} {other}{difference}"]
    for window in windows[:_TOLD]:
        cause = _cause(window, max(left, right), min(left, right))
        lines += [_numbers_text(window.result), *([f"    {cause}"] if cause else [])]
    return lines


def _cause(window: MeasuredWindow, measured_bytes: int, allowed_bytes: int) -> str:
    """Say who holds a number that is too large, as a limit says it; ``""`` for any other number."""
    for size_bytes, key, result in _parts(window.result):
        if size_bytes == measured_bytes:
            judged = Window(result, judge_limits(result, {key: allowed_bytes}))
            judged = explain_retained(judged, window.source.find_holders)
            return judged.findings[0].cause if judged.failed else ""
    return ""


def _parts(result: Result) -> Iterator[tuple[int, str, Result]]:
    """Yield each number of a result, the limit's key for it, and the result with its part alone."""
    retained = result.retained
    yield retained.total, "retained", result
    yield retained.net, "net_retained", result
    for category, size_bytes in retained.by_category.items():
        live = tuple(c for c in retained.live if c.category is category)
        only = CategoryBytes.of({category: size_bytes})
        alone = replace(retained, total=size_bytes, by_category=only, live=live)
        yield size_bytes, "retained", replace(result, retained=alone)
    yield result.peak.total, "total", result
    for amounts in (result.peak.by_category, result.peak.at_peak):
        yield from ((amounts[category], category.value, result) for category in Category)
    if result.growth is not None:
        yield result.growth, "growth", result


def _numbers_text(result: Result) -> str:
    peak = f"peak {format_size(result.peak.total)}{_in_brackets(result.peak.by_category)}"
    retained = f"retained {format_size(result.retained.total)}"
    growth = "" if result.growth is None else f", growth {format_size(result.growth)} per step"
    retained_categories = _in_brackets(result.retained.by_category)
    return f"{result.name!r}: {peak}, {retained}{retained_categories}{growth}"


def _in_brackets(amounts: CategoryBytes) -> str:
    categories = largest(amounts, _TOLD)
    return f" ({categories})" if categories else ""
