"""How far apart the numbers of several runs of one body are: whether they can be a baseline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from pytest_torchmem.values.baseline import Allowance
from pytest_torchmem.values.findings import Finding, FindingKind, words
from pytest_torchmem.values.results import Result
from pytest_torchmem.values.units import format_size


def judge_spread(results: Sequence[Result], allowance: Allowance) -> tuple[Finding, ...]:
    """Return a finding where runs of one body differ by more than a comparison would allow."""
    rows = [dict(_readings(result)) for result in results]
    allowance = allowance.at(min(row["total"] for row in rows))
    spreads = []
    for key in rows[0]:
        values = [row[key] for row in rows]
        excess_bytes = max(values) - min(values) - allowance.bytes_for(min(values))
        if excess_bytes > 0:
            spreads.append((excess_bytes, key, values))
    if not spreads:
        return ()
    excess_bytes, key, values = max(spreads, key=lambda spread: spread[0])
    shown = ", ".join(format_size(value) for value in values)
    numbers = (
        f"{words(key)} is not stable, and nothing is stored: {len(values)} runs had {shown}, "
        f"a spread of {format_size(max(values) - min(values))} ({allowance.text_for(min(values))})"
    )
    numbers += _hint(values, allowance)
    return (Finding(FindingKind.UNSTABLE, key, numbers, excess_bytes),)


def _hint(values: Sequence[int], allowance: Allowance) -> str:
    """Return what the order of the numbers says about their cause; ``""`` where it says nothing."""
    rest = values[1:]
    if len(rest) > 1 and max(rest) - min(rest) <= allowance.bytes_for(min(rest)):
        return "; only the first run differs: warm up with memory_budget(warmup=1)"
    if len(rest) > 1 and all(earlier < later for earlier, later in pairwise(values)):
        return "; each has more than the one before: the runs share the test's fixtures"
    return ""


def _readings(result: Result) -> Iterable[tuple[str, int]]:
    yield "total", result.peak.total
    yield from ((category.value, size) for category, size in result.peak.by_category.items())
    yield "retained", result.retained.total
