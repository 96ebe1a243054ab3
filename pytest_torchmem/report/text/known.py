"""Text about known holders: what they excused in a run, and which of them excused nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pytest_torchmem.analysis.judge.holders import KnownHolder
from pytest_torchmem.report.text.tables import one_line
from pytest_torchmem.values.measured import RunSummary
from pytest_torchmem.values.units import format_size


def known_lines(summary: RunSummary, known: Sequence[KnownHolder], whole: bool) -> list[str]:
    """Return a line for each known holder that excused something, and of a whole run for others."""
    largest: Counter[str] = Counter()
    tests: dict[str, set[str]] = {}
    for test, window in summary.windows:
        for pattern, size_bytes in window.excused.items():
            largest[pattern] = max(largest[pattern], size_bytes)
            tests.setdefault(pattern, set()).add(test.test)
    lines = []
    for holder in known:
        name = one_line(holder.pattern)
        if names := tests.get(holder.pattern):
            count = f"{len(names)} {'test' if len(names) == 1 else 'tests'}"
            at_most = f"{format_size(largest[holder.pattern])} in {count}"
            lines.append(f"known holder {name}: {at_most} ({one_line(holder.reason)})")
        elif whole:
            lines.append(f"known holder {name} excused nothing in this run: remove it")
    return lines
