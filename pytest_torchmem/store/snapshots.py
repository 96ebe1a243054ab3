"""Files that ``torch.cuda.memory._dump_snapshot`` wrote."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import NoReturn

from pytest_torchmem.analysis.snapshot import Snapshot, read_snapshot
from pytest_torchmem.values.errors import SnapshotError, is_torchmem_error

# A user's mistake is reported at the user's line.
__tracebackhide__ = is_torchmem_error


class _PlainUnpickler(pickle.Unpickler):
    """Builds containers, strings and numbers, and nothing else: no name is ever looked up.

    A pickle runs code by naming a function of a module; a snapshot names none.
    """

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")

    def persistent_load(self, pid: object, /) -> NoReturn:
        raise pickle.UnpicklingError("it refers to something outside of itself")


def load_snapshot(path: str | os.PathLike[str], device: int | None = None) -> Snapshot:
    """Return one device of a snapshot of torch's CUDA allocator, by default the busiest.

    ``path`` is a file that ``torch.cuda.memory._dump_snapshot(path)`` wrote, after
    ``_record_memory_history()``. A history that begins in the middle, as most do, is complete with
    the segments beside it: ``start`` of the answer says what was there before. Reading it needs
    neither torch nor a GPU, and runs nothing that the file says.

    Raises `SnapshotError` for another file, `RequestError` where its history does not fit its
    segments.
    """
    try:
        with Path(path).open("rb") as file:
            data = _PlainUnpickler(file).load()
    except OSError as error:
        raise SnapshotError(f"{path} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # a damaged pickle fails in any of a dozen ways
        raise SnapshotError(f"{path} is no snapshot of torch's allocator: {error}") from None
    try:
        return read_snapshot(data, device)
    except SnapshotError as error:
        raise SnapshotError(f"{path}: {error.sentence}") from None
