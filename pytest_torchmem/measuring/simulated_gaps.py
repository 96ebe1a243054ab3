"""A result, and what a simulated GPU could not know of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from pytest_torchmem.simulate.gaps import (
    Gaps,
    bounded_scratch,
    inexact_reads_sentence,
    lower_bound_sentences,
)
from pytest_torchmem.values.results import Result


def with_gaps(
    result: Result, before: Gaps, most_with: Callable[[Iterable[tuple[int, int]]], int]
) -> Result:
    """Return a result that says what could not be known since ``before`` was counted.

    ``most_with`` returns the most that the peak can be where scratch of libraries was there, too: a
    time and a size for each call. Of a region only that is said, and nothing of a real device.
    """
    if not before.scratch:
        return result
    lower = lower_bound_sentences(before)
    if not lower:
        scratch = bounded_scratch(before, result.device)
        result = replace(result, at_most=most_with(scratch) if scratch else result.peak.total)
    told = [result.interval and f"{result.interval}: {_WHY}"]
    if not result.name:
        told += [*lower, inexact_reads_sentence(before)]
    return replace(result, blind_spots=(*result.blind_spots, *filter(None, told)))


_WHY = (
    "a GPU decides how much memory cuFFT takes for itself, which is at most 8 complex elements for "
    "each that it transforms"
)
