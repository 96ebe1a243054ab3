"""The contributors to a baseline's numbers: a file beside it, which nobody has to review.

A failure names its cause by it. Each line is one entry: its key, the numbers that it explains, and
its contributors. A line whose numbers are not those of the baseline explains nothing and is not
used. So a file that is missing, damaged or merged costs the names of causes, never a verdict.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from json.decoder import scanstring  # type: ignore[attr-defined]
from pathlib import Path
from typing import Final

from pytest_torchmem.store.baseline_rows import COLUMNS, columns_of, encode
from pytest_torchmem.values.baseline import BaselineEntry, Numbers
from pytest_torchmem.values.contributors import Category, CategoryBytes, Contributor, Phase, Source
from pytest_torchmem.values.json_values import read_text

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
        head, *lines = read_text(path).split("\n")
    except (OSError, ValueError):
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
    # Most of them are the same at both moments.
    live = (_told(c) if (at := same.get(id(c))) is None else str(at) for c in entry.live)
    parts = {
        "at_peak": encode(entry.at_peak.to_json()),
        "retained": encode(entry.retained.to_json()),
        "at_peak_live": f"[{', '.join(map(_told, entry.at_peak_live))}]",
        "live": f"[{', '.join(live)}]",
        "retained_live": f"[{', '.join(map(_told, entry.retained_live))}]",
    }
    told = ", ".join(f'"{name}": {text}' for name, text in parts.items())
    return f"[{encode(key)}, {encode(_all(Numbers.of(entry)))}, {{{told}}}]"


def _told(c: Contributor) -> str:
    """Return the text of a contributor, without labels and what is empty."""
    begin, end = _around_bytes(c.category, c.count, c.operator, c.module, c.source, c.phase)
    return f"{begin}{c.size_bytes}{end}"


@lru_cache(maxsize=4096)
def _around_bytes(
    category: Category, count: int, operator: str, module: str, source: Source | None, phase: Phase
) -> tuple[str, str]:
    """Return the text before and after a contributor's bytes; the rest is the same in many."""
    begin = encode({"category": category.value, "bytes": 0}).removesuffix("0}")
    said = {"operator": operator, "module": module, "source": source and source.to_json()}
    told = {name: part for name, part in said.items() if part}
    end = encode({"count": count, **told, "phase": phase.value}).removeprefix("{")
    return begin, f", {end}"


def entry_of(key: str, numbers: Numbers, lines: Iterable[str]) -> BaselineEntry:
    """Return an entry with these numbers, and with what one of the lines says they were made of."""
    for line in lines:
        if explains(line, key, numbers) and (entry := _explained(numbers, line)):
            return entry
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


def _explained(numbers: Numbers, line: str) -> BaselineEntry | None:
    """Return the entry that a line explains; None where it is damaged or does not add up."""
    try:
        parts = json.loads(line)[2]
        at_peak_live = tuple(map(Contributor.from_json, parts["at_peak_live"]))
        live = (
            at_peak_live[c] if type(c) is int else Contributor.from_json(c) for c in parts["live"]
        )
        entry = BaselineEntry(
            numbers.total,
            CategoryBytes.from_json(parts["at_peak"]),
            numbers.peaks,
            tuple(live),
            CategoryBytes.from_json(parts["retained"]),
            tuple(map(Contributor.from_json, parts["retained_live"])),
            at_peak_live,
        )
    except _WRONG:
        return None
    adds_up = entry.at_peak.total == numbers.total and Numbers.of(entry) == numbers
    return entry if adds_up else None


def _all(numbers: Numbers) -> list[int]:
    return [number for kind in COLUMNS for number in columns_of(numbers, kind)]
