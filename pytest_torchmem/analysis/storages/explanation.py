"""Why a storage has its category: one line for each, and the way to find a label that is wrong.

Category passes of users see what ours decided, and have the last word. A pass of ours weighs
evidence that every program leaves behind. A user knows more of their own: that what
``KVCache.append`` makes is a cache, whoever reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pytest_torchmem.analysis.storages.categories import Decisions, Ground
from pytest_torchmem.values.contributors import Category, Contributor
from pytest_torchmem.values.errors import MarkerError
from pytest_torchmem.values.json_values import Json

#: The moment at which the footprint is largest, for the ``at`` of ``explain``.
PEAK = "peak"


@dataclass(frozen=True, slots=True)
class Explanation:
    """One storage of a footprint: when it lived, what it is for, and who decided that.

    Attributes:
        number: Which storage of the recording it is.
        born_ns: When it was allocated, in nanoseconds since the first event; None if it was there
            before. Of an estimate, the number of the operator.
        died_ns: When it was freed; None if it is alive at the end.
        storage: Its category, bytes, operator, module, source and phase.
        decided_by: The category pass that decided, such as ``"activations"``; empty if none could.
        reason: The evidence that the pass had, in words; empty if no pass could tell.
    """

    number: int
    born_ns: int | None
    died_ns: int | None
    storage: Contributor
    decided_by: str
    reason: str

    def to_json(self) -> dict[str, Json]:
        """Return plain builtins."""
        names = ("number", "born_ns", "died_ns", "decided_by", "reason")
        return {**self.storage.to_json(), **{name: getattr(self, name) for name in names}}


@dataclass(frozen=True, slots=True)
class StorageClaim:
    """The word of a category pass of yours: that storage is for this, because of ``reason``.

    Attributes:
        explanation: The storage, as the pass was given it.
        category: Its category from now on.
        reason: The evidence in a few words, as a failure and ``explain`` tell it.
    """

    explanation: Explanation
    category: Category
    reason: str


def in_order(
    explanations: Iterable[Explanation], category: Category | None, module: str
) -> tuple[Explanation, ...]:
    """Return the explanations of one category and module in the order of birth.

    ``category`` None stands for all; ``module`` is a part of a module's path.
    """
    reasons = [
        e
        for e in explanations
        if (category is None or e.storage.category is category) and module in e.storage.module
    ]
    reasons.sort(key=lambda e: (e.born_ns is not None, e.born_ns or 0, e.number))
    return tuple(reasons)


def named_category(category: Category | str | None) -> Category | None:
    """Return a category given as a member or by its value. Raises `MarkerError` for others."""
    try:
        return None if category is None else Category(category)
    except ValueError:
        names = ", ".join(c.value for c in Category)
        raise MarkerError(f"{category!r} is no category; there are: {names}") from None


def row_at(times_ns: NDArray[np.int64], peak_row: int, at: int | str) -> int:
    """Return the row of a timeline for a moment: `PEAK`, or nanoseconds since the first event.

    A moment between two changes is the row of the first one. Changes at 10, 20 and 40 ns::

        at      5  10  15  20  39  40  99
        row     0   0   0   1   1   2   2
    """
    if at == PEAK:
        return peak_row
    if isinstance(at, str):
        raise MarkerError(f"{at!r} is no moment; give {PEAK!r} or nanoseconds as an int")
    return max(0, int(times_ns.searchsorted(at, side="right")) - 1)


OwnPass: TypeAlias = Callable[[Sequence[Explanation]], Iterable[StorageClaim]]


def with_own_passes(
    passes: Sequence[OwnPass], decisions: Decisions, explanations: Sequence[Explanation]
) -> Decisions:
    """Return the decisions after the passes have spoken; of two claims the first one counts.

    Each pass sees the same ``explanations``, those of ``decisions``. A pass that raises claims
    nothing, whatever it yielded before.
    """
    labels, claimed = decisions.labels.copy(), decisions.claim.astype(np.int32)
    numbers: dict[Ground, int] = {}
    reasons: dict[int, str] = {}
    problems: list[str] = []
    for own_pass in passes:
        # Its function's name, or its class's.
        name = str(getattr(own_pass, "__name__", type(own_pass).__name__))
        try:
            claims = [_checked(claim) for claim in own_pass(explanations)]
        except Exception as error:  # whatever a user's code may raise
            first = next(iter(str(error).splitlines()), "")
            raised = f"{type(error).__name__}: {first}" if first else type(error).__name__
            problems.append(f"the category pass {name} raised {raised}; none of its claims counts")
            continue
        for claim in claims:
            number = claim.explanation.number
            if number not in reasons:
                ground = Ground(name, claim.reason)
                labels[number] = claim.category.column
                claimed[number] = numbers.setdefault(ground, len(decisions.grounds) + len(numbers))
                reasons[number] = claim.reason
    return Decisions(labels, claimed, (*decisions.grounds, *numbers), reasons, tuple(problems))


def _checked(claim: object) -> StorageClaim:
    """Return a claim. Raises `TypeError` for anything else."""
    if not isinstance(claim, StorageClaim):
        raise TypeError(f"expected a StorageClaim, got {claim!r}")
    if not isinstance(claim.category, Category) or not isinstance(claim.reason, str):
        raise TypeError(f"a claim has a Category and a reason in words, got {claim!r}")
    return claim
