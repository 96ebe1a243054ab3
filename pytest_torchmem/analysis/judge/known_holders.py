"""Known holders: what a project holds on to and knows of, so that no limit counts it again."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from pytest_torchmem.analysis.judge.causes import Held, KnownHolder, known_by, made_by
from pytest_torchmem.analysis.judge.verdict import judge_limits
from pytest_torchmem.values.contributors import CategoryBytes, Contributor
from pytest_torchmem.values.findings import RETAINED, Finding
from pytest_torchmem.values.results import Result
from pytest_torchmem.values.units import format_size


def without_known(
    result: Result, held: Iterable[Held], known: Sequence[KnownHolder]
) -> tuple[Result, dict[str, int]]:
    """Return a result without what known holders hold, and the bytes of each by its pattern.

    What a step adds is known where known holders hold all that is left of its origin.
    """
    excused: Counter[str] = Counter()
    known_bytes: Counter[object] = Counter()
    all_known: dict[object, bool] = defaultdict(lambda: True)
    for each in held:
        pattern = known_by(each.holder, known)
        origin = made_by(each.contributor)
        all_known[origin] = all_known[origin] and bool(pattern)
        if pattern:
            excused[pattern] += each.holder.size_bytes
            if each.at_end:
                known_bytes[each.contributor.told_as] += each.holder.size_bytes
    return _reduced(result, known_bytes, all_known), dict(excused)


def _reduced(
    result: Result, known_bytes: Mapping[object, int], all_known: Mapping[object, bool]
) -> Result:
    retained = result.retained
    # The list of contributors may be cut; the sums are not.
    live = _less(retained.live, known_bytes)
    total = retained.total - sum(known_bytes.values())
    grown = [c for c in result.grown if not all_known.get(made_by(c), False)]
    known_growth = sum(c.size_bytes for c in result.grown) - sum(c.size_bytes for c in grown)
    steps = (*result.steps[:-1], result.steps[-1] - known_growth) if result.steps else ()
    return replace(
        result,
        retained=replace(retained, total=total, live=live, by_category=CategoryBytes()),
        grown=tuple(grown),
        steps=steps,
    )


def _less(
    live: Sequence[Contributor], known_bytes: Mapping[object, int]
) -> tuple[Contributor, ...]:
    """Return contributors without their known bytes, the largest first."""
    left = (replace(c, size_bytes=c.size_bytes - known_bytes.get(c.told_as, 0)) for c in live)
    return tuple(sorted((c for c in left if c.size_bytes > 0), key=lambda c: -c.size_bytes))


def judge_unknown(
    result: Result, limits: Mapping[str, int], held: Iterable[Held], known: Sequence[KnownHolder]
) -> tuple[tuple[Finding, ...], dict[str, int]]:
    """Hold what unknown holders retain against the limits on that.

    Returns the findings, and the bytes that known holders hold, by pattern.
    """
    reduced, excused = without_known(result, held, known)
    on_retained = {key: size for key, size in limits.items() if key in RETAINED}
    findings = judge_limits(reduced, on_retained)
    known_bytes = result.retained.total - reduced.retained.total
    beside = f"; known holders have {format_size(known_bytes)} more" if known_bytes else ""
    told = (f if f.key == "growth" else replace(f, numbers=f.numbers + beside) for f in findings)
    return tuple(told), excused
