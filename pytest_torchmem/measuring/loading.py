"""Files of every kind of ours, told apart by their content."""

from __future__ import annotations

import os
from pathlib import Path

from pytest_torchmem.analysis.snapshot import Snapshot
from pytest_torchmem.measuring.profile import Profile, analyze
from pytest_torchmem.measuring.saving import results_by_name
from pytest_torchmem.store.file_kinds import (
    Recording,
    beginning_of,
    foreign_kind,
    recording_kind,
)
from pytest_torchmem.store.run_reports import KIND, read_run
from pytest_torchmem.store.snapshots import load_snapshot
from pytest_torchmem.store.traces import load_trace
from pytest_torchmem.values.errors import ReportError
from pytest_torchmem.values.results import Result
from pytest_torchmem.values.units import Device


def load(
    path: str | os.PathLike[str], device: Device | None = None
) -> Profile | Snapshot | dict[str, Result]:
    """Read a file of this package, or a snapshot of torch's allocator: the content decides.

    * A recording (`save`, ``save_trace`` of a block or of a test) gives a `Profile`.
    * A snapshot that ``torch.cuda.memory._dump_snapshot(path)`` wrote gives a ``Snapshot`` of one
      device. Reading it needs neither torch nor a GPU, and runs nothing that the file says.
    * A results file (`save`, ``output=``, ``--torchmem-report=run.json``) gives its results by
      name: tests by node id, regions as ``train step::forward``.

    ``device`` chooses the device of a recording or a snapshot: ``"cuda:1"``, or ``"cuda"`` for the
    one GPU in it; by default the one that was recorded, of a snapshot the busiest. Raises
    `TraceError`, `SnapshotError` or `ReportError` for a file that is damaged or another program's,
    and `DeviceError` for a device that is not in it.
    """
    file = Path(path)
    if file.is_dir():
        raise ReportError(f"{file} is a folder; Ranks.load reads the files of all ranks of a job")
    kind = recording_kind(file)
    if kind is Recording.SNAPSHOT:
        return load_snapshot(file, device)
    is_results = KIND.encode() in beginning_of(file)[:256]
    if not is_results and (foreign := foreign_kind(file)):
        raise ReportError(f"{file} is no file of torchmem's, but {foreign}")
    if kind is Recording.TRACE:
        return analyze(load_trace(file), device)
    results = results_by_name(read_run(file))
    if device is not None:
        raise ReportError(f"{file} has results, each of its own device: leave out the device")
    return results
