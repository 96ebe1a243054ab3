"""A result held against limits or against a baseline: passed, or what grew and by how much."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Final

from pytest_torchmem.analysis.judge import causes
from pytest_torchmem.analysis.judge.causes import LostByOrigin
from pytest_torchmem.analysis.judge.counters import there_before
from pytest_torchmem.analysis.judge.differences import number_differences, origin_of
from pytest_torchmem.analysis.judge.lines import ChangedAt, by_line, cause_first, largest_line
from pytest_torchmem.values.baseline import (
    RESERVED,
    TOTAL,
    Allowance,
    BaselineEntry,
    Change,
    ChangedNumber,
    Numbers,
    Reference,
    overall,
)
from pytest_torchmem.values.contributors import Category, Contributor, Source
from pytest_torchmem.values.findings import (
    COUNTERS,
    LIMIT_KEYS,
    RETAINED,
    CodeLines,
    Difference,
    DifferenceKind,
    Finding,
    FindingKind,
    LineDifference,
    is_estimated,
    words,
)
from pytest_torchmem.values.measured import Window
from pytest_torchmem.values.results import Result
from pytest_torchmem.values.units import format_apart, format_change, format_share, format_size

# A line that made one in so many of the growth is one that made the total grow.
_EXPLAINS: Final = 4
# What grew by one in so many of a line's bytes, and was there first, may have made it larger.
_READS: Final = 50
_FEW_NOTES: Final = 5
_NO_ORIGINS: Final = (
    "; the cause is not known: the .origins file beside the baseline lacks this entry, and an "
    "update writes it"
)
_SAME_CODE: Final = (
    "; no code of the project has changed since it was stored: --torchmem-repeat=5 says whether it "
    "is stable"
)
_VERBS: Final = {
    "retained": "retained",
    "net_retained": "retained a net",
    "growth": "grew by",
    RESERVED: "the body reserved",
}
# Numbers that memory which was left alive unseen would be part of, whatever it is for.
_MAY_LACK: Final = ("total", Category.UNKNOWN.value, "retained", "net_retained")


@dataclass(frozen=True, slots=True)
class CodeChanges:
    """The changes of code since a baseline was stored; each is looked up when it is asked for.

    Attributes:
        changed_at: The lines that were changed together with a line; None for one that was not.
        places: Each change.
        now_at: Where a line of then is now.
        is_same: No code at all has changed, as far as that is known.
    """

    changed_at: ChangedAt = lambda source: None
    places: Callable[[], Sequence[CodeLines]] = tuple
    now_at: Callable[[Source], Source] = lambda source: source
    is_same: Callable[[], bool] = lambda: False


NOTHING_KNOWN: Final = CodeChanges()


def judge_limits(result: Result, limits: Mapping[str, int]) -> tuple[Finding, ...]:
    """Return a finding for each limit that is exceeded or that no reading can answer.

    A body without tensors has nothing of which a peak could be read, and leaves nothing behind.
    """
    is_blind = bool(result.blind_spots or result.unexplained_bytes)
    if limits and result.peak.total == 0 and (is_blind or set(limits) - set(RETAINED)):
        return (_nothing_read(result, "a limit needs a reading to compare with"),)
    findings = (_judge_limit(result, key, limit_bytes) for key, limit_bytes in limits.items())
    return rank(finding for finding in findings if finding is not None)


def judge_blind_spots(result: Result) -> tuple[Finding, ...]:
    """Return a finding for each thing that the figures may lack, for those who cannot accept it."""
    return tuple(
        Finding(FindingKind.UNSEEN, "total", f"not everything was seen: {spot}")
        for spot in result.blind_spots
    )


def judge_baseline(
    result: Result, reference: Reference, allowance: Allowance, code: CodeChanges = NOTHING_KNOWN
) -> Window:
    """Compare the peak, each category's own peak and what was retained with a stored entry.

    ``code`` says which lines have changed since; it is asked only about what grew, as the stored
    entry is asked what its numbers were made of. Bytes that only count in another category than
    before are a note: a category grew by what is new in it.
    """
    stored, environment = reference.numbers, reference.environment
    if result.peak.total == 0 and stored.total > 0:
        missing = _nothing_read(result, f"the baseline has {format_size(stored.total)}")
        return Window(result, (missing,), Change.NOT_COMPARED, stored.total)
    changes: set[Change] = set()
    findings: list[Finding] = []
    sides = _Sides(result, reference, code)
    measured = Numbers.measured(result)
    numbers = [n for n in stored.changes(measured) if n.by_bytes]
    # What grew first: it says what a category that shrank has lost to another.
    numbers.sort(key=lambda number: number.by_bytes < 0)
    moved: list[Difference] = []
    shrunk: list[ChangedNumber] = []
    for number in numbers:
        allowed = stored.allowance(number.key, allowance)
        elsewhere_bytes = stored.by_workspaces(number.key, measured)
        change = _change_less_moved(number, elsewhere_bytes, allowed, sides, moved)
        changes.add(change)
        if change is Change.SHRUNK:
            shrunk.append(number)
        if change is Change.GROWN:
            findings.append(_grown_finding(number, sides, allowed))
    if moved:
        notes = dict.fromkeys((*result.notes, *map(causes.label_note, moved[:_FEW_NOTES])))
        result = replace(result, notes=tuple(notes))
    change, ranked = overall(changes), rank(findings)
    if ranked and stored.total and not sides.then.live:
        first, *rest = ranked
        ranked = (replace(first, others=first.others + _NO_ORIGINS), *rest)
    changed, notice = ChangedNumber(TOTAL, stored.total, result.peak.total), ""
    lines: tuple[LineDifference, ...] = ()
    if change is Change.GROWN:
        changed = next(number for number in numbers if number.key == ranked[0].key)
        lines = ranked[0].lines
    if change is Change.SHRUNK:
        # The first of equal savings: the total where that shrank as much as a part of it. What is
        # reserved follows it, in large steps.
        changed = min(shrunk, key=lambda number: (number.key == RESERVED, number.by_bytes))
        notice = _told_saving(changed)
    return Window(
        result,
        ranked,
        change,
        stored.total,
        notice,
        reference=environment,
        changed=changed,
        lines=lines,
    )


def _grown_finding(number: ChangedNumber, sides: _Sides, allowed: Allowance) -> Finding:
    """Return what is said of a number that grew, with what grew."""
    result, environment = sides.result, sides.reference.environment
    told_as = f"the baseline{f' for {environment}' if environment else ''} of {{}}"
    finding = Finding(
        FindingKind.GROWN,
        number.key,
        _exceeds(result, number.key, number.after_bytes, number.before_bytes, told_as),
        number.by_bytes,
        lines=sides.lines(number.key, number.by_bytes),
        allowed=allowed.text_for(number.before_bytes),
    )
    return _with_cause(finding, result)


def _change_less_moved(
    number: ChangedNumber,
    elsewhere_bytes: int,
    allowed: Allowance,
    sides: _Sides,
    moved: list[Difference],
) -> Change:
    """Return how a number changed by more than what other categories gave to it or took.

    ``elsewhere_bytes`` of the change are told by another number. What a category that grew got is
    added to ``moved``.
    """
    change = allowed.compare(number.after_bytes - elsewhere_bytes, number.before_bytes)
    if number.key == RESERVED:
        # The segments follow the peak: a growth of their own is what goes beyond its. A body that
        # finds room reserves less.
        more_bytes = sides.now.total - sides.reference.numbers.total
        more_bytes -= sides.now.reserved.free_before if change is Change.SHRUNK else 0
        still = allowed.compare(number.after_bytes - more_bytes, number.before_bytes)
        return change if still is change else Change.WITHIN
    if change is Change.GROWN:
        labels = causes.moved_labels(sides.lines(number.key, number.by_bytes))
        moved += labels
        got_bytes = sum(part.size_bytes for part in labels)
        still = allowed.compare(number.after_bytes - got_bytes, number.before_bytes)
        return change if still is change else Change.WITHIN
    if change is Change.SHRUNK:
        lost_bytes = sum(p.size_bytes for p in moved if p.was and p.was.value == number.key)
        still = allowed.compare(number.after_bytes + lost_bytes, number.before_bytes)
        return change if still is change else Change.WITHIN
    return change


def judge_shrinking(compared: Window) -> tuple[Finding, ...]:
    """Return a finding where a number is below its baseline, for those who want that to fail."""
    if not compared.notice:
        return ()
    return (Finding(FindingKind.SHRUNK, "total", f"{compared.notice}: tighten it"),)


def _told_saving(saved: ChangedNumber) -> str:
    """Return ``activation peaked at 70.0 MiB, 30 % below the baseline of 100.0 MiB``."""
    measured, baseline = format_apart(saved.after_bytes, saved.before_bytes)
    share = f"{-saved.by_bytes / saved.before_bytes:.0%}".replace("%", " %")
    verb = _VERBS.get(saved.key) or f"{words(saved.key)} peaked at"
    return f"{verb} {measured}, {share} below the baseline of {baseline}"


def rank(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort findings, the most telling first.

    What could not be judged leads, because nobody knows how large it is. Next is a total that grew:
    it is known what it grew by, and the rest are parts of it. Of these parts the one with the most
    telling cause comes first. A total over a limit, of which only the composition is known, says
    less than its parts, and so does a category that only took over what another had. What is left
    behind over a limit leads before a total that grew by the same line: that is a consequence.
    """
    found = list(findings)
    leaking = _leaking(found)
    leads = sorted((f.lines[0] for f in found if f.lines), key=lambda line: -line.size_bytes)
    excess_bytes = max((f.excess_bytes for f in found), default=0)
    order = [id(lead) for lead in cause_first(leads, excess_bytes)]

    def telling(finding: Finding) -> tuple[int, int, int, int]:
        place = order.index(id(finding.lines[0])) if finding.lines else len(order)
        key = LIMIT_KEYS.index(finding.key)
        return (_tier(finding, leaking), place, -finding.excess_bytes, key)

    return tuple(sorted(found, key=telling))


def _leaking(findings: Sequence[Finding]) -> bool:
    """True where a line that leaves too much behind is one that made the total grow, too."""
    grown = [f for f in findings if f.key == TOTAL and f.kind is FindingKind.GROWN]
    lines = {
        line.parts[0].contributor.told_line
        for finding in grown
        for line in finding.lines
        if _EXPLAINS * line.size_bytes >= finding.excess_bytes
    }
    return any(f.causes and f.causes[0].told_line in lines for f in findings if _is_left(f))


def _is_left(finding: Finding) -> bool:
    return finding.key in RETAINED and finding.kind is FindingKind.OVER_LIMIT


def _tier(finding: Finding, leaking: bool) -> int:
    if not finding.kind.has_excess:
        return 0
    if leaking and _is_left(finding):
        return 1
    if finding.lines and finding.lines[0].parts[0].kind is DifferenceKind.RELABELLED:
        return 5
    if finding.key == "total":
        return 2 if finding.kind is FindingKind.GROWN else 4
    return 4 if finding.key in COUNTERS else 3


def _judge_limit(result: Result, key: str, limit_bytes: int) -> Finding | None:
    reading = _reading(result, key)
    if isinstance(reading, tuple):
        return _not_judged(reading[0], key, limit_bytes, reading[1])
    if reading <= limit_bytes:
        if key == "total" and result.interval and (result.at_most or 0) > limit_bytes:
            return _not_judged(FindingKind.UNSEEN, key, limit_bytes, result.interval)
        return _judge_unseen(result, key, limit_bytes, limit_bytes - reading)
    numbers = _exceeds(result, key, reading, limit_bytes, "the limit of {}", is_limit=True)
    finding = Finding(FindingKind.OVER_LIMIT, key, numbers, reading - limit_bytes)
    return _with_cause(finding, result)


def _judge_unseen(result: Result, key: str, limit_bytes: int, margin_bytes: int) -> Finding | None:
    """Return a finding if memory that nobody saw may be more than is left below a limit."""
    unseen_bytes = result.unexplained_bytes if key in _MAY_LACK else 0
    if unseen_bytes <= margin_bytes:
        return None
    return _not_judged(
        FindingKind.UNSEEN,
        key,
        limit_bytes,
        f"another thread or another allocator made {format_size(unseen_bytes)} unseen, "
        f"and only {format_size(margin_bytes)} are left below the limit",
    )


def _not_judged(kind: FindingKind, key: str, limit_bytes: int, reason: str) -> Finding:
    limit = f"the limit of {format_size(limit_bytes)} on {words(key)}"
    return Finding(kind, key, f"{limit} cannot be judged: {reason}")


def _reading(result: Result, key: str) -> int | tuple[FindingKind, str]:
    """Return the measured bytes, or why there are none: the kind of the finding, and the reason."""
    if key == "total":
        return result.peak.total
    if key == "retained":
        return result.retained.total
    if key == "net_retained":
        return result.retained.net
    if key == "growth":
        return _growth_reading(result)
    if key in COUNTERS:
        counted: int | None = getattr(result.counters, key) if result.counters else None
        if counted is None:
            reason = f"nothing counted {key} bytes on {result.device}; limit the total"
        else:
            reason = f"the allocator of {result.device} counted no {key} bytes at all"
        return counted or (FindingKind.NO_COUNTER, reason)
    if key == Category.ACTIVATION.value and not result.has_backward:
        return (
            FindingKind.NO_ACTIVATION,
            "the body kept nothing for a backward pass, so it has no activation by definition; "
            "limit the total or temporary= instead",
        )
    return result.peak.by_category[key]


def _growth_reading(result: Result) -> int | tuple[FindingKind, str]:
    if result.growth is None:
        marked = "marked fewer than two steps; write"
        if result.steps:
            marked = "ended one step only (`break` ends none); let two end, as in"
        return (
            FindingKind.NO_STEPS,
            f"growth is what each step adds, and the body {marked} "
            "`for _ in torchmem.steps(4, warmup=1):` around the step",
        )
    return result.growth


def _nothing_read(result: Result, needed: str) -> Finding:
    return Finding(
        FindingKind.NO_READING,
        "total",
        f"the body used no memory on {result.device}: the reading is 0 B, but {needed}; "
        "is the work done on another device, or in another process or thread?",
    )


def _exceeds(
    result: Result,
    key: str,
    measured_bytes: int,
    reference_bytes: int,
    reference: str,
    *,
    is_limit: bool = False,
) -> str:
    measured, against = format_apart(measured_bytes, reference_bytes)
    # A limit counts what was there before, too.
    is_peak = key not in _VERBS or (key == RESERVED and is_limit)
    verb = f"{words(key)} peaked at" if is_peak else _VERBS[key]
    more = ""
    if key == "growth":
        more = " in most steps" if measured_bytes > result.mean_growth else " per step"
    if key == "net_retained" and result.retained.freed:
        made, freed = map(format_size, (result.retained.total, result.retained.freed))
        more = f" (made {made}, freed {freed} of before)"
    estimated = "an estimated " if is_estimated(result, key) else ""
    excess_bytes = measured_bytes - reference_bytes
    share = format_share(excess_bytes, reference_bytes)
    over = format_change(excess_bytes) + (f" ({share})" if share else "")
    return f"{verb} {estimated}{measured}{more}, {over} over {reference.format(against)}"


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
    at_own_peaks = result.peak.live_by_category or result.peak.live
    return tuple(c for c in at_own_peaks if c.category._value_ == key)


@dataclass(frozen=True)
class _Sides:
    """A result and its baseline, with what the comparisons of several numbers share."""

    result: Result
    reference: Reference
    code: CodeChanges

    @cached_property
    def now(self) -> BaselineEntry:
        return BaselineEntry.whole(self.result)

    @cached_property
    def then(self) -> BaselineEntry:
        """The stored entry, with the lines of its contributors where they are now."""
        entry = self.reference.entry
        live, at_peak_live, retained_live = (
            tuple(replace(c, source=self.code.now_at(c.source)) if c.source else c for c in side)
            for side in (entry.live, entry.at_peak_live, entry.retained_live)
        )
        return replace(entry, live=live, at_peak_live=at_peak_live, retained_live=retained_live)

    @cached_property
    def lost(self) -> LostByOrigin:
        return causes.lost_by_origin(self.now.live, self.then.live)

    def lines(self, key: str, excess_bytes: int) -> tuple[LineDifference, ...]:
        """Return what differs by line, the cause first; nothing without stored contributors."""
        now, entry = self.now, self.then
        if entry.total and not entry.live:
            return ()
        found: Sequence[Difference] = number_differences(now, entry, key)
        if key not in (TOTAL, "retained"):
            found = causes.tell_labels(found, self.lost)
        return cause_first(by_line(found, self.code.changed_at), excess_bytes)


def with_changes(
    findings: tuple[Finding, ...], code: CodeChanges, reference: Reference
) -> tuple[Finding, ...]:
    """Say in the first sentence what has changed, where that is not the line of its cause.

    A line that was edited and that makes more of what it made before may be larger for another
    reason: a number in it was changed, and so was the fixture that it reads.
    """
    if not findings or not findings[0].causes:
        return findings
    first, *others = findings
    source = first.causes[0].source
    own = code.changed_at(source) if source else None
    if own and _explains_itself(first, reference):
        return findings
    made = (*(c for line in first.lines for c in line.contributors), *first.causes)
    apart = [p for p in code.places() if own is None or not _are_one(p, own, code.changed_at)]
    places = causes.nearest_first(made, apart)
    if not places:
        if own is None and first.kind is FindingKind.GROWN and code.is_same():
            first = replace(first, others=first.others + _SAME_CODE)
        return (first, *others)
    told = first.others + causes.changes_text(places, is_beside=own is not None)
    place = places[0] if len(places) == 1 and own is None else first.place
    return (replace(first, others=told, changed_since=places, place=place), *others)


def _are_one(place: CodeLines, own: CodeLines, changed_at: ChangedAt) -> bool:
    """True where a place begins in changed lines, or where all between it and them has changed."""
    if own.has(place) or place.file != own.file or place.first > own.first:
        return own.has(place)
    between = range(place.first, own.first)
    return all(changed_at(Source(own.file, line, "")) for line in between)


def _explains_itself(finding: Finding, reference: Reference) -> bool:
    """True where a line makes what nobody made before, and nothing that it reads is larger."""
    if not finding.lines or finding.key in RETAINED:
        return False
    lead, *rest = finding.lines
    made_before = {origin_of(c) for c in reference.entry.live}
    new = [
        part
        for part in lead.parts
        if part.kind is DifferenceKind.NEW and origin_of(part.contributor) not in made_before
    ]
    first = min((part.contributor.order for part in new), default=0)
    earlier = (p for line in rest for p in line.parts if p.contributor.order < first)
    old = (part for part in lead.parts if part not in new)
    # Of what is as large as before nothing else is larger.
    larger = (p for p in (*earlier, *old) if 4 * p.size_bytes > p.contributor.size_bytes)
    return bool(new) and not any(p.size_bytes * _READS > lead.size_bytes for p in larger)


def _with_cause(finding: Finding, result: Result) -> Finding:
    """Add what a number grew by, or without a baseline what is largest."""
    lines, grown_bytes = finding.lines, finding.excess_bytes
    if finding.key == "growth" and result.grown and result.growth:
        lines, grown_bytes = _per_step(result), result.growth
    if lines and lines[0].size_bytes > 0:
        cause = causes.cause_of(lines, grown_bytes, finding.key)
        return replace(
            finding,
            lines=tuple(sorted(finding.lines, key=lambda line: line is not cause.lead)),
            cause=cause.text,
            causes=cause.contributors,
            others=cause.others,
            place=cause.place,
        )
    before, before_bytes = "", 0
    if finding.key in COUNTERS and result.counters:
        before, before_bytes = there_before(finding, result.counters)
        if before_bytes >= finding.excess_bytes:  # then no line of the body is a cause
            reading: int = getattr(result.counters, finding.key)
            added = format_size(reading - before_bytes)
            return replace(finding, cause=f"{before}the body added {added}")
    live = contributors(result, finding.key)
    own = tuple(c for c in live if c.category is not Category.WORKSPACE)
    largest = largest_line(own or live)
    if not largest:
        return finding
    size_bytes = sum(c.size_bytes for c in largest)
    text = f"{before}largest {format_size(size_bytes)} {causes.told_by_line(largest, finding.key)}"
    workspace_bytes = sum(c.size_bytes for c in live) - sum(c.size_bytes for c in own)
    if own and workspace_bytes:
        text += f", beside {format_size(workspace_bytes)} of workspace"
    source = largest[0].source
    place = CodeLines(source.file, source.line, source.line) if source else None
    return replace(finding, cause=text, causes=largest, place=place)


def _per_step(result: Result) -> tuple[LineDifference, ...]:
    """Return what each line adds in one step."""
    count = len(result.steps) - 1
    growths = (
        Difference(replace(c, size_bytes=size_bytes), size_bytes, DifferenceKind.GROWN)
        for c in result.grown
        if (size_bytes := -(-c.size_bytes // count))
    )
    return cause_first(by_line(growths), result.growth or 0)


def judge_spread(results: Sequence[Result], allowance: Allowance) -> tuple[Finding, ...]:
    """Return a finding where runs of one body differ by more than a comparison would allow."""
    runs = [Numbers.measured(result) for result in results]
    least = min(runs, key=lambda numbers: numbers.total)
    spreads = []
    for key in least.by_key:
        values = [numbers.by_key[key] for numbers in runs]
        own = [numbers.by_key[key] - least.by_workspaces(key, numbers) for numbers in runs]
        allowed = least.allowance(key, allowance)
        excess_bytes = max(own) - min(own) - allowed.bytes_for(min(own))
        if excess_bytes > 0:
            spreads.append((excess_bytes, key, values, allowed))
    if not spreads:
        return ()
    excess_bytes, key, values, allowance = max(spreads, key=lambda spread: spread[0])
    shown = ", ".join(format_size(value) for value in values)
    numbers = (
        f"{words(key)} is not stable, so nothing is stored: {len(values)} runs had {shown}, "
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
