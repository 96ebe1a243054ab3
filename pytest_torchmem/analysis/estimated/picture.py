"""The picture of an estimate, in the same detail as that of a profile."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from pytest_torchmem.analysis.blocks import StorageLives
from pytest_torchmem.analysis.estimated.static import (
    build_estimated_timeline,
    grouped,
    storages_here,
)
from pytest_torchmem.analysis.sampling import (
    MOMENTS,
    Holdings,
    chosen_rows,
    sketch_timeline,
    with_holders,
)
from pytest_torchmem.values.picture import Picture
from pytest_torchmem.values.static_graph import NodeKind, StaticRun

if TYPE_CHECKING:
    from numpy.typing import NDArray


def sketch_estimate(run: StaticRun, moments: int = MOMENTS) -> Picture:
    """Return the picture of an estimate, in the same detail."""
    timeline = build_estimated_timeline(run)
    held = _held_by(run, chosen_rows(timeline, moments))
    calls = Counter(n.operator for n in run.graph.nodes if n.kind is NodeKind.OPERATOR)
    return with_holders(sketch_timeline(timeline, moments), held, calls, (), lambda place: ())


def _held_by(run: StaticRun, rows: NDArray[np.int64]) -> Holdings:
    """Return the storages of an estimate, by category and origin."""
    lives = run.lifetimes
    storages = StorageLives(
        begins=lives.first,
        ends=lives.end,
        sizes=np.array([s.size_bytes for s in run.graph.storages], np.int64),
        groups=[(who, np.array(places)) for who, places in grouped(run, storages_here(run))],
    )
    return Holdings.over(rows, storages, lives.first > 0)
