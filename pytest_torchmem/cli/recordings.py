"""Recordings: traces that were stored here, and snapshots that torch's allocator wrote."""

from __future__ import annotations

import enum
import json
from pathlib import Path

from pytest_torchmem.analysis.gpu_questions import GpuQuestions
from pytest_torchmem.analysis.pipeline import analyze_trace
from pytest_torchmem.analysis.sampling import sketch
from pytest_torchmem.report.viewers.memory_viz import pickled
from pytest_torchmem.report.viewers.perfetto import chrome_trace
from pytest_torchmem.store.run_reports import RunReport, TestReport
from pytest_torchmem.store.snapshots import load_snapshot
from pytest_torchmem.store.traces import load_trace
from pytest_torchmem.values.errors import DeviceNameError
from pytest_torchmem.values.json_values import open_file
from pytest_torchmem.values.measured import MeasuredTest, unjudged


class Recording(enum.Enum):
    """The kinds of recordings, each with the first bytes of its files."""

    TRACE = b"PK"
    SNAPSHOT = b"\x80"


def recording_kind(path: Path) -> Recording | None:
    """Return which kind of recording a file is; None for another file, or none that can be read."""
    try:
        with open_file(path) as file:
            begin = file.read(2)
    except OSError:
        return None
    return next((kind for kind in Recording if begin.startswith(kind.value)), None)


def read_recording(path: Path, device: str = "") -> GpuQuestions:
    """Return a recording, analysed; ``device`` is by default the one it was recorded for.

    Raises `TraceError`, and `SnapshotError` for a snapshot.
    """
    if recording_kind(path) is not Recording.SNAPSHOT:
        return analyze_trace(load_trace(path), device or None)
    return load_snapshot(path, _number(device) if device else None)


def run_of(path: Path, name: str) -> RunReport:
    """Return a recording as a run of one test called ``name``, with its timeline."""
    if recording_kind(path) is Recording.SNAPSHOT:
        snapshot = load_snapshot(path)
        result, picture = snapshot.result(), snapshot.picture()
    else:
        profile = analyze_trace(load_trace(path))
        result, picture = profile.result(), sketch(profile)
    test = MeasuredTest(name, "", {"device": result.device}, (unjudged(result, picture),))
    return RunReport((TestReport(test),))


def converted(trace: Path, output: Path) -> bytes | None:
    """Return the content of ``output`` if its name asks for a viewer's format, otherwise None.

    ``.perfetto.json`` is for Perfetto, ``.pickle`` for memory_viz. Raises `TraceError`.
    """
    if output.name.endswith(".perfetto.json"):
        return json.dumps(chrome_trace(analyze_trace(load_trace(trace)))).encode()
    if output.suffix == ".pickle":
        return pickled(analyze_trace(load_trace(trace)))
    return None


def _number(device: str) -> int:
    kind, _, number = device.partition(":")
    if kind != "cuda" or not (number or "0").isdecimal():
        raise DeviceNameError(f"a snapshot has devices cuda:0 and so on, not {device!r}")
    return int(number or "0")
