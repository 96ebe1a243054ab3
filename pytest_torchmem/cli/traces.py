"""A stored trace for other people's viewers."""

from __future__ import annotations

import json
from pathlib import Path

from pytest_torchmem.analysis.pipeline import analyze
from pytest_torchmem.report.viewers.memory_viz import pickled
from pytest_torchmem.report.viewers.perfetto import chrome_trace
from pytest_torchmem.values.trace import load_trace


def converted(trace: Path, output: Path) -> bytes | None:
    """Return the content of ``output`` if its name asks for a viewer's format, otherwise None.

    ``.perfetto.json`` is for Perfetto, ``.pickle`` for memory_viz. Raises `TraceError`.
    """
    if output.name.endswith(".perfetto.json"):
        return json.dumps(chrome_trace(analyze(load_trace(trace)))).encode()
    if output.suffix == ".pickle":
        return pickled(analyze(load_trace(trace)))
    return None
