"""Stored traces, read: every size is known before it is allocated, and every index is checked.

A trace may come from a stranger. Its analysis takes rows of one table as places in another, and
neither looks twice nor copies.
"""

from __future__ import annotations

import json
import os
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from pytest_torchmem.store.file_kinds import foreign_kind
from pytest_torchmem.values import json_values
from pytest_torchmem.values.errors import TraceError, is_torchmem_error
from pytest_torchmem.values.json_values import WRONG, Json
from pytest_torchmem.values.packed import Table
from pytest_torchmem.values.trace import (
    COLUMNS,
    FORMAT,
    KINDS,
    TABLES,
    Trace,
)

__tracebackhide__ = is_torchmem_error

_HEADER: Final = "header"
_METHODS: Final = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_RATIO: Final = 100
"""Tables of real recordings are packed 5 to 20 times; zeros would be 1,000 times."""
_HEADER_RATIO: Final = 20
"""Parsed, a header takes up to 20 times as much again."""
_ALWAYS_BYTES: Final = 1 << 20

_LARGEST: Final = 1 << 61
"""The largest time or size: the sum or the difference of two is still an int64."""

_NEVER: Final = 1 << 63
"""The profiler ends a Python function that never returned at the last moment of an int64."""

_IN_ORDER: Final = ("tensors", "allocations", "details")
_SIZES: Final = ("allocations", "tensors", "owners")


def load_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace that `Trace.save` wrote. Raises `TraceError` if the file is not one."""
    try:
        with json_values.open_file(Path(path)) as file, zipfile.ZipFile(file) as archive:
            trace = _read(archive, path)
        _check(trace)
    except OSError as error:
        raise TraceError(f"cannot read {path} as a trace: {error.strerror or error}") from error
    except (zipfile.BadZipFile, NotImplementedError) as error:
        kind = foreign_kind(Path(path)) or "not one"
        raise TraceError(f"cannot read {path} as a trace: it is {kind}") from error
    except (*WRONG, EOFError, MemoryError, RuntimeError, zlib.error) as error:
        # zipfile has a RuntimeError for a file with a password.
        reason = (
            error if isinstance(error, zlib.error | EOFError) else json_values.told_damage(error)
        )
        raise TraceError(f"cannot read {path} as a trace: it is damaged: {reason}") from error
    return trace


def _read(archive: zipfile.ZipFile, path: object) -> Trace:
    _check_sizes(archive)
    header = _header(_content(archive, _HEADER, np.dtype("u1")))
    if json_values.whole_number(header["format"]) != FORMAT:
        raise TraceError(f"the trace {path} {json_values.OTHER_VERSION}")
    tables = {
        name: np.frombuffer(bytearray(_content(archive, name, dtype)), dtype)
        for name, dtype in TABLES.items()
    }
    return Trace(
        **tables,
        strings=json_values.checked_texts(header["strings"]),
        devices=json_values.checked_texts(header["devices"]),
        meta=_checked_meta(json_values.checked_object(header["meta"])),
    )


def _header(content: bytes) -> Mapping[str, Json]:
    def refuse(text: str) -> object:
        raise ValueError(f"{text} is no number")

    try:
        return json_values.checked_object(
            json.loads(content, parse_int=json_values.whole, parse_constant=refuse)
        )
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None


def _check_sizes(archive: zipfile.ZipFile) -> None:
    """Raise `ValueError` for an archive that unpacks to far more than tables of a recording do.

    ``zipfile`` reads no more of a member than it is said to hold.
    """
    for member in archive.infolist():
        ratio = _HEADER_RATIO if member.filename.startswith(_HEADER) else _RATIO
        if member.compress_type not in _METHODS:
            raise ValueError(f"{member.filename!r} is packed in another way than ours are")
        if member.file_size > _ALWAYS_BYTES + ratio * member.compress_size:
            raise ValueError(
                f"{member.filename!r} has {member.compress_size} bytes and would unpack to "
                f"{member.file_size}"
            )


def _content(
    archive: zipfile.ZipFile, name: str, dtype: np.dtype[np.void] | np.dtype[np.uint8]
) -> bytes:
    """Return the bytes of one array. Raises `ValueError` where it is not what its name says."""
    info = archive.getinfo(f"{name}.npy")
    with archive.open(info) as member:
        version = np.lib.format.read_magic(member)
        if version != (1, 0):
            raise ValueError(f"the table {name!r} is stored in another way than ours are")
        try:
            shape, _, kind = np.lib.format.read_array_header_1_0(member)
        except (SyntaxError, tokenize.TokenError):  # numpy tokenizes what it cannot parse
            raise ValueError(f"the table {name!r} does not say what it is") from None
        if kind != dtype:
            raise ValueError(f"the table {name!r} has another layout than this version reads")
        content = member.read()
    if len(shape) != 1 or len(content) != shape[0] * dtype.itemsize:
        raise ValueError(f"the table {name!r} does not have as many rows as it says")
    return content


def _checked_meta(meta: Mapping[str, Json]) -> Mapping[str, Json]:
    """Return what is said of the whole recording. Raises `ValueError` for another type."""
    checks = {
        "device": json_values.checked_text,
        "library_paths": json_values.checked_texts,
        "own_cost_ns": json_values.whole_number,
        "workspace_bytes": json_values.whole_numbers,
        "counters": _check_counters,
        "counters_before": _check_counters,
    }
    for name, check in checks.items():
        if name in meta:
            check(meta[name])
    return meta


def _check_counters(counters: Json) -> None:
    for name, amount in json_values.checked_object(counters or {}).items():
        if name != "estimated":
            json_values.whole_number(amount)


def _check(trace: Trace) -> None:
    """Raise `ValueError` where a number in a table is not what it must be."""
    counts = {name: len(getattr(trace, f"{name}s")) for name in ("event", "mark", "device")}
    counts["text"] = len(trace.strings)
    for table, columns in COLUMNS.items():
        for column, kind in columns.items():
            if kind in KINDS:
                _check_range(trace, table, column, 0, len(KINDS[kind]))
            elif (target := kind.rstrip("?")) in counts:
                _check_range(trace, table, column, -kind.endswith("?"), counts[target])
            elif column.endswith("_ns") or column in ("size_bytes", "requested_bytes"):
                end = _NEVER if column == "end_ns" else _LARGEST
                _check_range(trace, table, column, -_LARGEST, end)
    for table in _SIZES:
        if np.abs(getattr(trace, table)["size_bytes"].astype(np.float64)).sum() > _LARGEST:
            raise ValueError(f"the sizes in {table!r} are more than any machine has")
    for table in _IN_ORDER:
        if (np.diff(getattr(trace, table)["event"]) < 0).any():
            raise ValueError(f"the rows of {table!r} are not in the order of events")
    _check_nesting(trace.events)


def _check_range(trace: Trace, table: str, column: str, least: int, end: int) -> None:
    values = getattr(trace, table)[column]
    if len(values) and not (least <= int(values.min()) and int(values.max()) < end):
        wrong = values[(values < least) | (values >= end)][0]
        raise ValueError(f"{column!r} of {table!r} is {int(wrong)}, and must be below {end}")


def _check_nesting(events: Table) -> None:
    """Raise `ValueError` unless each subtree is in one piece behind its root, within its parent."""
    rows = np.arange(len(events))
    parents, ends = events["parent"], events["end"]
    good = (parents >= -1) & (parents < rows) & (ends > rows) & (ends <= len(events))
    if good.all():
        inner = parents >= 0
        good[inner] = (ends[parents[inner]] >= ends[inner]) & (ends[parents[inner]] > rows[inner])
    if not good.all():
        raise ValueError(f"event {int(np.argmin(good))} is not within its parent")
