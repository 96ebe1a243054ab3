"""The measurements of a body that ended with an exception of its own.

They are held against nothing, since it did not come to its end. They are worth having where
a report is asked for, and where memory itself ran out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pytest

from pytest_torchmem.analysis.judge.causes import origin
from pytest_torchmem.report.text.tables import live_table
from pytest_torchmem.values.contributors import Contributor
from pytest_torchmem.values.results import Result
from pytest_torchmem.values.units import format_size

_TEXT_LENGTH: Final = 200
_NAMED: Final = 5
# torch's exception for a GPU, and what its allocator for the CPU says; neither needs an import.
_OUT_OF_MEMORY: Final = ("OutOfMemoryError", "MemoryError")
_CPU_TEXT: Final = "DefaultCPUAllocator"

#: Said of the numbers of a body that did not come to its end.
UNTIL_THEN: Final = (
    "the body did not come to its end: the numbers go up to its exception, which keeps the "
    "variables of its frames alive"
)

#: Said of a body that was not recorded when its memory ran out.
COUNTED_OUT_OF_MEMORY: Final = (
    "this run only read the allocator's counters; --torchmem-level=full records what is live"
)


def is_failure(error: BaseException) -> bool:
    """Return whether a test that ends with ``error`` has failed: not for a skip or an interrupt."""
    skips = type(error).__name__ == "SkipTest"  # unittest's, which pytest takes for its own
    return isinstance(error, Exception | pytest.fail.Exception) and not skips


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocator ended the body."""
    names = {cls.__name__ for cls in type(error).__mro__}
    on_cpu = isinstance(error, RuntimeError) and _CPU_TEXT in str(error)
    return on_cpu or not names.isdisjoint(_OUT_OF_MEMORY)


def raised(error: BaseException) -> str:
    """Return an exception on one line, cut where it is long: ``AssertionError: assert 1 == 2``."""
    name = type(error).__name__ if isinstance(error, Exception) else "failed"
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    text = f"{name}: {first}" if first else name
    return text if len(text) <= _TEXT_LENGTH else text[: _TEXT_LENGTH - 3] + "..."


def out_of_memory_sentences(result: Result, live: Sequence[Contributor]) -> tuple[str, ...]:
    """Return what to say of a body that ran out of memory: how much was live, and what.

    ``live`` is what was live then; where that is not known, the peak until then stands for it.
    """
    when = "" if live else " at the most"
    named = live or result.peak.live
    held_bytes = sum(c.size_bytes for c in live) if live else result.peak.total
    if not held_bytes:
        return (
            f"ran out of memory while the body held none on {result.device}: one allocation was "
            "too large by itself, or others hold the memory, or it was another device's",
        )
    first = f"ran out of memory on {result.device} with {format_size(held_bytes)} live{when}"
    if not named:
        return (first,)
    causes = [f"{format_size(c.size_bytes)} {origin(c)}" for c in named[:_NAMED]]
    return (f"{first}: largest {causes[0]}", *(f"also live: {cause}" for cause in causes[1:]))


def out_of_memory_section(
    sentences: Sequence[str], live: Sequence[Contributor], timeline: Sequence[str], width: int
) -> str:
    """Return what pytest shows below the traceback."""
    lines = [sentences[0]]
    if timeline:
        lines += ["", "footprint, change by change:", *timeline]
    if live:
        lines += ["", "live then:", *live_table(live, width)]
    return "\n".join(lines)
