"""The estimates that a test body makes, and which of the test's limits and baselines they answer.

A test's markers say what its code may need, whoever tells the number: they hold for the body as
measured and for each estimate made in it. An estimate has a name that ends in the word, and so has
its baseline entry: it is never compared with a measured number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from pytest_torchmem.values.baseline import Allowance
from pytest_torchmem.values.errors import MarkerError, is_torchmem_error
from pytest_torchmem.values.findings import COUNTERS, RETAINED
from pytest_torchmem.values.results import Result

if TYPE_CHECKING:
    from pytest_torchmem.analysis.estimated.estimate import Estimate
    from pytest_torchmem.analysis.gpu_questions import GpuQuestions

# A user's mistake is reported at the user's line.
__tracebackhide__ = is_torchmem_error

SUFFIX: Final = " (estimated)"


class Estimates:
    """The estimates of one run of a body.

    ``every`` is how far each of them may be from its baseline, where the test asks for one; None
    where only those that are checked by name are compared.
    """

    def __init__(self, every: Allowance | None) -> None:
        self._every = every
        self._allowances: dict[str, Allowance] = {}
        self.made: list[Estimate] = []

    def add(self, estimate: Estimate) -> None:
        """Take an estimate in. Raises `MarkerError` for a second one to be compared by one name."""
        if self._every is not None and any(estimate.name == e.name for e in self.made):
            raise _twice(estimate.name)
        self.made.append(estimate)

    def check(self, estimate: Estimate, allowance: Allowance) -> None:
        """Compare an estimate with its baseline. Raises `MarkerError` for one of another body."""
        if not any(estimate is e for e in self.made):
            raise MarkerError(
                f"torchmem.check needs an estimate that torchmem.estimate made in this body; "
                f"{estimate.name!r} is none"
            )
        if (
            estimate.name in self._allowances
            or [e.name for e in self.made].count(estimate.name) > 1
        ):
            raise _twice(estimate.name)
        self._allowances[estimate.name] = allowance

    def compares(self, result: Result) -> bool:
        """Return whether a result is compared with a baseline; a checked region always is."""
        of_region = bool(result.name) and not result.estimated
        return self._every is not None or of_region or result.name in self._allowances

    def sources(self, default: Allowance) -> Iterator[tuple[Estimate, Allowance]]:
        """Yield each estimate with how far it may be from its baseline."""
        for estimate in self.made:
            yield estimate, self._allowances.get(estimate.name, default)

    def limits_for(self, result: Result, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return which of a test's limits hold for its body, a region of it or an estimate.

        A region has none, and what is left behind is the body's alone. Where the body used nothing
        on its device, the estimates are what the limits are about.
        """
        if result.estimated:
            return {key: size for key, size in sizes.items() if key not in RETAINED}
        if result.name:
            return {}
        if self.stand_for(result):
            return {key: size for key, size in sizes.items() if key in RETAINED}
        return dict(sizes)

    def stand_for(self, result: Result) -> bool:
        """Return whether a body that used nothing made estimates instead."""
        return bool(self.made) and not result.name and result.peak.total == 0


def simulated(result: Result, limits: Mapping[str, int], source: GpuQuestions) -> Result:
    """Return ``result`` with what only a GPU counts, estimated, where a limit asks for that."""
    if not any(key in COUNTERS for key in limits):
        return result
    # A process that measures nothing imports neither numpy nor the engine.
    from pytest_torchmem.analysis.gpu_questions import with_counters
    from pytest_torchmem.measuring.environment import allocator_settings

    return with_counters(result, limits, source, allocator_settings())


def estimate_name(program: object, name: str) -> str:
    """Return the name of an estimate: what the test calls it, or its function or class.

    Raises `MarkerError` for a name that cannot be used.
    """
    if not isinstance(name, str) or not name.isprintable() or (name and not name.strip()):
        raise MarkerError(f"torchmem.estimate cannot use the name {name!r}")
    own = getattr(program, "__name__", "") or type(program).__name__
    return f"{name or own}{SUFFIX}"


def _twice(name: str) -> MarkerError:
    return MarkerError(
        f"two estimates named {name.removesuffix(SUFFIX)!r} are checked, and a baseline has one "
        "entry for that name; give each a name="
    )
