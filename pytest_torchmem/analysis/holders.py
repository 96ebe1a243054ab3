"""Holders: what keeps bytes alive, one line for all that is kept in the same way."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from pytest_torchmem.analysis.results import Fate, Holder

_INDEX: Final = re.compile(r"\[\d+\]")


def group_holders(single: Iterable[Holder]) -> tuple[Holder, ...]:
    """Return one holder for all that differ in nothing but an index, largest first."""
    groups: dict[tuple[Fate, str], list[Holder]] = {}
    for holder in single:
        groups.setdefault((holder.fate, _INDEX.sub("[*]", holder.by)), []).append(holder)
    grouped = []
    for (_, folded), group in groups.items():
        by = folded if len({holder.by for holder in group}) > 1 else group[0].by
        size_bytes, count = sum(h.size_bytes for h in group), sum(h.count for h in group)
        grouped.append(replace(group[0], size_bytes=size_bytes, count=count, by=by))
    return tuple(sorted(grouped, key=lambda holder: -holder.size_bytes))
