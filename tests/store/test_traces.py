"""Traces on disk: they come back as they were, or say what is wrong; and they need no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pytest_torchmem.analysis.pipeline import analyze_trace
from pytest_torchmem.store.traces import load_trace
from pytest_torchmem.values.errors import TraceError
from pytest_torchmem.values.trace import FORMAT, Ownership, Trace
from tests.builders import TraceBuilder


@pytest.fixture
def trace() -> Trace:
    b = TraceBuilder()
    w = b.existing(100, Ownership.PARAMETER)
    with b.op("aten::mm", reads=[w]):
        y = b.alloc(40)
    b.free(y)
    return b.build()


@pytest.fixture
def saved(trace: Trace, tmp_path: Path) -> Path:
    trace.save(tmp_path / "body.npz")
    return tmp_path / "body.npz"


def rewritten(path: Path, **changes: object) -> Path:
    """The saved trace with some of its arrays replaced."""
    with np.load(path) as archive:
        arrays = dict(archive)
    np.savez(path, **{**arrays, **changes})
    return path


def test_every_table_comes_back_as_it_was(trace: Trace, saved: Path) -> None:
    again = load_trace(saved)
    for name in Trace.__dataclass_fields__:
        before, after = getattr(trace, name), getattr(again, name)
        if isinstance(before, np.ndarray):
            assert before.dtype == after.dtype, name
            assert np.array_equal(before, after), name
        else:
            assert before == after, name


def test_a_trace_of_megabytes_that_packs_well_can_be_kept(tmp_path: Path) -> None:
    b = TraceBuilder()
    for _ in range(20_000):
        with b.op("aten::mul"):
            b.free(b.alloc(40))
    b.build().save(tmp_path / "long.npz")
    again = load_trace(tmp_path / "long.npz")
    assert again.events[:].nbytes > 1 << 20
    assert len(again.allocations) == 40_000


def test_an_empty_trace_can_be_kept(tmp_path: Path) -> None:
    Trace().save(tmp_path / "empty.npz")
    assert analyze_trace(load_trace(tmp_path / "empty.npz")).peak.total == 0


@pytest.mark.parametrize("number", [FORMAT - 1, FORMAT + 1])
def test_a_trace_of_another_version_is_to_be_recorded_again(saved: Path, number: int) -> None:
    header = np.frombuffer(json.dumps({"format": number}).encode(), np.uint8)
    with pytest.raises(TraceError, match=r"body\.npz was written by another version: record it"):
        load_trace(rewritten(saved, header=header))


def test_a_table_of_another_layout_is_refused(saved: Path) -> None:
    with pytest.raises(TraceError, match=r"body\.npz .* another layout"):
        load_trace(rewritten(saved, allocations=np.zeros(3, np.int64)))


@pytest.mark.parametrize(
    "content",
    [b"", b"not an archive", b"PK\x03\x04 and no more", None],
    ids=["empty", "text", "cut off", "missing"],
)
def test_a_file_that_is_no_trace_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "body.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TraceError, match=r"body\.npz"):
        load_trace(path)


@pytest.mark.parametrize("kept", [0.2, 0.5, 0.9, 0.99])
def test_a_file_that_was_cut_off_is_named(saved: Path, kept: float) -> None:
    whole = saved.read_bytes()
    saved.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(TraceError, match=r"body\.npz"):
        load_trace(saved)


def test_a_trace_never_runs_what_is_in_it(saved: Path) -> None:
    trap = np.array([Path("anything")], dtype=object)
    with pytest.raises(TraceError):
        load_trace(rewritten(saved, events=trap))


WITHOUT_TORCH = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("there is no torch here")
sys.meta_path.insert(0, NoTorch())
from pytest_torchmem import analyze
from pytest_torchmem.store.traces import load_trace
print(analyze(load_trace(sys.argv[1])).result().to_json())
if "torch" in sys.argv:
    import torch
"""


def without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_TORCH, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_recording_is_analysed_again_where_there_is_no_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from pytest_torchmem.record.recorder import Recorder

    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters())
    recorder = Recorder(torch.device("cpu"))
    recorder.start()
    model(torch.ones(8, 16)).sum().backward()
    optimizer.step()
    trace = recorder.stop()
    trace.save(tmp_path / "step.npz")
    run = without_torch(str(tmp_path / "step.npz"))
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == str(analyze_trace(trace).result().to_json())


def test_an_import_of_torch_would_have_failed_there(saved: Path) -> None:
    run = without_torch(str(saved), "torch")
    assert run.returncode
    assert "there is no torch here" in run.stderr


@pytest.mark.parametrize(
    ("row", "parent", "end"),
    [
        (1, 0, 4),  # ends after its parent
        (2, 0, 2),  # ends before it begins
        (2, 2, 3),  # is its own parent
        (0, -1, 9),  # goes on after the last event
        (3, 1, 4),  # begins after its parent has ended
        (0, -2, 3),
    ],
)
def test_events_that_are_not_within_their_parents_are_refused(
    tmp_path: Path, row: int, parent: int, end: int
) -> None:
    b = TraceBuilder()
    with b.op("aten::linear"), b.op("aten::mm"):
        b.alloc(40)
    b.alloc(8)
    whole = b.build()
    assert whole.events["parent"].tolist() == [-1, 0, 1, -1, -1]
    whole.save(tmp_path / "body.npz")
    events = whole.events.copy()
    events["parent"][row], events["end"][row] = parent, end
    with pytest.raises(TraceError, match=rf"event {row} is not within its parent"):
        load_trace(rewritten(tmp_path / "body.npz", events=events))
