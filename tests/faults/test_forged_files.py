"""Files that a stranger may send: small ones that would unpack to much, or take for ever."""

from __future__ import annotations

import io
import json
import pickle
import struct
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytest_torchmem.cli.main import Exit
from pytest_torchmem.store.run_reports import read_run
from pytest_torchmem.store.snapshots import load_snapshot
from pytest_torchmem.store.traces import load_trace
from pytest_torchmem.values.errors import ReportError, SnapshotError, TorchmemError, TraceError
from pytest_torchmem.values.units import MiB
from tests.cli.conftest import command  # noqa: F401
from tests.cli.files import A, results
from tests.faults.readers import RUN, at_most, whole_snapshot, whole_trace

pytestmark = pytest.mark.slow

Command = Callable[..., tuple[int, str, str]]


@contextmanager
def modest(most_mib: int = 40) -> Iterator[None]:
    """Fail where a file of a few kilobytes takes memory or processor time without measure."""
    tracemalloc.start()
    try:
        with at_most(20.0):
            yield
        assert tracemalloc.get_traced_memory()[1] < most_mib * MiB
    finally:
        tracemalloc.stop()


def test_a_reader_that_takes_too_much_would_be_noticed() -> None:
    with pytest.raises(AssertionError), modest():
        bytes(50 * MiB)


# --- results ------------------------------------------------------------------------------------


def with_picture(path: Path, **changes: object) -> Path:
    run = json.loads(json.dumps(RUN))
    run["tests"][0]["windows"][0]["picture"].update(changes)
    path.write_text(json.dumps(run))
    return path


@pytest.mark.parametrize(
    "changes",
    [
        {"levels": {"parameter": [100_000_000, 5]}},
        {"levels": {"parameter": [10**12, 5]}},
        {"times_ns": [0] * 20_000, "rows": [0] * 20_000},
        {"change_count": 0},
        {"tracks": [{}] * 5000},
    ],
    ids=["1e8 moments", "1e12 moments", "many moments", "no changes", "many tracks"],
)
def test_a_timeline_has_no_more_moments_than_it_lists(
    command: Command,  # noqa: F811
    tmp_path: Path,
    changes: dict[str, object],
) -> None:
    path = with_picture(tmp_path / "run.json", **changes)
    with modest():
        code, out, err = command("show", path, "test_train")
    assert (code, out, err.count("\n")) == (Exit.BAD_INPUT, "", 1)
    assert "run.json is damaged" in err


@pytest.mark.parametrize(
    "stacks", [[0, 0], [-1, 99], [5, 0], [-2, 0]], ids=["a circle", "no frame", "later", "below"]
)
def test_a_stack_of_calls_ends(tmp_path: Path, stacks: list[int]) -> None:
    path = with_picture(tmp_path / "run.json")
    run = json.loads(path.read_text())
    run["tests"][0]["windows"][0]["picture"]["blocks"] = {
        "who": [run["tests"][0]["windows"][0]["picture"]["tracks"][0]["contributor"]],
        "files": ["a.py"],
        "frames": [[0, 1, "f"]],
        "stacks": stacks,
        "blocks": [0, 1, 8, 0, 0],
        "rest": [],
        "count": 1,
    }
    path.write_text(json.dumps(run))
    with modest(), pytest.raises(ReportError, match="there is no place"):
        read_run(path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[" * 200_000, "nested too deeply"),
        ('{"a":' * 200_000, "nested too deeply"),
        ("9" * 100_000, "cannot be read"),
        ('{"kind": 1, "kind": 2}', "'kind' occurs twice"),
        ('{"kind": NaN}', "NaN is not a whole number"),
        ('{"kind": -Infinity}', "-Infinity is not a whole number"),
        ('{"kind": 1e400}', "1e400 is not a whole number"),
        ("\ufeff{}", "byte order mark"),
    ],
)
def test_json_that_no_report_writes_is_refused_in_one_line(
    command: Command,  # noqa: F811
    tmp_path: Path,
    text: str,
    told: str,
) -> None:
    path = tmp_path / "x.json"
    path.write_text(text, encoding="utf-8")
    for arguments in (("show", path), ("diff", path, path), ("report", path, "-o", "y.html")):
        with modest():
            code, out, err = command(*arguments)
        assert (code, out, err.count("\n")) == (Exit.BAD_INPUT, "", 1)
        assert told in err
        assert len(err) < 500


def number_places(data: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(data) if isinstance(data, dict) else range(len(data)):
        if isinstance(data[key], dict | list):
            yield from number_places(data[key])
        elif type(data[key]) is int:
            yield data, key


def test_no_number_of_a_results_file_may_be_text_or_beyond_all_machines(tmp_path: Path) -> None:
    run = json.loads(json.dumps({**RUN, "tests": RUN["tests"][:1]}))
    path, unused = tmp_path / "run.json", ("format", "counts")
    places = [(holder, key) for holder, key in number_places(run) if holder is not run["counts"]]
    assert len(places) > 100
    for holder, key in places[:: max(1, len(places) // 150)]:
        was = holder[key]
        for wrong in ("<b>1</b>", 10**30, 1.5, True):
            holder[key] = wrong
            path.write_text(json.dumps(run))
            if key in unused:
                continue
            with pytest.raises(ReportError):
                read_run(path)
        holder[key] = was
    path.write_text(json.dumps(run))
    read_run(path)


@pytest.mark.parametrize("wrong", ["-5", "NaN", "1.5"])
def test_a_peak_that_is_no_size_is_never_the_same_or_shrunk(
    command: Command,  # noqa: F811
    tmp_path: Path,
    wrong: str,
) -> None:
    one = results(tmp_path / "a.json", A)
    text = Path(one).read_text()
    (tmp_path / "b.json").write_text(text.replace(f'"total": {A["test_x"]}', f'"total": {wrong}'))
    assert command("diff", one, "b.json", "--floor", "0B", "--tolerance", "0%")[0] == Exit.BAD_INPUT


# --- names --------------------------------------------------------------------------------------


def test_no_text_of_a_results_file_gives_a_terminal_or_a_build_server_commands(
    command: Command,  # noqa: F811
    tmp_path: Path,
) -> None:
    hostile = "::error::boo\x1b[31m\n::error::boo\u202e\x9b2J\udcff"

    def replaced(data: Any) -> Any:
        if isinstance(data, dict):
            return {key: replaced(value) for key, value in data.items()}
        if isinstance(data, list):
            return [replaced(value) for value in data]
        known = ("kind", "passed", "failed", "ok", "torchmem-results", "full", "same", "grown")
        words = {*known, "parameter", "forward", "activation", "gradient", "shrunk", "held"}
        text = isinstance(data, str) and data not in words and "_" not in data
        return hostile + data if text else data

    run = replaced(RUN)
    path = tmp_path / "run.json"
    path.write_text(json.dumps(run))
    whole = results(tmp_path / "whole.json", A)
    for arguments in (
        ("show", path),
        ("show", path, "boo"),
        ("show", path, "--operators"),
        ("diff", path, whole, "--all"),
        ("diff", whole, path),
    ):
        code, out, err = command(*arguments)
        assert "boo" in out + err
        for line in (out + err).splitlines():
            assert not line.lstrip().startswith("::"), line
            assert line.isprintable(), ascii(line)
        (out + err).encode()
        assert code in (Exit.OK, Exit.GROWN), err


# --- traces -------------------------------------------------------------------------------------


def packed(path: Path, **members: bytes) -> Path:
    """A stored trace with other bytes in some of its members."""
    whole = io.BytesIO()
    text = {"format": 3, "strings": [], "devices": [], "meta": {}}
    trace = whole_trace()
    text |= {"strings": list(trace.strings), "devices": list(trace.devices)}
    trace.save(path)
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED) as to:
        for name in archive.namelist():
            to.writestr(name, members.pop(name.removesuffix(".npy"), archive.read(name)))
    path.write_bytes(whole.getvalue())
    return path


def npy(table: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, table)
    return file.getvalue()


def test_a_table_of_zeros_is_not_unpacked(tmp_path: Path) -> None:
    zeros = npy(np.zeros(7_000_000, whole_trace().events.dtype))
    path = packed(tmp_path / "body.trace", events=zeros)
    assert len(zeros) > 300 * MiB > 500 * path.stat().st_size
    del zeros
    with modest(), pytest.raises(TraceError, match="would unpack to"):
        load_trace(path)


def test_a_header_of_zeros_is_not_unpacked(tmp_path: Path) -> None:
    path = packed(tmp_path / "body.trace", header=npy(np.frombuffer(b"[" * 50 * MiB, np.uint8)))
    with modest(), pytest.raises(TraceError, match="would unpack to"):
        load_trace(path)


def test_a_table_of_a_trillion_rows_is_not_allocated(tmp_path: Path) -> None:
    table = npy(whole_trace().events)
    rows = len(whole_trace().events)
    large = table.replace(f"({rows},)".encode(), b"(1000000000000,)")
    assert large != table
    path = packed(tmp_path / "body.trace", events=large[:10] + large[10:])
    with modest(), pytest.raises(TraceError, match="is damaged"):
        load_trace(path)


@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("events", "kind", 99),
        ("events", "parent", 5),
        ("events", "end", 10**6),
        ("events", "end", 0),
        ("events", "name", -1),
        ("events", "file", 10**6),
        ("events", "start_ns", 2**62),
        ("tensors", "event", -1),
        ("tensors", "device", 7),
        ("tensors", "role", 200),
        ("allocations", "event", 10**6),
        ("allocations", "size_bytes", 2**62),
        ("allocations", "device", -1),
        ("marks", "event", 10**6),
        ("marks", "text", -1),
        ("owners", "mark", 10**6),
        ("owners", "kind", 99),
        ("module_calls", "event", -1),
    ],
)
def test_an_index_that_leads_nowhere_is_refused_when_it_is_read(
    tmp_path: Path, table: str, column: str, value: int
) -> None:
    changed = getattr(whole_trace(), table).copy()
    changed[column][0] = value
    path = packed(tmp_path / "body.trace", **{table: npy(changed)})
    with pytest.raises(TraceError, match="is damaged"):
        load_trace(path)


def test_a_flipped_bit_is_bad_input_and_not_a_trace_that_does_not_fit(
    command: Command,  # noqa: F811
    tmp_path: Path,
) -> None:
    path = tmp_path / "body.trace"
    whole_trace().save(path)
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("events.npy")
    start = info.header_offset + 30 + len(info.filename) + 20
    content[start : start + 60] = bytes(60)
    path.write_bytes(content)
    code, out, err = command("fits", path, "--capacity", "1GiB")
    assert (code, out, err.count("\n")) == (Exit.BAD_INPUT, "", 1)


# --- snapshots ----------------------------------------------------------------------------------


def doubled_tuples() -> bytes:
    """A pickle with a key of 2**60 tuples, each of which would be looked at to find its hash."""
    return b"\x80\x04})" + b"2\x86" * 60 + b"Ns."


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04]r" + struct.pack("<I", 2**32 - 1) + b".",
        b"\x80\x04]p4294967295\n.",
        b"\x80\x04\x8e" + struct.pack("<Q", 10**12) + b"abc.",
        b"\x80\x04\x8b" + struct.pack("<I", 2**31 - 1) + b"abc.",
        b"\x80\x04\x95" + struct.pack("<Q", 2**60) + b"].",
        b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".",
        doubled_tuples(),
    ],
    ids=["memo", "memo as text", "bytes", "number", "frame", "nested lists", "nested tuples"],
)
def test_a_pickle_of_a_few_bytes_takes_no_more_than_that(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "step.pickle"
    path.write_bytes(content)
    with modest(), pytest.raises(SnapshotError):
        load_snapshot(path)


def test_a_name_of_an_operator_takes_no_longer_than_its_length(tmp_path: Path) -> None:
    data = whole_snapshot()
    frames = data["device_traces"][0][0]["frames"]
    frames[0]["name"] = "at::_ops::a" + "_A" * 20_000
    frames[1]["name"] = "at::_ops::a_" + "A" * 250 + ":"
    path = tmp_path / "step.pickle"
    path.write_bytes(pickle.dumps(data))
    with modest():
        assert load_snapshot(path).result().peak.total > 0


@pytest.mark.parametrize("size", [2**63, -1, 1.5, "many", None])
def test_a_size_that_no_machine_has_is_refused(tmp_path: Path, size: object) -> None:
    data = whole_snapshot()
    data["device_traces"][0][-1]["size"] = size
    path = tmp_path / "step.pickle"
    path.write_bytes(pickle.dumps(data))
    with pytest.raises(TorchmemError):
        load_snapshot(path)
