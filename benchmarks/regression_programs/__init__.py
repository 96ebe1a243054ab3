"""Small programs and the edits that make them use more memory, for `benchmarks.regressions`."""

from __future__ import annotations

from typing import Final

from benchmarks.regression_programs import (
    attention,
    caches,
    diffuse,
    elsewhere,
    kept,
    layers,
    losses,
    several_files,
    strangers,
    training,
)
from benchmarks.regression_programs.harmless import EDITS

REGRESSIONS: Final = (
    *attention.REGRESSIONS,
    *caches.REGRESSIONS,
    *layers.REGRESSIONS,
    *losses.REGRESSIONS,
    *training.REGRESSIONS,
    *diffuse.REGRESSIONS,
    *elsewhere.REGRESSIONS,
    *kept.REGRESSIONS,
    *several_files.REGRESSIONS,
    *strangers.REGRESSIONS,
)
HARMLESS: Final = EDITS
