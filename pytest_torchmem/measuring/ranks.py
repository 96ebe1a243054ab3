"""One result per rank: who this process is, files named for it, and the results of all ranks."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pytest_torchmem.values.measured import Rank

_NUMBER: Final = re.compile(r"\d{1,9}")

PLACE: Final = "{rank}"
"""What stands for the rank's number in the name of a file."""


def environment_rank(environment: Mapping[str, str] = os.environ) -> Rank:
    """Return what a launcher such as ``torchrun`` says; rank 0 of 1 where none does."""
    number, count = environment.get("RANK", ""), environment.get("WORLD_SIZE", "")
    if _NUMBER.fullmatch(number) and _NUMBER.fullmatch(count) and int(number) < int(count):
        return Rank(int(number), int(count))
    return Rank()


def current_rank() -> Rank:
    """Return this process's rank in torch's process group, else what its launcher says."""
    if "torch" in sys.modules:
        from pytest_torchmem.record.process_group import group_rank

        if found := group_rank():
            return Rank(*found)
    return environment_rank()


def path_of_rank(path: str | os.PathLike[str], rank: Rank) -> Path:
    """Return the path for one rank: with its number for ``{rank}``, or at the name's end.

    Where there is one rank only, a path without ``{rank}`` stays as it is.
    """
    text = os.fspath(path)
    if PLACE in text:
        return Path(text.replace(PLACE, str(rank.number)))
    plain = Path(text)
    return plain if rank.count == 1 else plain.with_stem(f"{plain.stem}-rank{rank.number}")
