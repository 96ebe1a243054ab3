"""Category passes of users: they see what ours decided, and have the last word.

A pass of ours weighs evidence that every program leaves behind. A user knows more of their own:
that what ``KVCache.append`` makes is a cache, whoever reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import numpy as np

from pytest_torchmem.analysis.storages.categories import Decisions, Ground
from pytest_torchmem.analysis.storages.explanation import Explanation, StorageClaim
from pytest_torchmem.values.contributors import Category

OwnPass: TypeAlias = Callable[[Sequence[Explanation]], Iterable[StorageClaim]]


def with_own_passes(
    passes: Sequence[OwnPass], decisions: Decisions, explanations: Sequence[Explanation]
) -> Decisions:
    """Return the decisions after the passes have spoken; of two claims the first one counts.

    Each pass sees the same ``explanations``, those of ``decisions``. A pass that raises claims
    nothing, whatever it yielded before.
    """
    labels, claimed = decisions.labels.copy(), decisions.claim.astype(np.int32)
    known: dict[Ground, int] = {}
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
                claimed[number] = known.setdefault(ground, len(decisions.grounds) + len(known))
                reasons[number] = claim.reason
    return Decisions(labels, claimed, (*decisions.grounds, *known), reasons, tuple(problems))


def _checked(claim: object) -> StorageClaim:
    """Return a claim. Raises `TypeError` for anything else."""
    if not isinstance(claim, StorageClaim):
        raise TypeError(f"expected a StorageClaim, got {claim!r}")
    if not isinstance(claim.category, Category) or not isinstance(claim.reason, str):
        raise TypeError(f"a claim has a Category and a reason in words, got {claim!r}")
    return claim
