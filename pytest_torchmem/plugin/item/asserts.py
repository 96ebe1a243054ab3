"""What a failed ``assert forward.peak.activation <= 3 * MiB`` says beside two long numbers.

Results are plain ints, so nothing about a number tells that it is bytes; that a measured body has
just read one of that value does. See docs/decisions/0012-readable-asserts.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from pytest_torchmem.values.contributors import CategoryBytes
from pytest_torchmem.values.findings import words
from pytest_torchmem.values.results import Result
from pytest_torchmem.values.units import KiB, format_apart, format_size

_ORDERS: Final = ("<", "<=", ">", ">=", "==", "!=")
_TOLD: Final = 3
"""How many results with such a number are told, and of each how many categories."""


def readable(op: str, left: object, right: object, results: Iterable[Result]) -> list[str] | None:
    """Return a comparison of two numbers of bytes in lines for people; None if it is none.

    It is one when either number is in ``results``. Small ones read well as they are. pytest drops
    what it would say of where the numbers come from, so that is told, too.
    """
    if op not in _ORDERS or type(left) is not int or type(right) is not int:
        return None
    among = [result for result in results if {left, right} & {*_sizes(result)}]
    if not among or max(left, right) < KiB:
        return None
    one, other = format_apart(left, right)
    apart = f", {format_size(abs(left - right))} apart" if left != right else ""
    return [f"{left} {op} {right}", f"{one} {op} {other}{apart}", *map(_told, among[:_TOLD])]


def _sizes(result: Result) -> Iterator[int]:
    """Yield every number of a result that is not 0."""
    sizes = [result.peak.total, result.retained.total, result.growth]
    for amounts in (result.peak.by_category, result.peak.at_peak, result.retained.by_category):
        sizes += [amounts.total, *(size for _, size in amounts.items())]
    yield from filter(None, sizes)


def _told(result: Result) -> str:
    peak = f"peak {format_size(result.peak.total)}{_largest(result.peak.by_category)}"
    retained = f"retained {format_size(result.retained.total)}"
    growth = "" if result.growth is None else f", growth {format_size(result.growth)} per step"
    left = _largest(result.retained.by_category)
    return f"{result.name!r}: {peak}, {retained}{left}{growth}"


def _largest(amounts: CategoryBytes) -> str:
    ranked = sorted(amounts.items(), key=lambda pair: -pair[1])[:_TOLD]
    told = ", ".join(f"{words(c.value)} {format_size(size)}" for c, size in ranked if size)
    return f" ({told})" if told else ""
