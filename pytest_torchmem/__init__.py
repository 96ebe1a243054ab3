"""GPU memory as a tested property of PyTorch code.

Importing this package imports neither torch nor numpy: public names are resolved when first used.

PYTEST_DONT_REWRITE: nothing here is a test, and the package may be imported before pytest asks.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_NAMES = {
    "analysis.judge.rank_results": "RankResults",
    "analysis.storages.explanation": "Explanation StorageClaim",
    "measuring.block": "measure",
    "measuring.body_measurement": "Region",
    "measuring.estimate": "estimate",
    "measuring.events": "read_events",
    "measuring.export": "analyze export_chrome_trace export_memory_snapshot export_memory_timeline "
    "export_stacks",
    "measuring.graphs": "estimate_graph estimate_pair",
    "measuring.saving": "gather_ranks load_ranks load_results save_results",
    "plugin.item.fixture": "Torchmem",
    "store.snapshots": "load_snapshot",
    "store.traces": "load_trace",
    "values.contributors": "Category",
    "values.errors": "LimitError TorchmemError",
    "values.results": "Result",
    "values.units": "GiB KiB MiB",
}
_HOME = {name: f"{__name__}.{room}" for room, names in _NAMES.items() for name in names.split()}

if TYPE_CHECKING:
    from pytest_torchmem.analysis.judge.rank_results import RankResults
    from pytest_torchmem.analysis.storages.explanation import Explanation, StorageClaim
    from pytest_torchmem.measuring.block import measure
    from pytest_torchmem.measuring.body_measurement import Region
    from pytest_torchmem.measuring.estimate import estimate
    from pytest_torchmem.measuring.events import read_events
    from pytest_torchmem.measuring.export import (
        analyze,
        export_chrome_trace,
        export_memory_snapshot,
        export_memory_timeline,
        export_stacks,
    )
    from pytest_torchmem.measuring.graphs import estimate_graph, estimate_pair
    from pytest_torchmem.measuring.saving import (
        gather_ranks,
        load_ranks,
        load_results,
        save_results,
    )
    from pytest_torchmem.plugin.item.fixture import Torchmem
    from pytest_torchmem.store.snapshots import load_snapshot
    from pytest_torchmem.store.traces import load_trace
    from pytest_torchmem.values.contributors import Category
    from pytest_torchmem.values.errors import LimitError, TorchmemError
    from pytest_torchmem.values.results import Result
    from pytest_torchmem.values.units import GiB, KiB, MiB

__all__ = [
    "Category",
    "Explanation",
    "GiB",
    "KiB",
    "LimitError",
    "MiB",
    "RankResults",
    "Region",
    "Result",
    "StorageClaim",
    "Torchmem",
    "TorchmemError",
    "__version__",
    "analyze",
    "estimate",
    "estimate_graph",
    "estimate_pair",
    "export_chrome_trace",
    "export_memory_snapshot",
    "export_memory_timeline",
    "export_stacks",
    "gather_ranks",
    "load_ranks",
    "load_results",
    "load_snapshot",
    "load_trace",
    "measure",
    "read_events",
    "save_results",
]


def __getattr__(name: str) -> object:
    try:
        home = _HOME[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
