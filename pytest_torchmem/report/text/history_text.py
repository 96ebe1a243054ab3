"""The baselines' history as text: a table of all that was accepted, or a plot of each test."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from pytest_torchmem.report.text.tables import aligned, one_line
from pytest_torchmem.store.acceptances import Acceptance
from pytest_torchmem.values.baseline import TOTAL, Change
from pytest_torchmem.values.units import format_change, format_share, format_size

ROWS: Final = 30
"""The latest changes that the table of all tests shows."""

_BAR: Final = 30


def by_test(history: Sequence[Acceptance]) -> dict[tuple[str, str], list[Acceptance]]:
    """Return the changes of each test in each environment, by both."""
    found: dict[tuple[str, str], list[Acceptance]] = defaultdict(list)
    for item in history:
        found[item.test, item.environment].append(item)
    return found


def change_text(item: Acceptance) -> str:
    """Return a change in a few words: ``new``, ``+30 %``, ``activation +30 %``, ``removed``."""
    if item.change is Change.NEW:
        return "new"
    if item.change is Change.UNUSED or item.changed is None:
        return "removed"
    told = item.changed
    by_bytes = told.after_bytes - told.before_bytes
    by = format_share(by_bytes, told.before_bytes) or format_change(by_bytes)
    return by if told.key == TOTAL else f"{told.name} {by}"


def history_table(history: Sequence[Acceptance]) -> list[str]:
    """Return a line for each of the latest changes, the newest first."""
    latest = list(reversed(history))[:ROWS]
    rows = [
        [i.date, i.author, change_text(i), _size(i), i.test, i.environment, i.commit, i.subject]
        for i in latest
    ]
    headers = ["date", "who", "change", "peak", "test", "environment", "commit", ""]
    lines = aligned(rows, headers, "llrr")
    if len(history) > ROWS:
        lines.append(f"... and {len(history) - ROWS} older changes; name a test to see all of its")
    return lines


def history_plots(history: Sequence[Acceptance], plain: bool) -> list[str]:
    """Return a block for each test and environment: a bar for each size that was accepted."""
    lines: list[str] = []
    for (test, environment), items in by_test(history).items():
        largest = max((i.after_bytes for i in items), default=0) or 1
        rows = []
        for i in items:
            bar = ("#" if plain else "█") * round(_BAR * i.after_bytes / largest)
            rows.append([i.date, _size(i), bar, change_text(i), i.author, i.commit, i.subject])
        headers = ["date", "peak", "", "change", "who", "commit", ""]
        title = f"{one_line(test)} on {environment}"
        lines += ["", title, *aligned(rows, headers, "lrlr")]
    return lines[1:]


def _size(item: Acceptance) -> str:
    return "-" if item.change is Change.UNUSED else format_size(item.after_bytes)
