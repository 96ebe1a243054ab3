"""One writer at a time for a file, on local disks, network drives and Windows alike."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

PATIENCE_S: Final = 20.0
"""A lock that does not change for so long was left by a process that died. Holding it takes
milliseconds."""

_STEP_S: Final = 0.02
_TRIES: Final = 20


@contextlib.contextmanager
def locked(path: Path, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """Hold the right to replace ``path``. Raises `OSError` where its folder cannot be written.

    The lock is a file that only one process can create; that is atomic on NFS and on Windows too,
    where locks of the operating system are not to be had or not to be trusted. Each holder writes
    a name of its own, so that waiting for one dead holder is told apart from waiting for many live
    ones, without comparing the clocks of two machines.
    """
    lock = path.with_name(f".{path.name}.lock")
    name = f"{os.getpid()} {uuid.uuid4().hex}"
    _acquire(lock, name, patience_s)
    try:
        yield
    finally:
        # Somebody who took us for dead may have gone ahead: then it is no longer ours to remove.
        if _holder(lock) == name:
            _remove(lock)


def _acquire(lock: Path, name: str, patience_s: float) -> None:
    seen, since = "", time.monotonic()
    while not _create(lock, name):
        holder = _holder(lock)
        if holder != seen:
            seen, since = holder, time.monotonic()
        elif time.monotonic() - since > patience_s:
            _take_away(lock, seen)
        time.sleep(_STEP_S)


def _create(lock: Path, name: str) -> bool:
    try:
        with lock.open("x", encoding="utf-8") as file:
            file.write(name)
    except FileExistsError:
        return False
    except PermissionError:
        if os.name == "nt" and lock.exists():  # being removed by its holder at this moment
            return False
        raise
    return True


def _take_away(lock: Path, holder: str) -> None:
    """Remove a dead holder's lock. Of several who try, the rename lets one succeed."""
    grave = lock.with_name(f"{lock.name}.{uuid.uuid4().hex[:8]}")
    with contextlib.suppress(OSError):
        lock.rename(grave)
        if _holder(grave) != holder and not lock.exists():
            grave.rename(lock)  # it was a live one after all: hand it back
        else:
            grave.unlink()


def _holder(lock: Path) -> str:
    try:
        return lock.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _remove(lock: Path) -> None:
    with contextlib.suppress(OSError):
        _patiently(lambda: lock.unlink(missing_ok=True))


def _patiently(action: Callable[[], object]) -> None:
    """Do what Windows refuses for as long as another process has the file open."""
    for _ in range(_TRIES if os.name == "nt" else 0):
        with contextlib.suppress(PermissionError):
            action()
            return
        time.sleep(_STEP_S)
    action()


def replace_file(path: Path, text: str) -> None:
    """Put ``text`` into a file in one step: a reader sees the old file or the new one.

    Raises `OSError`; the file is unchanged then, and nothing is left beside it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}")
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        _patiently(lambda: temporary.replace(path))
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
