"""Results typed by hand, as the analysis would give them."""

from __future__ import annotations

from pytest_torchmem.values.contributors import (
    Category,
    CategoryBytes,
    Contributor,
    Phase,
    Source,
)
from pytest_torchmem.values.findings import Finding, FindingKind
from pytest_torchmem.values.results import Peak, Result, Retained


def contributor(
    size_bytes: int, category: Category = Category.ACTIVATION, operator: str = "aten::mm"
) -> Contributor:
    source = Source("src/net.py", 3, "forward")
    return Contributor(category, size_bytes, 2, operator, "net.fc", source, Phase.FORWARD)


def result(*live: Contributor, name: str = "", retained: tuple[Contributor, ...] = ()) -> Result:
    """A window in which all that is listed was live at the peak of everything."""
    amounts, left = _amounts(live), _amounts(retained)
    peak = Peak(amounts.total, 1, amounts, amounts, live, live)
    return Result(name, "cpu", False, peak, Retained(left.total, left, retained))


def failed(*sentences: str, kind: FindingKind = FindingKind.GROWN) -> tuple[Finding, ...]:
    """Findings that read so."""
    return tuple(Finding(kind, "total", sentence) for sentence in sentences)


def _amounts(live: tuple[Contributor, ...]) -> CategoryBytes:
    sizes: dict[Category, int] = {}
    for one in live:
        sizes[one.category] = sizes.get(one.category, 0) + one.size_bytes
    return CategoryBytes.of(sizes)
