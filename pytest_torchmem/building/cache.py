"""The folder of what is fetched and built, and how something appears in it: whole, and once."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Final

UNFINISHED: Final = ".building"


def cache_root() -> Path:
    """Return the folder that belongs to us in the user's cache.

    Raises `RuntimeError` where the user has no home.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "pytest-torchmem"


def digest(facts: str, files: Iterable[Path]) -> str:
    """Return a short name for what is built of these sources under these circumstances."""
    hashed = blake2b(facts.encode())  # OpenSSL's hashes take 10 ms to begin with
    for file in sorted(files):
        hashed.update(file.read_bytes())
    return hashed.hexdigest()[:12]


def make_once(out: Path, is_made: Callable[[], bool], make: Callable[[], None]) -> None:
    """Call ``make`` where something is missing: one process does, and those beside it wait."""
    if is_made():
        return
    from filelock import FileLock  # only a build needs it

    out.parent.mkdir(parents=True, exist_ok=True)
    _remove_unfinished(out.parent)
    with FileLock(f"{out}.lock"):
        if not is_made():
            make()


@contextlib.contextmanager
def unfinished(out: Path) -> Iterator[Path]:
    """Make a folder beside ``out`` for what is not ready; no other process makes ``out`` now."""
    folder = out.with_name(out.name + UNFINISHED)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_unfinished(folder: Path) -> None:
    """Remove what builds have left that were killed: their locks are held no more."""
    from filelock import FileLock, Timeout

    for leftover in folder.glob(f"*{UNFINISHED}"):
        with contextlib.suppress(Timeout), FileLock(leftover.with_suffix(".lock"), timeout=0):
            shutil.rmtree(leftover, ignore_errors=True)
