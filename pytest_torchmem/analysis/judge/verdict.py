"""A result held against limits or against a baseline: passed, or what grew and by how much."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from pytest_torchmem.analysis.judge.growth import attribute_growth
from pytest_torchmem.values.baseline import Allowance, BaselineEntry, Change, overall
from pytest_torchmem.values.contributors import Category, Contributor
from pytest_torchmem.values.findings import (
    COUNTERS,
    LIMIT_KEYS,
    RETAINED,
    Finding,
    FindingKind,
    Growth,
    Verdict,
    is_estimated,
    words,
)
from pytest_torchmem.values.results import Result
from pytest_torchmem.values.units import format_apart, format_change, format_size

# Numbers that memory of another thread would be part of, whatever it is for.
_MAY_LACK: Final = ("total", "retained", Category.UNKNOWN.value)
_SCRATCH: Final = ("temporary", "autograd_detail", "workspace", "unknown")
_SCRATCH_FACTOR: Final = 8


def judge_limits(result: Result, limits: Mapping[str, int]) -> tuple[Finding, ...]:
    """Return a finding for each limit that is exceeded or that no reading can answer."""
    if limits and result.peak.total == 0:
        return (_nothing_read(result, "a limit needs a reading to be held against"),)
    findings = (_judge_limit(result, key, limit_bytes) for key, limit_bytes in limits.items())
    return rank(finding for finding in findings if finding is not None)


def judge_blind_spots(result: Result) -> tuple[Finding, ...]:
    """Return a finding for each thing that the figures may lack, for those who cannot accept it."""
    return tuple(
        Finding(FindingKind.UNSEEN, "total", f"not everything was seen: {spot}")
        for spot in result.blind_spots
    )


def judge_baseline(
    result: Result, entry: BaselineEntry, allowance: Allowance, environment: str = ""
) -> Verdict:
    """Compare the peak, each category's own peak and what was retained with a stored entry.

    ``environment`` names where the entry comes from if that is not where the result does.
    """
    if result.peak.total == 0 and entry.total > 0:
        missing = _nothing_read(result, f"the baseline has {format_size(entry.total)}")
        return Verdict(result, (missing,), Change.NOT_COMPARED, entry.total)
    allowance = allowance.at(entry.total)
    changes: set[Change] = set()
    findings: list[Finding] = []
    of_other = f" for {environment}" if environment else ""
    # The total is asked for what its categories were asked for before.
    category_growths = functools.cache(functools.partial(_category_growths, result, entry))
    for key, measured_bytes, baseline_bytes in _compared(result, entry):
        if measured_bytes == baseline_bytes:
            continue
        change = allowance.compare(measured_bytes, baseline_bytes)
        changes.add(change)
        if change is Change.GROWN:
            allowed = allowance.text_for(baseline_bytes)
            reference = f"the baseline{of_other} of {{}} ({allowed})"
            growths = _growths(result, entry, key, category_growths)
            numbers = _exceeds(result, key, measured_bytes, baseline_bytes, reference)
            excess_bytes = measured_bytes - baseline_bytes
            finding = Finding(FindingKind.GROWN, key, numbers, excess_bytes, growths)
            findings.append(_with_cause(finding, result))
    change = overall(changes)
    notice = _largest_saving(result, entry) if change is Change.SHRUNK else ""
    return Verdict(result, rank(findings), change, entry.total, notice, environment)


def judge_shrinking(verdict: Verdict) -> tuple[Finding, ...]:
    """Return a finding where a number is below its baseline, for those who want that to fail."""
    if not verdict.notice:
        return ()
    return (Finding(FindingKind.SHRUNK, "total", f"{verdict.notice}: tighten it"),)


def _largest_saving(result: Result, entry: BaselineEntry) -> str:
    """Return ``activation peaked at 70.0 MiB, 30 % below the baseline of 100.0 MiB``."""
    # The first of equal savings, which is the total where that shrank as much as a part of it.
    key, measured_bytes, baseline_bytes = max(
        _compared(result, entry), key=lambda numbers: numbers[2] - numbers[1]
    )
    measured, baseline = format_apart(measured_bytes, baseline_bytes)
    share = f"{(baseline_bytes - measured_bytes) / baseline_bytes:.0%}".replace("%", " %")
    verb = "retained" if key == "retained" else f"{words(key)} peaked at"
    return f"{verb} {measured}, {share} below the baseline of {baseline}"


def rank(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort findings, the most telling first.

    What could not be judged comes first, because nobody knows how large it is. A category or what
    was retained says more than the total that it is part of. Among those the largest single cause
    leads, then the largest excess.

    Scratch often grows as a consequence: a state kept in fp32 makes the scratch of all that reads
    it wider, too. It leads where its cause is several times larger than any other, or is in the
    same function and on an earlier line: what was made first is no consequence of the rest.
    """
    ranked = sorted(findings, key=_rank)
    if ranked and (cause := _cause(ranked[0])):
        earlier = [f for f in ranked if f.kind.has_excess and _precedes(_cause(f), cause)]
        ranked.sort(key=lambda finding: finding not in earlier)
    return tuple(ranked)


def _cause(finding: Finding) -> Growth | None:
    return finding.growths[0] if finding.growths and finding.key != "total" else None


def _precedes(one: Growth | None, other: Growth) -> bool:
    """True when two causes are of one size and in one function, and ``one`` is further up in it."""
    if one is None or not (one.contributor.source and other.contributor.source):
        return False
    above, below = one.contributor.source, other.contributor.source
    same = (above.file, above.function) == (below.file, below.function)
    return same and 0 < above.line < below.line and 2 * one.size_bytes >= other.size_bytes


def _rank(finding: Finding) -> tuple[bool, bool, int, int, int]:
    whole = finding.key in ("total", *COUNTERS)
    cause_bytes = finding.growths[0].size_bytes if finding.growths else 0
    weight = 1 if finding.key in _SCRATCH else _SCRATCH_FACTOR
    place = LIMIT_KEYS.index(finding.key)
    return (finding.kind.has_excess, whole, -weight * cause_bytes, -finding.excess_bytes, place)


def _compared(result: Result, entry: BaselineEntry) -> Iterable[tuple[str, int, int]]:
    yield "total", result.peak.total, entry.total
    pairs = zip(result.peak.by_category.items(), entry.peaks.items(), strict=True)
    for (category, measured_bytes), (_, stored_bytes) in pairs:
        yield category._value_, measured_bytes, stored_bytes
    yield "retained", result.retained.total, entry.retained.total


@dataclass(frozen=True, slots=True)
class _Unread:
    """Why there is no number to hold against a limit."""

    kind: FindingKind
    reason: str


def _judge_limit(result: Result, key: str, limit_bytes: int) -> Finding | None:
    reading = _reading(result, key)
    if isinstance(reading, _Unread):
        limit = f"the limit of {format_size(limit_bytes)} on {words(key)}"
        return Finding(reading.kind, key, f"{limit} cannot be judged: {reading.reason}")
    if reading <= limit_bytes:
        return _judge_unseen(result, key, limit_bytes, limit_bytes - reading)
    numbers = _exceeds(result, key, reading, limit_bytes, "the limit of {}")
    finding = Finding(FindingKind.OVER_LIMIT, key, numbers, reading - limit_bytes)
    return _with_cause(finding, result)


def _judge_unseen(result: Result, key: str, limit_bytes: int, margin_bytes: int) -> Finding | None:
    """Return a finding where what nobody saw being made may be more than is left below a limit."""
    if key not in _MAY_LACK or result.unexplained_bytes <= margin_bytes:
        return None
    return Finding(
        FindingKind.UNSEEN,
        key,
        f"the limit of {format_size(limit_bytes)} on {words(key)} cannot be judged: "
        f"{format_size(result.unexplained_bytes)} were not seen being made, by another thread or "
        f"another allocator, and {format_size(margin_bytes)} are left below the limit",
    )


def _reading(result: Result, key: str) -> int | _Unread:
    """Return the measured bytes, or the reason why there are none."""
    if key == "total":
        return result.peak.total
    if key == "retained":
        return result.retained.total
    if key == "growth":
        return _growth_reading(result)
    if key in COUNTERS:
        return _counter_reading(result, key)
    if key == Category.ACTIVATION.value and not result.has_backward:
        return _Unread(
            FindingKind.NO_ACTIVATION,
            "nothing in the body was kept for a backward pass, and without one there is no "
            "activation by definition; limit the total or temporary= instead",
        )
    return result.peak.by_category[key]


def _growth_reading(result: Result) -> int | _Unread:
    if result.growth is None:
        marked = "marked fewer than two steps; write"
        if result.steps:
            marked = (
                "came to the end of one step only: a step that `break` leaves is not marked; let "
                "two end, as in"
            )
        return _Unread(
            FindingKind.NO_STEPS,
            f"growth is what each step adds, and the body {marked} "
            "`for _ in torchmem.steps(4, warmup=1):` around the step",
        )
    return result.growth


def _counter_reading(result: Result, key: str) -> int | _Unread:
    if result.counters is None:
        reason = f"nothing counted {key} bytes on {result.device}; limit the total"
        return _Unread(FindingKind.NO_COUNTER, reason)
    reading: int = getattr(result.counters, key)
    if reading == 0:
        reason = f"the allocator of {result.device} counted no {key} bytes at all"
        return _Unread(FindingKind.NO_COUNTER, reason)
    return reading


def _nothing_read(result: Result, needed: str) -> Finding:
    return Finding(
        FindingKind.NO_READING,
        "total",
        f"the body used no memory on {result.device}: the reading is 0 B, but {needed}; "
        "is the work done on another device, or in another process or thread?",
    )


def _exceeds(
    result: Result, key: str, measured_bytes: int, reference_bytes: int, reference: str
) -> str:
    measured, against = format_apart(measured_bytes, reference_bytes)
    verb = {"retained": "retained", "growth": "grew by"}.get(key, f"{words(key)} peaked at")
    per_step = " per step" if key == "growth" else ""
    estimated = "an estimated " if is_estimated(result, key) else ""
    over = format_size(measured_bytes - reference_bytes)
    return f"{verb} {estimated}{measured}{per_step}, {over} over {reference.format(against)}"


def contributors(result: Result, key: str) -> tuple[Contributor, ...]:
    """Return who holds the bytes that ``key`` counts, largest first.

    A category is asked at its own peak, which may be at another moment than that of the total.
    """
    if key == "growth" and result.grown:
        return result.grown
    if key in RETAINED:
        return result.retained.live
    if key in ("total", *COUNTERS):
        return result.peak.live
    return tuple(c for c in _at_own_peaks(result) if c.category._value_ == key)


def _at_own_peaks(result: Result) -> tuple[Contributor, ...]:
    return result.peak.live_by_category or result.peak.live


def _growths(
    result: Result,
    entry: BaselineEntry,
    key: str,
    category_growths: Callable[[Category], tuple[Growth, ...]],
) -> tuple[Growth, ...]:
    if key == "retained":
        omitted_bytes = entry.retained.total - _held(entry.retained_live)
        return attribute_growth(result.retained.live, entry.retained_live, max(0, omitted_bytes))
    if key != "total":
        return category_growths(Category(key))
    # What is not alive when the total peaks did not make it larger. Only where nothing of what is
    # can be told to have grown, a category's growth at its own peak is the best guess.
    at_peak = [g for c in Category for g in _grown_among(result.peak.live, entry, c)]
    growths = at_peak or [g for c in Category for g in category_growths(c)]
    return tuple(sorted(growths, key=lambda growth: -growth.size_bytes))


def _category_growths(
    result: Result, entry: BaselineEntry, category: Category
) -> tuple[Growth, ...]:
    if not result.peak.by_category[category]:
        return ()
    return _grown_among(contributors(result, category.value), entry, category)


def _grown_among(
    live: Iterable[Contributor], entry: BaselineEntry, category: Category
) -> tuple[Growth, ...]:
    """What grew among contributors of a category, beside what it held at its stored own peak."""
    mine = tuple(c for c in live if c.category is category)
    if not mine:
        return ()
    stored = tuple(c for c in entry.live if c.category is category)
    omitted_bytes = max(0, entry.peaks[category] - _held(stored))
    return attribute_growth(mine, stored, omitted_bytes)


def _held(live: Iterable[Contributor]) -> int:
    return sum(contributor.size_bytes for contributor in live)


# Said of a cause that is larger than what it is to explain: of a peak, and of what is retained.
_OTHERS_WENT: Final = (
    " (more than the whole: something else is gone, or the peak is at another moment)",
    " (more than the whole: something else is gone)",
)


def _with_cause(finding: Finding, result: Result) -> Finding:
    """Add what grew most, or without a baseline what is largest."""
    key, aside = finding.key, ""
    if finding.growths:
        growth = finding.growths[0]
        cause = growth.contributor
        size = ("at least " if growth.at_least else "") + format_change(growth.size_bytes)
        # A tenth more or less is what comes and goes beside it.
        if 10 * growth.size_bytes > 11 * finding.excess_bytes:
            aside = _OTHERS_WENT[key in RETAINED]
    elif live := contributors(result, key):
        cause, size = live[0], f"largest {format_size(live[0].size_bytes)}"
    else:
        return finding
    return replace(finding, cause=f"{size} {origin(cause, key)}{aside}", causes=(cause,))


def origin(contributor: Contributor, key: str = "total") -> str:
    """Return ``from aten::mm in model.fc (net.py:12)``; names the category unless ``key`` does."""
    parts = []
    if key != contributor.category.value:
        parts.append(f"of {words(contributor.category.value)}")
    if contributor.operator:
        parts.append(f"from {contributor.operator}")
    if contributor.module:
        parts.append(f"in {contributor.module}")
    if contributor.source:
        parts.append(f"({contributor.source})")
    return " ".join(parts) or "of unknown origin"


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


def sentences(verdicts: Iterable[Verdict], name_regions: bool = True) -> tuple[str, ...]:
    """Return everything that failed, the first line of the failure first.

    A tensor that is left behind is part of what is retained, of its category's peak and of the
    total. The first of those sentences names it; the others become one, which follows.
    """
    told: dict[object, list[str]] = {}
    for verdict in verdicts:
        where = verdict.where if name_regions else ""
        for finding in verdict.findings:
            known = told.setdefault(_shared_cause(finding), [])
            known.append(where + (finding.numbers if known else finding.shown))
    return tuple(sentence for known in told.values() for sentence in _in_two(*known))


def _shared_cause(finding: Finding) -> object:
    """What the finding has in common with others of one cause; itself if it names none."""
    return finding.causes[0].told_as if finding.causes else id(finding)


def _in_two(first: str, *others: str) -> Iterable[str]:
    yield first
    if others:
        yield f"of the same cause, {'; '.join(others)}"
