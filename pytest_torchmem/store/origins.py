"""What the numbers of a baseline were made of: a file beside it, which nobody has to review.

A failure names its cause by it. Each line is one entry: its key, the numbers that it explains, and
its contributors. A line whose numbers are not those of the baseline explains nothing and is not
used. So a file that is missing, damaged or merged costs the names of causes, never a verdict.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from json.decoder import scanstring  # type: ignore[attr-defined]
from pathlib import Path
from typing import Final

from pytest_torchmem.store.baseline_rows import COLUMNS, Numbers, encode
from pytest_torchmem.values.baseline import BaselineEntry
from pytest_torchmem.values.contributors import (
    CategoryBytes,
    Contributor,
    contributor_from_json,
    contributor_to_json,
)
from pytest_torchmem.values.json_values import Json

FORMATS: Final = {1: "0.1.0: an entry in each line"}
"""Every format number ever written, and what it brought."""

_HEAD: Final = '{"format": 1}'
_WRONG: Final = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
_START: Final = '["'


def origins_path(baseline: Path) -> Path:
    """Return the file beside a baseline file that says what its numbers were made of."""
    return baseline.with_suffix(".origins")


def read_origins(path: Path) -> dict[str, list[str]]:
    """Return the lines of each entry by its key, more than one after a merge; none where there is
    no such file."""
    try:
        head, *lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError):
        return {}
    found: dict[str, list[str]] = {}
    for line in lines if head == _HEAD else ():
        if line.startswith(_START):
            try:
                key, _ = scanstring(line, len(_START))
            except ValueError:
                continue
            found.setdefault(key, []).append(line)
    return found


def render_origins(lines: Mapping[str, Iterable[str]]) -> str:
    """Return the text of a file: the entries sorted by key."""
    if not lines:
        return ""
    return "\n".join([_HEAD, *(line for key in sorted(lines) for line in lines[key]), ""])


def origin_line(key: str, entry: BaselineEntry) -> str:
    """Return the line of one entry."""
    places = {c: place for place, c in enumerate(map(_stored, entry.at_peak_live))}
    live = [places.get(c) for c in map(_stored, entry.live)]
    parts = {
        "at_peak": entry.at_peak.to_json(),
        "at_peak_live": [_to_json(c) for c in entry.at_peak_live],
        # Most of them are the same at both moments.
        "live": [
            _to_json(c) if place is None else place
            for c, place in zip(entry.live, live, strict=True)
        ],
        "retained": entry.retained.to_json(),
        "retained_live": [_to_json(c) for c in entry.retained_live],
    }
    return encode([key, _all(Numbers.of(entry)), parts])


def entry_of(key: str, numbers: Numbers, lines: Iterable[str]) -> BaselineEntry:
    """Return an entry with these numbers, and with what one of the lines says they were made of."""
    for line in lines:
        if explains(line, key, numbers):
            with contextlib.suppress(*_WRONG):
                return _from_parts(numbers, json.loads(line)[2])
    return BaselineEntry(
        numbers.total,
        CategoryBytes(unknown=numbers.total),
        numbers.peaks,
        retained=CategoryBytes(unknown=numbers.retained),
    )


def explains(line: str, key: str, numbers: Numbers) -> bool:
    """Return whether a line is of an entry with these numbers."""
    start = f"[{encode(key)}, {encode(_all(numbers))}, "
    return line.startswith(start.encode("utf-8", "backslashreplace").decode())


def _from_parts(numbers: Numbers, parts: Mapping[str, Json]) -> BaselineEntry:
    at_peak_live = tuple(contributor_from_json(c) for c in parts["at_peak_live"])
    live = (
        at_peak_live[c] if isinstance(c, int) else contributor_from_json(c) for c in parts["live"]
    )
    at_peak = CategoryBytes.from_json(parts["at_peak"])
    retained = CategoryBytes.from_json(parts["retained"])
    if (at_peak.total, retained.total) != (numbers.total, numbers.retained):
        raise ValueError("it does not add up")
    return BaselineEntry(
        numbers.total,
        at_peak,
        numbers.peaks,
        tuple(live),
        retained,
        tuple(contributor_from_json(c) for c in parts["retained_live"]),
        at_peak_live,
    )


def _all(numbers: Numbers) -> list[int]:
    return [number for kind in COLUMNS for number in numbers.columns(kind)]


def _stored(contributor: Contributor) -> tuple[object, ...]:
    """What is kept of a contributor: all but its labels."""
    source = contributor.source
    return (
        contributor.identity,
        contributor.size_bytes,
        contributor.count,
        source.line if source else 0,
    )


def _to_json(contributor: Contributor) -> dict[str, Json]:
    data = contributor_to_json(contributor)
    del data["labels"]
    return {name: value for name, value in data.items() if value not in ("", None)}
