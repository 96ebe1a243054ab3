"""The contributors to a baseline's numbers: a file beside it, which nobody has to review.

A failure names its cause by it. Each line is one entry: its key, the numbers that it explains, and
its contributors. A line whose numbers are not those of the baseline explains nothing and is not
used. So a file that is missing, damaged or merged costs the names of causes, never a verdict.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from json.decoder import scanstring  # type: ignore[attr-defined]
from pathlib import Path
from typing import Final, overload

from pytest_torchmem.store.baseline_rows import COLUMNS, Numbers, encode
from pytest_torchmem.values.baseline import BaselineEntry
from pytest_torchmem.values.contributors import CategoryBytes, Contributor
from pytest_torchmem.values.json_values import Json

FORMATS: Final = {1: "0.1.0: an entry in each line"}
"""Every format number ever written, and what it brought."""

_HEAD: Final = '{"format": 1}'
_WRONG: Final = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
_START: Final = '["'
_DECODER: Final = json.JSONDecoder()


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
    # Nearly all are the very same objects, and to hash one takes as long as to write it down.
    same = {id(contributor): place for place, contributor in enumerate(entry.at_peak_live)}
    if any(id(contributor) not in same for contributor in entry.live):
        places = {contributor: place for place, contributor in enumerate(entry.at_peak_live)}
        same |= {id(c): places[c] for c in entry.live if c in places}
    # What a comparison needs stands first; the contributors behind it are often never decoded.
    parts = {
        "at_peak": entry.at_peak.to_json(),
        "retained": entry.retained.to_json(),
        "at_peak_live": [c.as_origin() for c in entry.at_peak_live],
        # Most of them are the same at both moments.
        "live": [c.as_origin() if (at := same.get(id(c))) is None else at for c in entry.live],
        "retained_live": [c.as_origin() for c in entry.retained_live],
    }
    return encode([key, _all(Numbers.of(entry)), parts])


def entry_of(key: str, numbers: Numbers, lines: Iterable[str]) -> BaselineEntry:
    """Return an entry with these numbers, and with what one of the lines says they were made of."""
    start = _start(key, numbers)
    for line in lines:
        if line.startswith(start) and (entry := _explained(numbers, line, len(start))):
            return entry
    return BaselineEntry(
        numbers.total,
        CategoryBytes(unknown=numbers.total),
        numbers.peaks,
        retained=CategoryBytes(unknown=numbers.retained),
    )


def explains(line: str, key: str, numbers: Numbers) -> bool:
    """Return whether a line is of an entry with these numbers."""
    return line.startswith(_start(key, numbers))


def _start(key: str, numbers: Numbers) -> str:
    start = f"[{encode(key)}, {encode(_all(numbers))}, "
    return start.encode("utf-8", "backslashreplace").decode()


def _explained(numbers: Numbers, line: str, start: int) -> BaselineEntry | None:
    """Return the entry that a line explains from ``start`` on; None where it is damaged."""
    try:
        at_peak, retained = map(CategoryBytes.from_json, _amounts(line, start))
    except _WRONG:
        return None
    if (at_peak.total, retained.total) != (numbers.total, numbers.retained):
        return None  # it does not add up
    origins = _Origins(line)
    live, retained_live, at_peak_live = (
        _Contributors(origins, part) for part in ("live", "retained_live", "at_peak_live")
    )
    return BaselineEntry(
        numbers.total, at_peak, numbers.peaks, live, retained, retained_live, at_peak_live
    )


def _amounts(line: str, start: int) -> Sequence[Json]:
    """Return the compositions at the peak and at the end. Raises what damage raises."""
    found = []
    for opening in ('{"at_peak": ', ', "retained": '):
        if not line.startswith(opening, start):  # somebody laid it out anew
            parts = json.loads(line)[2]
            return parts["at_peak"], parts["retained"]
        value, start = _DECODER.raw_decode(line, start + len(opening))
        found.append(value)
    return found


@dataclass(frozen=True)
class _Origins:
    """The contributors in a line, decoded when somebody asks for one.

    Most entries are compared by their numbers alone.
    """

    line: str

    @cached_property
    def parts(self) -> Mapping[str, tuple[Contributor, ...]]:
        """The contributors by part; none at all where the line is damaged."""
        try:
            parts = json.loads(self.line)[2]
            at_peak = tuple(map(Contributor.from_json, parts["at_peak_live"]))
            own = (
                at_peak[c] if type(c) is int else Contributor.from_json(c) for c in parts["live"]
            )
            kept = tuple(map(Contributor.from_json, parts["retained_live"]))
            return {"at_peak_live": at_peak, "live": tuple(own), "retained_live": kept}
        except _WRONG:
            return {"at_peak_live": (), "live": (), "retained_live": ()}


class _Contributors(Sequence[Contributor]):
    """One part of a line's contributors; it equals the tuple of them."""

    def __init__(self, origins: _Origins, part: str) -> None:
        self._origins, self._part = origins, part

    def _decoded(self) -> tuple[Contributor, ...]:
        return self._origins.parts[self._part]

    @overload
    def __getitem__(self, place: int) -> Contributor: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Contributor, ...]: ...
    def __getitem__(self, place: int | slice) -> Contributor | tuple[Contributor, ...]:
        return self._decoded()[place]

    def __iter__(self) -> Iterator[Contributor]:
        return iter(self._decoded())

    def __len__(self) -> int:
        return len(self._decoded())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._decoded() == tuple(other)

    def __hash__(self) -> int:
        return hash(self._decoded())

    def __repr__(self) -> str:
        return repr(self._decoded())


def _all(numbers: Numbers) -> list[int]:
    return [number for kind in COLUMNS for number in numbers.columns(kind)]
