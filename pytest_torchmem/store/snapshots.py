"""Files that ``torch.cuda.memory._dump_snapshot`` wrote."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NoReturn

from pytest_torchmem.analysis.snapshot import Snapshot, read_snapshot, read_snapshots
from pytest_torchmem.values.errors import SnapshotError, is_torchmem_error
from pytest_torchmem.values.json_values import open_file
from pytest_torchmem.values.units import Device

__tracebackhide__ = is_torchmem_error


class _PlainUnpickler(pickle.Unpickler):
    """Builds containers, strings and numbers, and nothing else: no name is ever looked up.

    A pickle runs code by naming a function of a module; a snapshot names none.
    """

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")

    def persistent_load(self, pid: object, /) -> NoReturn:
        raise pickle.UnpicklingError("it refers to something outside of itself")


_NUMBER: Final = rb"(?:[N\x88\x89]|K.|M..|J.{4})"
_RUN: Final = re.compile(
    rb"(?:%b{1,3}[\x85-\x87]|%b|[(\]})ldaesu012\x94]|[hq\x80].|j.{4}|[G\x95].{8}){1,1000}"
    % (_NUMBER, _NUMBER),
    re.DOTALL,
)
"""Instructions of a pickle with arguments of a fixed length. A tuple is of numbers: one of tuples,
as a key, could take for ever to be looked up."""

_LENGTHS: Final = {
    **dict.fromkeys(b"\x8aU\x8cC", 1),
    **dict.fromkeys(b"\x8bTXB", 4),
    **dict.fromkeys(b"\x8d\x8e", 8),
}
"""Instructions with text or a number, by how many bytes its length has."""

_SLOT: Final = b"r"
_ENDS: Final = b".RbQPcio\x81\x92\x93"
"""The end, and what the unpickler refuses."""


def _check_instructions(content: bytes) -> None:
    """Raise `ValueError` for a pickle that takes far more memory or time than its size.

    An instruction names the slot of the memo that it fills, and Python makes room for all slots
    below that one: five bytes can ask for 64 GiB. No pickle has more slots than instructions.
    """
    place = 0
    while place < len(content):
        if run := _RUN.match(content, place):
            place = run.end()
            continue
        code = content[place]
        if code in _LENGTHS:
            start = place + 1 + _LENGTHS[code]
            place = start + int.from_bytes(content[place + 1 : start], "little")
        elif code in _SLOT and int.from_bytes(content[place + 1 : place + 5], "little") <= place:
            place += 5
        elif code in _ENDS:
            return
        else:
            raise ValueError(f"it is written in a way that no snapshot is (at byte {place})")


def load_snapshot(path: str | os.PathLike[str], device: Device | int | None = None) -> Snapshot:
    """Return one device of a snapshot of torch's CUDA allocator, by default the busiest.

    ``path`` is a file that ``torch.cuda.memory._dump_snapshot(path)`` wrote, after
    ``_record_memory_history()``. A history that begins in the middle, as most do, is complete with
    the segments beside it: ``start`` of the answer says what was there before. Reading it needs
    neither torch nor a GPU, and runs nothing that the file says.

    ``device`` is ``"cuda:1"``, its number, or ``"cuda"`` for the one that allocated. A file without
    a history says what was alive. Raises `SnapshotError` for another file, `DeviceError` for
    another device.
    """
    with _errors_named(path):
        return read_snapshot(_unpickled(path), device)


def load_snapshots(path: str | os.PathLike[str]) -> list[Snapshot]:
    """Return each device of a snapshot that has memory or a history, the fullest first.

    Raises `SnapshotError`.
    """
    with _errors_named(path):
        return read_snapshots(_unpickled(path))


def _unpickled(path: str | os.PathLike[str]) -> object:
    try:
        with open_file(Path(path)) as file:
            content = file.read()
        _check_instructions(content)
        return _PlainUnpickler(io.BytesIO(content)).load()
    except OSError as error:
        raise _UnreadableError(f"{path} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # a damaged pickle fails in any of a dozen ways
        raise _UnreadableError(f"{path} is no snapshot of torch's allocator: {error}") from None


class _UnreadableError(SnapshotError):
    """It names its file."""


@contextlib.contextmanager
def _errors_named(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except _UnreadableError as error:
        raise SnapshotError(error.sentence) from None
    except SnapshotError as error:
        raise SnapshotError(f"{path}: {error.sentence}") from None
