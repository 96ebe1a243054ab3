"""Small programs and the edits that make them use more memory, for `benchmarks.regressions`."""

from __future__ import annotations

from typing import Final

from benchmarks.regression_programs import (
    attention,
    caches,
    elsewhere,
    layers,
    losses,
    reports,
    reports_elsewhere,
    strangers,
    training,
    two_edits,
)
from benchmarks.regression_programs.case import Regression
from benchmarks.regression_programs.harmless import EDITS

_MODULES: Final = (
    attention,
    caches,
    layers,
    losses,
    training,
    elsewhere,
    strangers,
    reports,
    reports_elsewhere,
    two_edits,
)
REGRESSIONS: Final = tuple(
    one for module in _MODULES for one in vars(module).values() if isinstance(one, Regression)
)
HARMLESS: Final = EDITS
