"""``torchmem show FILE`` and ``torchmem explain TRACE``: what a file holds, as text.

Of a trace each storage is explained on a line: who decided on its category, and why.
"""

from __future__ import annotations

import runpy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from pytest_torchmem.analysis.pipeline import analyze_trace
from pytest_torchmem.analysis.storages.explanation import PEAK, Explanation, OwnPass
from pytest_torchmem.cli import inputs
from pytest_torchmem.cli.inputs import Measurements
from pytest_torchmem.measuring.events import Events
from pytest_torchmem.report.text import tables
from pytest_torchmem.report.text.tables import ANY_WIDTH
from pytest_torchmem.report.text.terminal import holder_lines
from pytest_torchmem.store.file_kinds import Recording, recording_kind
from pytest_torchmem.store.traces import load_trace
from pytest_torchmem.values.baseline import BaselineEntry
from pytest_torchmem.values.errors import MarkerError, ReportError, TraceError
from pytest_torchmem.values.findings import words
from pytest_torchmem.values.picture import OperatorUse, Span
from pytest_torchmem.values.units import counted, format_size, format_time


def table(measurements: Measurements) -> str:
    """Return one line for each measurement, the largest first."""
    ranked = sorted(measurements.entries.items(), key=lambda pair: (-pair[1].total, str(pair[0])))
    sizes = [measurements.size(key, entry.total) for key, entry in ranked]
    wide = max(map(len, sizes), default=0)
    several = len(measurements.environments) > 1
    lines = []
    for (key, entry), size in zip(ranked, sizes, strict=True):
        where = f" on {key.environment}"
        name = f"{key}{where}" if several and not str(key).endswith(where) else str(key)
        window = measurements.windows.get(key)
        parts = [f"({_composition(entry)})", window.status if window else ""]
        lines.append(f"{size:>{wide}}  {name}  {', '.join(filter(None, parts))}")
    environments = "; ".join(measurements.environments)
    notes: dict[str, dict[str, None]] = {}
    for key, window in measurements.windows.items():
        for note in window.result.notes:
            notes.setdefault(note, {})[key.environment] = None
    closing = f"{len(lines)} measured on {environments}" if lines else "nothing was measured"
    run = measurements.run
    judged = [f"memory: {run.headline}"] if run and any(t.standing for t in run.tests) else []
    for note, found in notes.items():
        where = "" if len(found) == len(measurements.environments) else f"{', '.join(found)}: "
        judged.append(f"note: {where}{note}")
    return "\n".join([*lines, closing, *judged])


def _composition(entry: BaselineEntry) -> str:
    if entry.is_composed:
        return tables.largest(entry.at_peak, 3)
    return f"at most {tables.largest(entry.peaks, 3)}"


def details(
    measurements: Measurements, pattern: str, width: int, plain: bool, room: int = ANY_WIDTH
) -> str:
    """Return everything about the measurements whose name contains ``pattern``."""
    chosen = [key for key in measurements.entries if pattern in str(key)]
    blocks = []
    for key in sorted(chosen, key=str):
        entry = measurements.entries[key]
        retained = measurements.size(key, entry.retained.total)
        lines = [str(key), f"peak {measurements.size(key, entry.total)}, retained {retained}"]
        window = measurements.windows.get(key)
        lines += [f"  failed: {sentence}" for sentence in window.sentences] if window else []
        lines += _figures(entry)
        lines += [f"  note: {note}" for note in window.result.notes] if window else []
        if window and window.picture:
            drawn = tables.timeline_lines(window.picture, width, plain)
            lines += ["", "footprint, change by change:", *drawn]
        if entry.live:
            lines += ["", "largest, each at its category's own peak, as shares of the peak:"]
            lines += tables.live_table(entry.live, room, entry.total)
        if entry.retained_live:
            lines += ["", "retained at the end:"]
            lines += tables.live_table(entry.retained_live, room, entry.retained.total)
        lines += holder_lines(window.result.retained.holders) if window else []
        blocks.append("\n".join(lines))
    return "\n\n\n".join(blocks)


def operators(path: Path, pattern: str) -> str:
    """Return what ran at the peak of each measurement with ``pattern`` in its name, and how long.

    Of a stored trace it is the table of all calls, and what held the GPU up. Raises `ReportError`
    where no such measurement has a timeline.
    """
    if recording_kind(path) is Recording.TRACE:
        profile = analyze_trace(load_trace(path))
        events = Events(profile.tree)
        blocks = [*_running(profile.running_at_peak), "", events.table("self_allocated_bytes", 40)]
        kernels = len(events.metrics.queue.entry_depth)
        return "\n".join([*blocks, *([events.optimizable(3)] if kernels else [])])
    run = inputs.read_measurements(path, unjudged=True).run
    entries = [
        "\n".join([str(key), *_running(window.picture.running), *_uses(window.picture.operators)])
        for key, window in (inputs.windows_of(run, unjudged=True) if run else ())
        if pattern in str(key) and window.picture and window.picture.operators
    ]
    if not entries:
        raise ReportError(f"{path} has no timeline of a test with {pattern!r} in its name")
    return "\n\n\n".join(entries)


def _running(spans: Sequence[Span]) -> Iterator[str]:
    yield "what ran at the peak:" if spans else "no operator ran at the peak"
    for depth, span in enumerate(spans):
        yield f"  {'  ' * depth}{span.name}  {format_time(span.end_ns - span.begin_ns)}"


def _uses(uses: Sequence[OperatorUse]) -> list[str]:
    rows = []
    for use in uses:
        own = format_time(use.self_time_ns) if use.self_time_ns else ""
        sizes = format_size(use.allocated_bytes), format_size(use.at_peak_bytes)
        rows.append((use.operator, use.calls, own, *sizes))
    headers = ["operator", "calls", "own time", "allocated", "live at the peak"]
    return ["", "operators that allocated:", *tables.aligned(rows, headers, "lrrrr")]


def _figures(entry: BaselineEntry) -> Iterator[str]:
    for category, size_bytes in entry.peaks.items():
        if size_bytes:
            at_peak = format_size(entry.at_peak[category])
            at_peak = f"{at_peak:>11} at the peak, " if entry.is_composed else ""
            name = f"{words(category.value)}:"
            yield f"  {name:<17}{at_peak}{format_size(size_bytes):>10} at most"


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
    own = [_load_pass(place) for place in passes]
    profile = analyze_trace(load_trace(path), device or None, own)
    if profile.failed_passes:
        raise MarkerError(profile.failed_passes[0])
    return profile.explain(category, module, None if at is None else _moment(at))


def _load_pass(place: str) -> OwnPass:
    """Return a function of a file, which is run. Raises `MarkerError`."""
    file, _, name = place.rpartition(":")
    if not file or not Path(file).is_file():
        raise MarkerError(f"--pass takes a file and a function in it: conftest.py:{name or place}")
    try:
        own_pass: OwnPass | None = runpy.run_path(file).get(name)
    except Exception as error:  # whatever a user's file may raise
        raise MarkerError(f"--pass {place}: {type(error).__name__}: {error}") from None
    if not callable(own_pass):
        raise MarkerError(f"--pass {place}: there is no function {name!r} in {file}")
    return own_pass


def _moment(at: str) -> int | str:
    try:
        return at if at == PEAK else round(float(at) * 1e6)
    except ValueError:
        raise MarkerError(
            f"--at takes {PEAK!r} or a time in milliseconds such as 12.5, not {at!r}"
        ) from None


def explanations_text(explanations: Sequence[Explanation]) -> str:
    """Return a table with a line for each storage, and their sum; times are in milliseconds."""
    lines = tables.aligned([_row(explanation) for explanation in explanations], _HEADERS, "rrr")
    total = format_size(sum(e.storage.size_bytes for e in explanations))
    return "\n".join(
        [
            *lines,
            f"{counted(len(explanations), 'storage')}, {total} together; times in milliseconds",
        ]
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
