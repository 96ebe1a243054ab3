"""``torchmem fits`` and ``torchmem reserved``: what a GPU would make of a recording."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pytest_torchmem.analysis.caching_allocator import AllocatorRun, Fit
from pytest_torchmem.values.units import format_size

_COUNTERS: Final = ("reserved", "active", "allocated", "requested")


def fits_text(fits: Sequence[tuple[Path, Fit]]) -> str:
    """Return the sentence of each trace, with the trace's name where there are several."""
    if len(fits) == 1:
        return str(fits[0][1])
    return "\n".join(f"{path}: {fit}" for path, fit in fits)


def fits_json(fits: Sequence[tuple[Path, Fit]]) -> str:
    """Return the same as a list with an object for each trace."""
    rows = [
        {
            "trace": str(path),
            "estimated": True,
            "fits": bool(fit),
            "capacity_bytes": fit.capacity_bytes,
            "reserved_bytes": fit.peak_reserved_bytes,
            "fragmentation": round(fit.fragmentation, 6),
            "retries": fit.retry_count,
            "sentence": str(fit),
        }
        for path, fit in fits
    ]
    return json.dumps(rows, indent=1)


def reserved_text(run: AllocatorRun) -> str:
    """Return the counters of a simulated allocator, each at its own peak, one on a line."""
    rows = {name: format_size(getattr(run.peak, name)) for name in _COUNTERS}
    rows["fragmentation"] = f"{run.fragmentation:.0%}"
    rows["device allocations"] = str(run.device_alloc_count)
    wide = max(map(len, rows.values()))
    return "\n".join(f"{value:>{wide}}  {name} (estimated)" for name, value in rows.items())


def reserved_json(run: AllocatorRun) -> str:
    """Return the same as one object."""
    data = {
        "estimated": True,
        **{f"{name}_bytes": getattr(run.peak, name) for name in _COUNTERS},
        "fragmentation": round(run.fragmentation, 6),
        "device_allocations": run.device_alloc_count,
    }
    return json.dumps(data, indent=1)
