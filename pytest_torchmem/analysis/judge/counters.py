"""Causes of what an allocator counts beyond the tensors that live: free and kept, or waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Protocol

from pytest_torchmem.analysis.judge.causes import told_by_line
from pytest_torchmem.analysis.judge.lines import largest_line
from pytest_torchmem.values.contributors import Category, Contributor
from pytest_torchmem.values.findings import COUNTERS, CodeLines, Finding, FindingKind
from pytest_torchmem.values.results import Counters, ReservedSegment, Result
from pytest_torchmem.values.units import format_size

_WAITING: Final = "had been freed and waited for another stream that still used it"
_POOLED: Final = "was free in the private pools of CUDA graphs"
_SPLIT: Final = "was free in segments of which other parts were in use"
_CACHED: Final = "was free and kept by the cache"
_SMALL: Final = 50
_MUCH: Final = 4
_TAILS: Final = "was the ends of blocks, too small to be split off"


class Allocated(Protocol):
    """Answers what a window allocated."""

    def freed(self) -> Sequence[Contributor]:
        """Return what it allocated and freed: the bytes that no tensor holds are of that."""

    def reserved(self) -> Sequence[tuple[ReservedSegment, Contributor]]:
        """Return the segments that it had reserved, each with what for and the bytes free in it."""


def told_by_allocator(
    findings: Sequence[Finding], result: Result, source: Allocated
) -> tuple[Finding, ...]:
    """Name the state of a counter's bytes where that, and not what lives, is what is too much.

    ``source`` is asked only about a counter over its limit or its baseline.
    """
    counters = result.counters
    return tuple(
        _with_segment(finding, counters, source)
        if counters and finding.key in COUNTERS and finding.kind.has_excess
        else finding
        for finding in findings
    )


def _with_segment(finding: Finding, counters: Counters, source: Allocated) -> Finding:
    excess_bytes = finding.excess_bytes
    before, before_bytes = there_before(finding, counters)
    if before_bytes >= excess_bytes:
        return finding
    segments = source.reserved() if finding.key == "reserved" else ()
    parts = _parts(finding.key, counters, segments)
    parts = {words: size_bytes for words, size_bytes in parts.items() if size_bytes > 0}
    if not parts or 2 * (sum(parts.values()) + before_bytes) < excess_bytes:
        return finding
    words, size_bytes = max(parts.items(), key=lambda part: part[1])
    text = f"{before}at least {format_size(size_bytes)} of that {words}"
    if words == _TAILS:  # those of blocks that are in use
        cause = finding.cause.removeprefix(before)
        return replace(finding, cause=f"{text}; {cause}" if cause else text)
    others_bytes = sum(parts.values()) - size_bytes
    others = ""
    if _SMALL * others_bytes >= size_bytes:
        others = f", {format_size(others_bytes)} more held no tensor either"
    reserved = _reserved_for(segments, words == _POOLED)
    line = reserved or largest_line(source.freed())
    if not line:
        return replace(finding, cause=text, causes=(), others=others, place=None)
    made, at = format_size(sum(c.size_bytes for c in line)), line[0].source
    if reserved:
        # A segment has no category.
        told = told_by_line([replace(c, category=Category.UNKNOWN) for c in line], "unknown")
        text += f"; segments reserved {told} had {made} that no tensor held"
    else:
        text += f"; the body allocated and freed {made} in all {told_by_line(line)}"
    return replace(
        finding,
        cause=text,
        causes=line,
        others=others,
        place=CodeLines(at.file, at.line, at.line) if at else None,
    )


def there_before(finding: Finding, counters: Counters) -> tuple[str, int]:
    """Return what a cause begins with where much was there before the body, and its bytes.

    A counter holds what fixtures and other tests have on the device. A baseline has it, too.
    """
    before_bytes = counters.before(finding.key)
    if finding.kind is not FindingKind.OVER_LIMIT or _MUCH * before_bytes < finding.excess_bytes:
        return "", 0
    words = f"of that was {finding.key} before the body began, for fixtures or for what ran earlier"
    return f"{format_size(before_bytes)} {words}; ", before_bytes


def _reserved_for(
    segments: Sequence[tuple[ReservedSegment, Contributor]], is_private: bool
) -> tuple[Contributor, ...]:
    """Return what most of the free bytes were reserved for."""
    return largest_line(
        c for segment, c in segments if c.size_bytes and segment.is_private >= is_private
    )


def _parts(
    key: str, counters: Counters, segments: Sequence[tuple[ReservedSegment, Contributor]]
) -> dict[str, int]:
    """Return how much of a counter holds no tensor, by why.

    Each counter's peak may be at another moment, so a difference of two is the least that it was.
    What the segments had free is of one moment. Where they are not all, counters tell the rest.
    """
    parts = {_TAILS: max(0, counters.allocated - counters.requested)}
    if key == "allocated":
        return parts
    parts[_WAITING] = counters.active - counters.allocated
    if key == "active":
        return parts
    free = {_POOLED: 0, _SPLIT: 0, _CACHED: 0}
    for segment, held in segments:
        is_whole = held.size_bytes == segment.size_bytes
        words = _POOLED if segment.is_private else _CACHED if is_whole else _SPLIT
        free[words] += held.size_bytes
    # No tensor holds the end of a block in use either, nor a block that waits.
    free[_SPLIT] = max(0, free[_SPLIT] - parts[_TAILS])
    waiting_bytes = parts[_WAITING]
    for words in (_CACHED, _SPLIT):
        taken = min(free[words], waiting_bytes)
        free[words] -= taken
        waiting_bytes -= taken
    rest = max(0, counters.reserved - counters.active - sum(free.values()))
    split = min(max(0, counters.split - free[_SPLIT]), rest)
    free[_SPLIT] += split
    free[_CACHED] += rest - split
    return {**parts, **free}
