"""An entry of a baseline as text: its rows, which a reviewer reads, and the line of its origins.

docs/baseline-format.md describes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import astuple
from functools import lru_cache
from json.decoder import scanstring  # type: ignore[attr-defined]
from operator import attrgetter
from pathlib import Path
from typing import Final, TypeAlias

from pytest_torchmem.values.baseline import RESERVED, BaselineEntry, Numbers, Reserved
from pytest_torchmem.values.contributors import Category, CategoryBytes, Contributor, Phase, Source
from pytest_torchmem.values.json_values import Json, read_text, whole_number
from pytest_torchmem.values.units import format_size

Row: TypeAlias = list[Json]
"""``[key, sentence]`` or ``[key, one of `KINDS`, numbers]``."""

WORK: Final = ("total", "activation", "temporary", "input", "autograd_detail", "workspace")
STATE: Final = ("retained", "parameter", "gradient", "optimizer_state", "buffer", "unknown")
COLUMNS: Final = {"work": WORK, "state": STATE}
"""The numbers in the rows of each kind. Most changes of code change one row of the two: what a step
works with, or what a model holds."""

KINDS: Final = {**COLUMNS, RESERVED: ("reserved", "free_before")}
"""The same with the row that only a simulated GPU adds: see `Reserved`."""

_WORDS: Final = {category.value: category.value.replace("_", " ") for category in Category}
_PEAKS: Final = {kind: attrgetter(*columns[1:]) for kind, columns in COLUMNS.items()}

WIDTH: Final = 120
"""The characters of a sentence's line, where the key leaves room for the categories."""

encode: Final = json.JSONEncoder(ensure_ascii=False, check_circular=False).encode


def numbers_of(rows: Mapping[str, Json]) -> Numbers:
    """Return the numbers in the rows of an entry. Raises `ValueError` or `TypeError`."""
    amounts: dict[str, int] = {}
    for kind, columns in COLUMNS.items():
        if len(rows.get(kind, ())) != len(columns):
            raise ValueError(f"its row {kind!r} is missing or not complete")
        amounts.update(zip(columns, map(whole_number, rows[kind]), strict=True))
    total, retained = amounts.pop("total"), amounts.pop("retained")
    reserved = Reserved(*map(whole_number, rows.get(RESERVED, ())))
    return Numbers(total, CategoryBytes(**amounts), retained, reserved)


def columns_of(numbers: Numbers, kind: str) -> list[int]:
    """Return the numbers of a row."""
    own = numbers.total if kind == "work" else numbers.retained
    return [own, *_PEAKS[kind](numbers.peaks)]


def sentence_of(numbers: Numbers, room: int) -> str:
    """Return the sizes for people: ``17.3 MiB: activation 12.0 MiB, ...; 4.0 MiB retained``.

    The categories are named at their own peaks, the largest first, as far as there is room.
    """
    end = f"; {format_size(numbers.retained)} retained" if numbers.retained else ""
    text, between = format_size(numbers.total), ": "
    sizes = (pair for pair in numbers.peaks.items() if pair[1])
    for category, size_bytes in sorted(sizes, key=lambda pair: -pair[1]):
        more = f"{between}{_WORDS[category._value_]} {format_size(size_bytes)}"
        if len(text) + len(more) + len(end) > room:
            break
        text, between = text + more, ", "
    return text + end


def entry_lines(key: str, numbers: Numbers) -> list[str]:
    """Return the lines of one entry, each with a comma at its end."""
    rows: list[Row] = [sentence_row(key, numbers)]
    rows += ([key, kind, *columns_of(numbers, kind)] for kind in COLUMNS)
    if numbers.reserved != Reserved():
        rows.append([key, RESERVED, *astuple(numbers.reserved)])
    return [*map(row_line, rows)]


def are_as_written(key: str, lines: list[str]) -> bool:
    """Return whether lines have the kinds and the order of `entry_lines`."""
    if not len(COLUMNS) < len(lines) <= 1 + len(KINDS):
        return False
    start = f"[{encode(key)}, "
    kinds = [f'{start}"{kind}", ' for kind in KINDS][: len(lines) - 1]
    return lines[0].startswith(f'{start}"') and all(map(str.startswith, lines[1:], kinds))


def sentence_row(key: str, numbers: Numbers) -> Row:
    """Return the row that people read of an entry."""
    return [key, sentence_of(numbers, WIDTH - len(encode(key)) - len('[, ""],'))]


def row_line(row: Row) -> str:
    """Return the line of a row, with a comma at its end."""
    return encode(row) + ","


# The contributors to a baseline's numbers: a file beside it, which nobody has to review.
#
# A failure names its cause by it. Each line is one entry: its key, the numbers that it explains,
# and its contributors. A line whose numbers are not those of the baseline explains nothing and is
# not used. So a file that is missing, damaged or merged costs the names of causes, never a verdict.

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
    rows: dict[str, list[str]] = {}
    for line in lines if head == _HEAD else ():
        if line.startswith(_START):
            try:
                key, _ = scanstring(line, len(_START))
            except ValueError:
                continue
            rows.setdefault(key, []).append(line)
    return rows


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
    live = (
        _contributor_text(c) if (at := same.get(id(c))) is None else str(at) for c in entry.live
    )
    parts = {
        "at_peak": encode(entry.at_peak.to_json()),
        "retained": encode(entry.retained.to_json()),
        "at_peak_live": f"[{', '.join(map(_contributor_text, entry.at_peak_live))}]",
        "live": f"[{', '.join(live)}]",
        "retained_live": f"[{', '.join(map(_contributor_text, entry.retained_live))}]",
    }
    members = ", ".join(f'"{name}": {text}' for name, text in parts.items())
    return f"[{encode(key)}, {encode(_all(Numbers.of(entry)))}, {{{members}}}]"


def _contributor_text(c: Contributor) -> str:
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
    parts = {name: part for name, part in said.items() if part}
    end = encode({"count": count, **parts, "phase": phase.value}).removeprefix("{")
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
        reserved=numbers.reserved,
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
            numbers.reserved,
        )
    except _WRONG:
        return None
    adds_up = entry.at_peak.total == numbers.total and Numbers.of(entry) == numbers
    return entry if adds_up else None


def _all(numbers: Numbers) -> list[int]:
    return [number for kind in COLUMNS for number in columns_of(numbers, kind)]
