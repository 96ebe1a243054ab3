"""The profiler: its sessions, its event tree, and operators hidden from it."""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from operator import attrgetter
from typing import IO, TYPE_CHECKING, Any, Final, TypeAlias

import torch

# The event tree itself: torch.profiler exposes it only through these bindings.
from torch._C import _autograd
from torch._C._profiler import (
    RecordScope,
    _ExtraFields_Allocation,
    _ExtraFields_OutOfMemory,
    _ExtraFields_PyCall,
    _ExtraFields_PyCCall,
    _ExtraFields_TorchOp,
    _ProfilerEvent,
    _RecordFunctionFast,
    _TensorMetadata,
)

from pytest_torchmem.record.torch_api import ALL_RELEASES, Checked
from pytest_torchmem.values.errors import RecordingError

CHECKED: Final[Checked] = {
    "torch._C._autograd._KinetoEvent": ALL_RELEASES,
    "torch._C._autograd._ProfilerResult": ALL_RELEASES,
    "torch._C._autograd._disable_profiler": ALL_RELEASES,
    "torch._C._autograd._enable_profiler": ALL_RELEASES,
    "torch._C._autograd._enable_record_function": ALL_RELEASES,
    "torch._C._autograd._prepare_profiler": ALL_RELEASES,
    "torch._C._autograd._profiler_enabled": ALL_RELEASES,
    "torch.autograd.profiler.profile._stats": ("2.13.0", "2.13.0"),
    "torch._C._profiler._ExtraFields_Allocation": ALL_RELEASES,
    "torch._C._profiler._ExtraFields_OutOfMemory": ALL_RELEASES,
    "torch._C._profiler._ExtraFields_PyCCall": ALL_RELEASES,
    "torch._C._profiler._ExtraFields_PyCall": ALL_RELEASES,
    "torch._C._profiler._ExtraFields_TorchOp": ALL_RELEASES,
    "torch._C._profiler._NNModuleInfo": ALL_RELEASES,
    "torch._C._profiler._OptimizerInfo": ALL_RELEASES,
    "torch._C._profiler._ProfilerEvent": ALL_RELEASES,
    "torch._C._profiler._RecordFunctionFast": ALL_RELEASES,
    "torch._C._profiler._TensorMetadata": ALL_RELEASES,
    "torch._C._profiler.RecordScope": ("2.13.0", "2.13.0"),
}

AllocationFields = _ExtraFields_Allocation
OutOfMemoryFields = _ExtraFields_OutOfMemory
PyCallFields = _ExtraFields_PyCall
PyCCallFields = _ExtraFields_PyCCall
TorchOpFields = _ExtraFields_TorchOp
ProfilerEvent = _ProfilerEvent
TensorMetadata = _TensorMetadata
RecordFunction = _RecordFunctionFast
# A range that a program opens may be open when a session ends. Its end would be written into memory
# that is gone, once the next session has begun. Ranges of this scope have none of our callbacks.
_enable_profiler: Final[Any] = _autograd._enable_profiler
_SCOPES: Final = {scope for name, scope in RecordScope.__members__.items() if name != "USER_SCOPE"}

if TYPE_CHECKING:
    from torch._C._autograd import _KinetoEvent, _ProfilerResult
    from torch._C._profiler import _NNModuleInfo, _OptimizerInfo

    KinetoEvent: TypeAlias = _KinetoEvent
    ProfilerResult: TypeAlias = _ProfilerResult
    ModuleInfo: TypeAlias = _NNModuleInfo
    OptimizerInfo: TypeAlias = _OptimizerInfo


def reader(bindings: type[object], name: str) -> Callable[[Any], Any]:
    """The function behind an attribute of a class of ``torch._C``.

    Calling it costs less than looking the attribute up on each of many thousand objects.
    """
    return getattr(getattr(bindings, name), "fget", None) or attrgetter(name)


#: What an event of the tree has beside name and times, according to its type.
fields_of: Callable[[ProfilerEvent], Any] = reader(ProfilerEvent, "extra_fields")


_add_reference = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_IncRef", ctypes.pythonapi))


def storage_pointer(tensor: TensorMetadata) -> int | None:
    """The address of a tensor's storage; None where that has no memory.

    Torch gives that None away without a reference to it. Before Python 3.12 None would be freed
    after some 100,000 of them, which ends the process.
    """
    pointer: int | None = tensor.storage_data_ptr
    if pointer is None:
        _add_reference(None)
    return pointer


def name_of(event: ProfilerEvent) -> str:
    """The name of an event: for a Python call its file, line and function.

    The tracer keeps no reference to a function's name. That of a module's code is gone when the
    module has been imported, and what is found in its place need not even be text.
    """
    try:
        return str(event.name)
    except UnicodeDecodeError as error:
        place, _, _ = error.object.rpartition(b": ")
        return f"{place.decode(errors='replace')}: <module>"


def overload_of(event: ProfilerEvent) -> str:
    """The overload of an operator, such as ``Tensor``; "" where it has none."""
    return str(event.overload_name)


def own_cost_ns(front_end: object) -> int:
    """The time that torch's front end took to prepare, start and stop a session; 0 if not known."""
    stats = getattr(front_end, "_stats", None)
    calls = (
        "profiler_prepare_call_duration_us",
        "profiler_enable_call_duration_us",
        "profiler_disable_call_duration_us",
    )
    return sum(getattr(stats, call, 0) for call in calls) * 1000


def observe_operators(on: bool) -> None:
    """Let observers of operators see those of this thread, or not; allocations are seen always."""
    _autograd._enable_record_function(on)


# Kineto copies events of these kinds for its files, each with its metadata: a quarter of what the
# end of a session takes. We read torch's own tree, so we ask for the kinds of a device that has
# none here.
_NO_COPIES: Final = {torch.profiler.ProfilerActivity.MTIA}
# As torch has it: a body may leave another class in its place.
_FRONT_END: Final[Any] = torch.autograd.profiler.profile


class Session:
    """One session of the kineto profiler, without the front end's own bookkeeping.

    The front end builds an event list when it stops, which costs more than the recording.
    """

    def start(self) -> None:
        """Begin. Raises `RecordingError` when another session is active."""
        if profiler_is_active():
            raise RecordingError(
                "another torch profiler session is active around the test body, and only one can "
                "be; measure outside it"
            )
        front_end = _FRONT_END(
            use_cpu=True, use_kineto=True, record_shapes=True, profile_memory=True, with_stack=True
        )
        config = front_end.config()
        with _without_own_log():
            _autograd._prepare_profiler(config, _NO_COPIES)
            self._profile_function = sys.getprofile()
            _enable_profiler(config, {torch.profiler.ProfilerActivity.CPU}, _SCOPES)

    def stop(self) -> ProfilerResult:
        """End, and return the kineto result with the event tree.

        Raises `RecordingError` after a session of the body's, which takes the place of ours.
        """
        if not profiler_is_active():
            raise RecordingError(
                "the test body ran a torch profiler of its own, and only one can be active; what "
                "was measured until then is lost"
            )
        try:
            with _without_own_log():
                return _autograd._disable_profiler()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise RecordingError(f"torch's profiler failed: {reason}") from None
        finally:
            sys.setprofile(self._profile_function)


def allocations_in(result: ProfilerResult) -> list[AllocationFields]:
    """The fields of all allocations and frees in a kineto result."""
    waiting, events = list(result.experimental_event_tree()), []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        fields = fields_of(event)
        if isinstance(fields, AllocationFields):
            events.append(fields)
    return events


# The session has all its events; none of them has a copy.
_MISSES_COPIES: Final = b"Failed to recover relationship between all profiler and kineto events"


@contextmanager
def _without_own_log() -> Iterator[None]:
    """Keep the profiler's notes of its start and stop off standard error, and what it misses.

    Its library writes them whatever the log level. All else that is written meanwhile is passed on.
    """
    with suppress(OSError, ValueError, AttributeError):  # Python's own may be closed or None
        sys.stderr.flush()
    with ExitStack() as opened:
        # Where there is no standard error, or no file may be opened any more, it is left as it is.
        with suppress(OSError):
            original = os.dup(2)
            opened.callback(os.close, original)
            caught = opened.enter_context(_file_without_name())
            opened.callback(_pass_on, caught, original)
            os.dup2(caught.fileno(), 2)
        yield


def _pass_on(caught: IO[bytes], original: int) -> None:
    os.dup2(original, 2)
    caught.seek(0)
    # Nobody may read any more what the program writes there.
    with suppress(OSError):
        for line in caught:
            if not (line.startswith(b"USDT:") or _MISSES_COPIES in line):
                os.write(2, line)


def _file_without_name() -> IO[bytes]:
    # One in memory takes a third of the time of one on disk; a small test has four.
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("stderr"), "w+b")
    return tempfile.TemporaryFile()


def profiler_is_active() -> bool:
    return _autograd._profiler_enabled()
