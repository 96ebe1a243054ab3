"""Find the stored entry that a renamed test left behind under its old name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from pytest_torchmem.values.baseline import BaselineEntry
from pytest_torchmem.values.contributors import CategoryBytes


@dataclass(frozen=True, slots=True)
class Renameable:
    """A new measurement: its region, ``""`` for the whole body, and what it would store."""

    region: str
    entry: BaselineEntry


def find_renames(
    unused: Mapping[str, BaselineEntry], new: Mapping[str, Renameable]
) -> dict[str, str]:
    """Return new keys by old ones, for entries of one module.

    Two belong together when their parameters, their region and all their numbers are equal, and
    neither could belong to another one: a guess is worse than a question.
    """
    signatures: dict[object, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    regions = {entry.region for entry in new.values()}
    for key, entry in unused.items():
        for region in regions:
            if not region or key.endswith(f"::{region}"):
                signatures[_signature(key, region, entry)][0].append(key)
    for key, measured in new.items():
        signatures[_signature(key, measured.region, measured.entry)][1].append(key)
    return {old[0]: added[0] for old, added in signatures.values() if len(old) == len(added) == 1}


def _signature(
    key: str, region: str, entry: BaselineEntry
) -> tuple[str, str, int, CategoryBytes, CategoryBytes]:
    at = key.find("[")
    parameters = key[at:] if at >= 0 else ""
    return parameters, region, entry.total, entry.peaks, entry.retained
