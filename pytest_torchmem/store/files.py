"""One writer at a time, and a file that is replaced in one step."""

from __future__ import annotations

import contextlib
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from pytest_torchmem.values.errors import ReportError

LOCK: Final = ".lock"
"""The file that writers of one folder of baselines lock. It is never deleted: whoever waits for a
deleted file and whoever makes it anew would hold two locks."""

PATIENCE_S: Final = 60.0
"""A writer waits so long for another one. Writing takes milliseconds."""

_LITTER: Final = re.compile(r"\..+\.\d+-[0-9a-f]{8}")
"""Names of half-written files, which a killed run left."""


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the right to write into ``folder``. Raises `OSError` where that cannot be had.

    The operating system holds the lock, so it ends with its process, however that ends.
    """
    from filelock import FileLock  # only an update needs it

    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / LOCK).acquire(PATIENCE_S, poll_interval=0.01):
        yield


def remove_litter(folder: Path) -> None:
    """Remove what killed runs left in a folder. Whoever calls this holds its lock."""
    with contextlib.suppress(OSError):
        # A folder has two files for each test module, and one is written after the other.
        for name in os.listdir(folder):  # noqa: PTH208  # a path for each would take long
            if _LITTER.fullmatch(name):
                (folder / name).unlink(missing_ok=True)


def replace_file(path: Path, content: str | bytes) -> None:
    """Put ``content`` into a file in one step: a reader sees the old file or the new one.

    The folders of the file are made. A link stays, and the file that it points to is replaced. Text
    becomes UTF-8 with ``\\n`` at the ends of lines; half a surrogate pair, which UTF-8 cannot hold,
    becomes its escape, which JSON reads as the same half. Raises `OSError`; the file is unchanged
    then, and nothing is left beside it.
    """
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}")
    try:
        temporary.write_bytes(data)
        _patiently(lambda: temporary.replace(path))
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_report(path: Path, content: str | bytes) -> None:
    """Put ``content`` into a file that a user asked for; see `replace_file`.

    Raises `ReportError` where that cannot be.
    """
    try:
        replace_file(path, content)
    except OSError as error:
        raise ReportError(f"{path} cannot be written: {error.strerror or error}") from None


def _patiently(action: Callable[[], object]) -> None:
    """Do what Windows refuses for as long as another process has the file open."""
    for _ in range(20 if os.name == "nt" else 0):
        with contextlib.suppress(PermissionError):
            action()
            return
        time.sleep(0.02)
    action()
