"""GPU memory as a tested property of PyTorch code.

Importing this package imports neither torch nor numpy: public names are resolved when first used.

PYTEST_DONT_REWRITE: nothing here is a test, and the package may be imported before pytest asks.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_NAMES = {
    "measuring.block": "measure",
    "measuring.body_measurement": "Region",
    "measuring.estimate": "estimate",
    "measuring.loading": "load",
    "measuring.profile": "Profile analyze",
    "measuring.ranks": "Ranks",
    "measuring.saving": "save",
    "plugin.item.fixture": "Torchmem",
    "values.contributors": "Category",
    "values.errors": "TorchmemError",
    "values.results": "Result",
    "values.units": "GiB MiB",
}
_HOME = {name: f"{__name__}.{room}" for room, names in _NAMES.items() for name in names.split()}

if TYPE_CHECKING:
    from pytest_torchmem.measuring.block import measure
    from pytest_torchmem.measuring.body_measurement import Region
    from pytest_torchmem.measuring.estimate import estimate
    from pytest_torchmem.measuring.loading import load
    from pytest_torchmem.measuring.profile import Profile, analyze
    from pytest_torchmem.measuring.ranks import Ranks
    from pytest_torchmem.measuring.saving import save
    from pytest_torchmem.plugin.item.fixture import Torchmem
    from pytest_torchmem.values.contributors import Category
    from pytest_torchmem.values.errors import TorchmemError
    from pytest_torchmem.values.results import Result
    from pytest_torchmem.values.units import GiB, MiB

__all__ = [
    "Category",
    "GiB",
    "MiB",
    "Profile",
    "Ranks",
    "Region",
    "Result",
    "Torchmem",
    "TorchmemError",
    "__version__",
    "analyze",
    "estimate",
    "load",
    "measure",
    "save",
]


def __getattr__(name: str) -> object:
    try:
        home = _HOME[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
