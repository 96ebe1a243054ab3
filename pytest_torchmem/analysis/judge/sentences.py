"""What failed, in sentences: each cause once, however many numbers it made too large."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_torchmem.values.findings import Finding, Verdict


def sentences(verdicts: Iterable[Verdict], name_regions: bool = True) -> tuple[str, ...]:
    """Return everything that failed, the first line of the failure first.

    A tensor that is left behind is part of what is retained, of its category's peak and of the
    total. The first of those sentences names it; the others become one, which follows.
    """
    told: dict[object, list[str]] = {}
    for verdict in verdicts:
        where = verdict.where if name_regions else ""
        for finding in verdict.findings:
            known = told.setdefault(_cause(finding), [])
            known.append(where + (finding.numbers if known else finding.shown))
    return tuple(sentence for known in told.values() for sentence in _in_two(*known))


def _cause(finding: Finding) -> object:
    """What the finding has in common with others of one cause; itself if it names none."""
    return finding.causes[0].told_as if finding.causes else id(finding)


def _in_two(first: str, *others: str) -> Iterable[str]:
    yield first
    if others:
        yield f"of the same cause, {'; '.join(others)}"
