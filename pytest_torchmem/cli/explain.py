"""``torchmem explain TRACE``: each storage on a line, with who decided on its category, and why."""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pytest_torchmem.analysis.pipeline import analyze_trace
from pytest_torchmem.analysis.storages.explanation import PEAK, Explanation, OwnPass
from pytest_torchmem.cli.inputs import Recording, recording_kind
from pytest_torchmem.report.text.tables import aligned
from pytest_torchmem.store.traces import load_trace
from pytest_torchmem.values.errors import MarkerError, TraceError
from pytest_torchmem.values.findings import words
from pytest_torchmem.values.units import counted, format_size

_HEADERS: Final = (
    *("born", "died", "size", "category", "operator", "module", "line", "decided by", "because"),
)


def explanations(
    path: Path,
    device: str,
    category: str | None,
    module: str,
    at: str | None,
    passes: Sequence[str] = (),
) -> tuple[Explanation, ...]:
    """Return why the storages of a stored trace have their categories.

    ``at`` is ``"peak"`` or a time in milliseconds, as the columns show it. ``passes`` are category
    passes of the user: ``conftest.py:kv_cache``. Raises `TraceError` and `MarkerError`.
    """
    if path.exists() and recording_kind(path) is not Recording.TRACE:
        raise TraceError(
            f"{path} is no recording, and only a recording knows each storage: keep one with "
            "torchmem.save_trace(path) in the test"
        )
    own = [_loaded(place) for place in passes]
    profile = analyze_trace(load_trace(path), device or None, own)
    if profile.failed_passes:
        raise MarkerError(profile.failed_passes[0])
    return profile.explain(category, module, None if at is None else _moment(at))


def _loaded(place: str) -> OwnPass:
    """Return a function of a file, which is run. Raises `MarkerError`."""
    file, _, name = place.rpartition(":")
    if not file or not Path(file).is_file():
        raise MarkerError(f"--pass takes a file and a function in it: conftest.py:{name or place}")
    try:
        found: OwnPass | None = runpy.run_path(file).get(name)
    except Exception as error:  # whatever a user's file may raise
        raise MarkerError(f"--pass {place}: {type(error).__name__}: {error}") from None
    if not callable(found):
        raise MarkerError(f"--pass {place}: there is no function {name!r} in {file}")
    return found


def _moment(at: str) -> int | str:
    try:
        return at if at == PEAK else round(float(at) * 1e6)
    except ValueError:
        raise MarkerError(
            f"--at takes {PEAK!r} or a time in milliseconds such as 12.5, not {at!r}"
        ) from None


def explanations_text(found: Sequence[Explanation]) -> str:
    """Return a table with a line for each storage, and their sum; times are in milliseconds."""
    lines = aligned([_row(explanation) for explanation in found], _HEADERS, "rrr")
    total = format_size(sum(e.storage.size_bytes for e in found))
    return "\n".join(
        [*lines, f"{counted(len(found), 'storage')}, {total} together; times in milliseconds"]
    )


def _row(explanation: Explanation) -> list[str]:
    storage = explanation.storage
    born, died = explanation.born_ns, explanation.died_ns
    return [
        "before" if born is None else f"{born / 1e6:.6f}",
        "never" if died is None else f"{died / 1e6:.6f}",
        format_size(storage.size_bytes),
        words(storage.category.value),
        storage.operator or "-",
        storage.module or "-",
        str(storage.source or "-"),
        words(explanation.decided_by) or "nobody",
        explanation.reason or "no pass could tell",
    ]
