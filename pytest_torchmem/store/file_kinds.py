"""The kinds of files: ours by their content, and other programs' by name, for messages."""

from __future__ import annotations

import enum
import re
import zlib
from pathlib import Path
from typing import Final

from pytest_torchmem.values.json_values import open_file

_SHOWN_BYTES: Final = 1 << 16

#: How files of other programs begin, and what to say of one.
_FOREIGN: Final = (
    (rb"memray\0", "a recording of memray: `memray flamegraph` reads it"),
    (rb"\x04\x22\x4d\x18", "packed with lz4, as recordings of memray are: `memray flamegraph`"),
    (rb"SQLite format 3\0", "a database, as nsys and coverage write one"),
    (rb"\s*<(!doctype|html)", "a page: open it in a browser"),
    (rb"PK\x03\x04.{26}[^\0]{1,200}?/data\.pkl", "a file of torch.save"),
    (
        rb"\s*\{.{0,60000}?\"(traceEvents|baseTimeNanoseconds)\"",
        "a Chrome trace, which has no sizes of storages: Perfetto shows it; analyze(profile) needs "
        "the torch.profiler.profile itself",
    ),
    (rb"\s*\{.{0,60000}?\"benchmarks\"", "a file of pytest-benchmark"),
    (rb"\s*\[\s*\[\s*[\d\]]", "a memory timeline, as export_memory_timeline writes it"),
    (rb"\s*\{.{0,2000}?\"entries\"", "a baseline: `torchmem show` reads it"),
    (
        rb"\s*[\[{].{0,60000}?\"(segments|total_size)\"",
        "a snapshot of torch's allocator as JSON: keep what torch.cuda.memory._dump_snapshot wrote",
    ),
    (rb"\x80[\2-\5]", "a pickle that is packed: unpack it first"),  # any other is a recording
)


class Recording(enum.Enum):
    """The kinds of recordings, each with the first bytes of its files."""

    TRACE = b"PK"
    SNAPSHOT = b"\x80"


def recording_kind(path: Path) -> Recording | None:
    """Return which kind of recording a file is; None for another file, or none that can be read."""
    begin = beginning_of(path)[:2]
    return next((kind for kind in Recording if begin.startswith(kind.value)), None)


def foreign_kind(path: Path) -> str:
    """Return what a file of another program is, in words; ``""`` for one that nobody here knows."""
    begin = beginning_of(path)
    if begin.startswith(b"\x1f\x8b"):
        try:
            begin = zlib.decompressobj(wbits=31).decompress(begin, _SHOWN_BYTES)
        except zlib.error:
            return "packed with gzip, and damaged"
    for pattern, kind in _FOREIGN:
        if re.match(pattern, begin, re.DOTALL | re.IGNORECASE):
            return kind
    return ""


def beginning_of(path: Path) -> bytes:
    """Return how a file begins; nothing of one that cannot be read, which its reader says."""
    try:
        with open_file(path) as file:
            return file.read(_SHOWN_BYTES)
    except OSError:
        return b""
