"""Two runs on one page: each test's timelines over each other, and what changed between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from pytest_torchmem.analysis.judge.differences import Comparison
from pytest_torchmem.report.page.html import plain_table, tests_page, window_json
from pytest_torchmem.report.page.svg import LineKind, Mark, escaped
from pytest_torchmem.values.baseline import Change
from pytest_torchmem.values.json_values import Json
from pytest_torchmem.values.measured import Window
from pytest_torchmem.values.results import Peak, Result, Retained
from pytest_torchmem.values.units import format_change, format_size

#: The changes of a comparison in the order in which they are told.
ORDER: Final = (Change.GROWN, Change.SHRUNK, Change.NEW, Change.GONE, Change.WITHIN, Change.SAME)

_NEAR: Final = 2
_NO_TIMELINE: Final = (
    "{name} has no timeline of this: a baseline has none, and results in a folder have those of "
    "failed tests alone."
)


@dataclass(frozen=True, slots=True)
class ComparedTest:
    """One test of two runs.

    Attributes:
        name: Its name, and that of the region if it is one.
        environment: Where it was measured.
        comparison: What both sides hold, and how they differ.
        causes: What changed, each on a line, the largest first.
        before: The first run's window; None for a baseline, and where that run has none.
        after: The same of the second.
    """

    name: str
    environment: str
    comparison: Comparison
    causes: tuple[str, ...]
    before: Window | None = None
    after: Window | None = None


def comparison_page(before: str, after: str, tests: Sequence[ComparedTest], remark: str) -> str:
    """Return the page of what changed from the input named ``before`` to that named ``after``.

    ``remark`` is what must be known of the comparison as a whole; ``""`` for nothing. Timelines
    beyond the budget of a page are left out.
    """
    counts = Counter(test.comparison.change for test in tests)
    head = {
        "title": f"Memory from {before} to {after}",
        "facts": [("before", before), ("after", after)],
        "counts": {change.value: counts[change] for change in ORDER if counts[change]},
        "tests": [_row(test, order, before, after) for order, test in enumerate(tests)],
        "problems": [remark] if remark else [],
        "stories": [],
    }
    contents = [partial(_content, test, before, after) for test in tests]
    plain = (
        f"<td>{test.comparison.change.value}</td>"
        f'<td class="number">{format_change(test.comparison.size_bytes)}</td>'
        f"<td>{escaped(test.name)}<br>{escaped('; '.join(test.causes))}</td>"
        for test in tests
    )
    return tests_page(head, contents, plain_table(("change", "bytes", "test"), plain))


def _row(test: ComparedTest, order: int, before: str, after: str) -> dict[str, Json]:
    then, now = test.comparison.before, test.comparison.after
    entry = now or then
    assert entry is not None
    changed_number = test.comparison.changed
    is_same = test.comparison.change is Change.SAME
    return {
        "id": f"torchmem-test-{order}",
        "order": order,
        "name": test.name,
        "status": test.comparison.change.value,
        "sentence": test.causes[0] if test.causes else "",
        "device": test.environment,
        "measured": True,
        "estimated": any(w.result.estimated for w in (test.before, test.after) if w),
        "window": "",
        "peak": entry.total,
        "at_peak": entry.at_peak.to_json(),
        "baseline_bytes": then.total if then else 0,
        "compared": then is not None and now is not None,
        "change": test.comparison.change.value,
        "word": test.comparison.change.value
        if then and now
        else f"only in {after if now else before}",
        "moved": changed_number.by if changed_number and not is_same else "",
        "reference": "",
        "limit": "",
    }


def _content(test: ComparedTest, before: str, after: str, with_pictures: bool) -> dict[str, Json]:
    """Return the second side, held against the first; alone, the side that there is."""
    then, now = test.comparison.before, test.comparison.after
    entry, measured, name = (now, test.after, after) if now else (then, test.before, before)
    assert entry is not None
    both = then is not None and now is not None
    # What a baseline remembers of a test.
    peak = Peak(entry.total, 0, entry.at_peak, entry.peaks, tuple(entry.live))
    retained = Retained(entry.retained.total, entry.retained, tuple(entry.retained_live))
    window = Window(
        measured.result if measured else Result("", test.environment, False, peak, retained),
        change=test.comparison.change,
        baseline_bytes=then.total if both and then else 0,
        baseline=then if both else None,
        picture=measured.picture if measured else None,
        changed=test.comparison.changed,
    )
    data = window_json(window, with_pictures)
    if not window.picture:
        data["no_picture"] = _NO_TIMELINE.format(name=name)
    if both and then:
        # A category's own peak, and what is retained, may change without any contributor.
        data["remarks"] = [] if data["differences"] else list(test.causes)
        near = then.total <= _NEAR * entry.total
        text = f"{before}: {format_size(then.total)}"
        data["marks"] = [Mark(LineKind.BASELINE, then.total, text, near).to_json()]
        drawn = test.before.picture if test.before and with_pictures else None
        data["before"] = {"name": before, "picture": drawn.to_json() if drawn else None}
    return {"windows": [data]}
