"""Stored traces as earlier formats had them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

_TIMES = [("start_ns", "i8"), ("end_ns", "i8")]
_PLACES = [("parent", "i4"), ("end", "i4"), ("name", "i4"), ("file", "i4"), ("line", "i4")]
_IDS = [("id", "i8"), ("allocation_id", "i8"), ("ptr", "u8"), ("size_bytes", "i8")]
_MENTION = [("event", "i4"), ("role", "u1"), ("argument", "i2"), ("mutable", "u1")]
_KEYED = [("keyed", "?"), ("device", "i2")]
_TOTALS = [("requested_bytes", "i8"), ("total_allocated", "i8"), ("total_reserved", "i8")]
_KINDS = [("kind", "u1"), ("scope", "u1"), ("is_operator", "?"), ("thread", "i4")]

#: The tables that are others now.
THIRD = {
    "events": [*_KINDS, ("segment", "i4"), *_PLACES, *_TIMES, ("sequence", "i8")],
    "tensors": [*_MENTION, *_KEYED, ("name", "i4"), *_IDS],
    "allocations": [("event", "i4"), *_KEYED, *_IDS, *_TOTALS],
}
FIRST = {**THIRD, "device_events": [("kind", "u1"), ("correlation", "i8"), *_TIMES]}


def rewrite_as(number: int, path: Path) -> None:
    """Have a stored trace be of the first format, or of the third one."""
    with np.load(path) as archive:
        tables = dict(archive)
    for name, layout in (FIRST if number == 1 else THIRD).items():
        before = np.zeros(len(tables[name]), layout)
        for column in set(before.dtype.names or ()).intersection(tables[name].dtype.names):
            before[column] = tables[name][column]
        tables[name] = before
    if number == 1:
        del tables["details"], tables["overloads"]
    header = json.loads(tables["header"].tobytes()) | {"format": number}
    tables["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    with path.open("wb") as file:
        np.savez(file, **tables)
