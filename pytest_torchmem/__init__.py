"""GPU memory as a tested property of PyTorch code.

Importing this package imports neither torch nor numpy: public names are resolved when first used.

PYTEST_DONT_REWRITE: nothing here is a test, and the package may be imported before pytest asks.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_HOME = {
    "Category": "pytest_torchmem.analysis.contributors",
    "LimitError": "pytest_torchmem.errors",
    "RankResults": "pytest_torchmem.analysis.ranks",
    "Result": "pytest_torchmem.analysis.results",
    "TorchmemError": "pytest_torchmem.errors",
    "analyze": "pytest_torchmem.exports",
    "estimate": "pytest_torchmem.estimates",
    "estimate_graph": "pytest_torchmem.estimates",
    "estimate_pair": "pytest_torchmem.estimates",
    "export_chrome_trace": "pytest_torchmem.exports",
    "export_memory_snapshot": "pytest_torchmem.exports",
    "export_memory_timeline": "pytest_torchmem.exports",
    "gather_ranks": "pytest_torchmem.ranks",
    "load_ranks": "pytest_torchmem.result_files",
    "load_results": "pytest_torchmem.result_files",
    "load_trace": "pytest_torchmem.trace",
    "measure": "pytest_torchmem.measuring",
    "save_results": "pytest_torchmem.result_files",
    "GiB": "pytest_torchmem.units",
    "KiB": "pytest_torchmem.units",
    "MiB": "pytest_torchmem.units",
}

if TYPE_CHECKING:
    from pytest_torchmem.analysis.contributors import Category
    from pytest_torchmem.analysis.ranks import RankResults
    from pytest_torchmem.analysis.results import Result
    from pytest_torchmem.errors import LimitError, TorchmemError
    from pytest_torchmem.estimates import estimate, estimate_graph, estimate_pair
    from pytest_torchmem.exports import (
        analyze,
        export_chrome_trace,
        export_memory_snapshot,
        export_memory_timeline,
    )
    from pytest_torchmem.measuring import measure
    from pytest_torchmem.ranks import gather_ranks
    from pytest_torchmem.result_files import load_ranks, load_results, save_results
    from pytest_torchmem.trace import load_trace
    from pytest_torchmem.units import GiB, KiB, MiB

__all__ = [
    "Category",
    "GiB",
    "KiB",
    "LimitError",
    "MiB",
    "RankResults",
    "Result",
    "TorchmemError",
    "__version__",
    "analyze",
    "estimate",
    "estimate_graph",
    "estimate_pair",
    "export_chrome_trace",
    "export_memory_snapshot",
    "export_memory_timeline",
    "gather_ranks",
    "load_ranks",
    "load_results",
    "load_trace",
    "measure",
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
