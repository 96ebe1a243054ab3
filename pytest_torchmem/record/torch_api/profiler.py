"""The profiler: its sessions, its event tree, and operators hidden from it."""

from __future__ import annotations

import cProfile
import ctypes
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from threading import get_ident
from types import CodeType, ModuleType
from typing import IO, TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, TypeAlias
from weakref import WeakSet

import torch

# The event tree itself: torch.profiler exposes it only through these bindings.
from torch._C import _autograd
from torch._C._profiler import (
    ProfilerConfig,
    ProfilerState,
    RecordScope,
    _ExperimentalConfig,
    _ExtraFields_Allocation,
    _ExtraFields_OutOfMemory,
    _ExtraFields_PyCall,
    _ExtraFields_PyCCall,
    _ExtraFields_TorchOp,
    _ProfilerEvent,
    _RecordFunctionFast,
    _TensorMetadata,
)

from pytest_torchmem.record.torch_api import Checked
from pytest_torchmem.values.errors import RecordingError

CHECKED: Final[Checked] = {
    "torch._C._autograd._KinetoEvent": ("2.10.0", "2.15.0"),
    "torch._C._autograd._ProfilerResult": ("2.10.0", "2.15.0"),
    "torch._C._autograd._disable_profiler": ("2.10.0", "2.15.0"),
    "torch._C._autograd._disable_profiler_legacy": ("2.10.0", "2.15.0"),
    "torch._C._autograd._enable_profiler": ("2.10.0", "2.15.0"),
    "torch._C._autograd._enable_profiler_legacy": ("2.10.0", "2.15.0"),
    "torch._C._autograd._enable_record_function": ("2.10.0", "2.15.0"),
    "torch._C._autograd._prepare_profiler": ("2.10.0", "2.15.0"),
    "torch._C._autograd._profiler_enabled": ("2.10.0", "2.15.0"),
    "torch.autograd.profiler._prepare_profiler": ("2.10.0", "2.15.0"),
    "torch.autograd.profiler._is_profiler_enabled": ("2.10.0", "2.13.0"),
    "torch.autograd.profiler.profile._stats": ("2.13.0", "2.13.0"),
    "torch._C._profiler._ExperimentalConfig": ("2.10.0", "2.15.0"),
    "torch._C._profiler._ExtraFields_Allocation": ("2.10.0", "2.15.0"),
    "torch._C._profiler._ExtraFields_OutOfMemory": ("2.10.0", "2.15.0"),
    "torch._C._profiler._ExtraFields_PyCCall": ("2.10.0", "2.15.0"),
    "torch._C._profiler._ExtraFields_PyCall": ("2.10.0", "2.15.0"),
    "torch._C._profiler._ExtraFields_TorchOp": ("2.10.0", "2.15.0"),
    "torch._C._profiler._NNModuleInfo": ("2.10.0", "2.15.0"),
    "torch._C._profiler._OptimizerInfo": ("2.10.0", "2.15.0"),
    "torch._C._profiler._ProfilerEvent": ("2.10.0", "2.15.0"),
    "torch._C._profiler._RecordFunctionFast": ("2.10.0", "2.15.0"),
    "torch._C._profiler._TensorMetadata": ("2.10.0", "2.15.0"),
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
#: How a `RecordFunction` begins; as `RecordFunction`, it observes what operators are observed by.
BEGIN_RANGE: Final = "torch._C._profiler._RecordFunctionFast.__enter__"
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


class _Observing(threading.local):
    on = True


_observing: Final = _Observing()


def observe_operators(on: bool) -> None:
    """Let the profiler see the operators of this thread, or not; allocations it sees always."""
    _observing.on = on
    _autograd._enable_record_function(on)


def begin_unobserved(begin: Callable[[RecordFunction], object], found: RecordFunction) -> object:
    """Begin a range that no profiler sees."""
    before = _observing.on
    observe_operators(False)
    try:
        return begin(found)
    finally:
        observe_operators(before)


#: A front end of torch's calls it before a session begins.
PREPARE: Final = "torch.autograd.profiler._prepare_profiler"


def begin_counting() -> None:
    """Let torch's older profiler note allocations of the calling thread, and no operators."""
    off = (False, False, False)
    config = ProfilerConfig(ProfilerState.CPU, False, True, *off, _ExperimentalConfig())
    _autograd._enable_profiler_legacy(config)
    observe_operators(False)


#: A switch of libc10's (2.6.0 to 2.15.0): the running total of the CPU's memory counts what all
#: threads allocate and free, and not only those that are profiled.
COUNT_ALL_THREADS: Final = "libc10.FLAGS_caffe2_report_cpu_memory_usage"


def _libc10() -> ctypes.CDLL:
    return ctypes.CDLL(str(next(Path(torch.__file__).parent.glob("lib/libc10.*"))))


@cache
def all_threads_switch() -> ctypes.c_bool | None:
    """Return that switch; None where torch lacks it, or would print each allocation then."""
    try:
        switch = ctypes.c_bool.in_dll(_libc10(), COUNT_ALL_THREADS.partition(".")[2])
        return switch if _least_printed().value > 0 else None
    except (StopIteration, OSError, ValueError):
        return None


def _least_printed() -> ctypes.c_int:
    return ctypes.c_int.in_dll(_libc10(), "FLAGS_caffe2_log_level")


# A function of libc10's (2.13.0): it returns what counts the memory of the CPU's tensors.
_CPU_REPORTER: Final = "libc10._ZN3c1025profiledCPUMemoryReporterEv"
_UNUSUAL_BYTES: Final = 40_009
_NOTHING_PRINTED: Final = 4


class _Reporter(NamedTuple):
    """Words of torch that count the memory of the CPU's tensors, and the places of two of them."""

    words: ctypes.Array[ctypes.c_size_t]
    total: int
    unknown: int | None


@cache
def _reporter() -> _Reporter | None:
    """Return what counts; its words are found by what an allocation and two frees add to them."""
    switch = all_threads_switch()
    find = switch is not None and getattr(_libc10(), _CPU_REPORTER.partition(".")[2], None)
    if switch is None or not find:
        return None
    find.restype = ctypes.c_void_p
    words = (ctypes.c_size_t * 16).from_address(find())
    unknown = torch.UntypedStorage(_UNUSUAL_BYTES)  # type: ignore[no-untyped-call]
    level, was_on = _least_printed(), switch.value
    was_printed, switch.value = level.value, True
    before = list(words)
    held = torch.UntypedStorage(_UNUSUAL_BYTES)  # type: ignore[no-untyped-call]
    after = list(words)
    del held
    freed, level.value = list(words), _NOTHING_PRINTED
    del unknown
    level.value, switch.value = was_printed, was_on
    found = [n for n in range(len(words)) if after[n] - before[n] == _UNUSUAL_BYTES]
    counts = [n for n in range(len(words)) if words[n] - freed[n] == 1]
    return _Reporter(words, found[0], counts[0] if counts else None) if len(found) == 1 else None


def cpu_total() -> Callable[[], int] | None:
    """Return a function that says how many bytes of the CPU's memory are counted as allocated.

    First asked outside of a session. None where it is not found.
    """
    reporter = _reporter()
    return partial(reporter.words.__getitem__, reporter.total) if reporter else None


def print_no_frees() -> None:
    """Keep torch from printing that memory is freed which came before the session.

    It prints so at the first and each thousandth time, and counts from one again after this.
    """
    reporter = _reporter()
    if reporter and reporter.unknown is not None:
        reporter.words[reporter.unknown] = 1


class Counted(NamedTuple):
    """The allocations of a thread on the CPU while it was counted.

    Attributes:
        thread: Its number, which events of a session have as ``start_tid``.
        changes: Nanoseconds since the beginning, and bytes, below zero where memory is freed.
    """

    thread: int
    changes: tuple[tuple[int, int], ...]


def end_counting() -> Counted:
    """End what `begin_counting` began on the calling thread."""
    observe_operators(True)
    first, *events = (event for part in _autograd._disable_profiler_legacy() for event in part)
    return Counted(
        first.thread_id(),
        tuple(
            (int(first.cpu_elapsed_us(event) * 1000), size)
            for event in events
            if (size := event.cpu_memory_usage())
        ),
    )


def allocations_in(result: ProfilerResult) -> list[AllocationFields]:
    """The fields of all allocations and frees in a kineto result."""
    waiting, found = list(result.experimental_event_tree()), []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        fields = fields_of(event)
        if isinstance(fields, AllocationFields):
            found.append(fields)
    return found


# As torch has it: a body may leave another class in its place.
_FRONT_END: Final[Any] = torch.autograd.profiler.profile
# What torch's Python tracer sets as the profile function.
_TRACER: Final = "TraceContext"


# Under ``python -m cProfile`` the class is ``__main__.Profile``; both are made from the one in C.
_C_PROFILER: Final[Any] = cProfile.Profile.__mro__[1]


#: The calling thread's own; a recording puts another one in its place.
profile_function: Final = sys.getprofile

#: What a program learns its profile functions from.
GETTERS: Final = ("sys.getprofile", "threading.getprofile")


class _ProfileFunction:
    """The calling thread's profile function, kept over a session.

    Torch's Python tracer takes its place and leaves none. What a body sets while it is recorded
    stays.
    """

    taken: ClassVar[Any] = None

    def __init__(self) -> None:
        self._users: Any = None

    def take(self) -> None:
        self._users = _ProfileFunction.taken = sys.getprofile()
        if isinstance(self._users, _C_PROFILER):
            # It counts the calls that are open, and would miss that they return.
            self._users.disable()

    def before_stop(self) -> None:
        now = sys.getprofile()
        if not is_tracer(now):
            self._users = now

    def give_back(self) -> None:
        users, self._users, _ProfileFunction.taken = self._users, None, None
        if isinstance(users, _C_PROFILER):
            users.enable()
        elif users is not None:
            sys.setprofile(users)


def users_function(found: Any) -> Any:
    """Return a profile function, or the one in whose place torch's Python tracer is."""
    return _ProfileFunction.taken if is_tracer(found) else found


def is_tracer(function: object) -> bool:
    """Return whether a profile function is torch's Python tracer. On Python 3.12 none is."""
    return type(function).__name__ == _TRACER


# What torch's Python tracer calls itself where it is a tool of `sys.monitoring`: on Python 3.12.
_TOOL: Final = "PyTorch Profiler"


# Those that Python has named for nobody come first, that of profilers last.
_TOOL_IDS: Final = (3, 4, 5, 0, 1, 2)


@contextmanager
def _beside_other_tools() -> Iterator[None]:
    """Let torch's Python tracer begin or end, and not as the tool that `cProfile` is.

    On Python 3.12 both are tools of `sys.monitoring`, by the one number that it has for profilers.
    The tracer calls its functions by their names.
    """
    if sys.version_info[:2] != (3, 12):
        yield
        return
    monitoring = sys.monitoring
    names = {number: monitoring.get_tool(number) for number in _TOOL_IDS}
    ours = next((n for name in (_TOOL, None) for n in names if names[n] == name), _TOOL_IDS[-1])
    calls = ("get_tool", "use_tool_id", "register_callback", "set_events", "free_tool_id")
    before = [getattr(monitoring, call) for call in calls]
    for call, original in zip(calls, before, strict=True):
        setattr(monitoring, call, _with_number(original, ours))
    try:
        yield
    finally:
        for call, original in zip(calls, before, strict=True):
            setattr(monitoring, call, original)


def _with_number(call: Callable[..., object], number: int) -> Callable[..., object]:
    return lambda _, *rest: call(number, *rest)


def front_end_is_active() -> bool:
    """Return whether one of torch's front ends profiles; a session of ours is made without one."""
    return torch.autograd.profiler._is_profiler_enabled


def others_listen() -> bool:
    """Return whether anybody but torch's Python tracer follows what this thread calls.

    That may be a trace or profile function, or a tool of `sys.monitoring`.
    """
    profile = profile_function()
    if sys.gettrace() is not None or not (profile is None or is_tracer(profile)):
        return True
    if sys.version_info < (3, 12):
        return False
    return any(tool not in (None, _TOOL) for tool in map(sys.monitoring.get_tool, range(6)))


_REPLACED: Final = (
    "another thread of the test body ran a torch profiler of its own, and only one can be active; "
    "what was measured is lost"
)


# Kineto copies events of these kinds for its files, each with its metadata: a quarter of what the
# end of a session takes. We read torch's own tree, so we ask for the kinds of a device that has
# none here.
_NO_COPIES: Final = {torch.profiler.ProfilerActivity.MTIA}


class Profiler:
    """One session of the kineto profiler, without the front end's own bookkeeping.

    The front end builds an event list when it stops, which costs more than the recording.
    ``below_torch`` says that torch called what begins the session: there torch's C++ would hand on
    to Python that it misses the copies, as a warning of the body's.
    """

    #: How often a session has ended, or was replaced by one of the body's.
    over_count: ClassVar[int] = 0

    def __init__(self, *, below_torch: bool = False) -> None:
        #: Whether the session records calls of Python.
        self.has_calls = _paths_are_text()
        front_end: Any = _FRONT_END(
            use_cpu=True,
            use_kineto=True,
            record_shapes=True,
            profile_memory=True,
            with_stack=self.has_calls,
        )
        self._profile_function = _ProfileFunction()
        self._config = front_end.config()
        self._activities = {torch.profiler.ProfilerActivity.CPU}
        self._copied = self._activities if below_torch else _NO_COPIES
        self._tracer: type[object] = type(None)
        self._thread = get_ident()
        #: Whether another thread has begun a session: there is one in a process.
        self.is_replaced = False
        #: Whether calls were followed at first and then no more.
        self.lost_calls = False

    def start(self) -> None:
        """Begin; raises `RuntimeError` when another session is active."""
        if profiler_is_active():
            raise RuntimeError("another profiler session is active")
        with _without_own_log():
            _autograd._prepare_profiler(self._config, self._copied)
            self._profile_function.take()
            try:
                with _beside_other_tools():
                    _enable_profiler(self._config, self._activities, _SCOPES)
            finally:
                self._tracer = type(profile_function())

    def is_undisturbed(self) -> bool:
        """Return whether nobody has ended the session, or begun to profile beside it."""
        return (
            profiler_is_active()
            and not self.is_replaced
            and not front_end_is_active()
            and type(profile_function()) is self._tracer
        )

    def leave_to_parent(self) -> None:
        """Record no calls and operators any more, in a process that was forked from the session's.

        To end the session there would take as long as to read it.
        """
        observe_operators(False)
        self.follow_no_calls()

    def follow_no_calls(self) -> None:
        """Record no calls of the calling thread any more."""
        Profiler.over_count += 1
        if sys.version_info[:2] == (3, 12):
            for number in (n for n in _TOOL_IDS if sys.monitoring.get_tool(n) == _TOOL):
                sys.monitoring.set_events(number, 0)
                self.lost_calls = True
        elif is_tracer(profile_function()):
            sys.setprofile(None)
            self.lost_calls = True
            if get_ident() == self._thread:
                self._profile_function.give_back()

    def stop(self) -> ProfilerResult:
        """End, and return the kineto result with the event tree.

        Raises `RecordingError` where torch cannot make sense of what it recorded, and after another
        thread's session, which takes the place of ours.
        """
        self._profile_function.before_stop()
        Profiler.over_count += 1
        if self._tracer.__name__ == _TRACER and not is_tracer(profile_function()):
            self.lost_calls = True
        try:
            with _without_own_log():
                if self.is_replaced:
                    # Torch crashes at the end of a session where there is none in its place.
                    _autograd._prepare_profiler(self._config, self._copied)
                with _beside_other_tools():
                    result = _autograd._disable_profiler()
        except RuntimeError as error:
            reason = f"torch's profiler failed: {str(error).splitlines()[0]}"
            raise RecordingError(_REPLACED if self.is_replaced else reason) from None
        finally:
            self._profile_function.give_back()
        if self.is_replaced:
            raise RecordingError(_REPLACED)
        return result


# The names of modules whose files have been looked at, and of those whose path is not UTF-8.
_looked_at: Final[set[str]] = set()
_not_text: Final[set[str]] = set()


def _paths_are_text() -> bool:
    """False where the path of a source may not be UTF-8: torch's Python tracer raises there.

    Without it, no event has a source line or a module.
    """
    if _unreadable:
        return False
    if not _looked_at.issuperset(sys.modules):
        fresh = sys.modules.keys() - _looked_at
        _looked_at.update(fresh)
        _not_text.update(name for name in fresh if not _is_text(_file_of(sys.modules.get(name))))
    return not any(map(sys.modules.__contains__, _not_text)) and all(map(_is_text, sys.path))


# What was executed under a name that is not UTF-8, and the functions in it.
_unreadable: Final[WeakSet[CodeType]] = WeakSet()


def raises_for(code: object) -> bool:
    """Return whether torch's Python tracer raises at a call of code that is about to run.

    It follows no calls while any of that code lives.
    """
    if not isinstance(code, CodeType) or _is_text(code.co_filename):
        return False
    _unreadable.add(code)
    for part in code.co_consts:
        raises_for(part)
    return True


def _file_of(module: object) -> str:
    """Return the file that a module comes from; none of a program's own code runs."""
    file = vars(module).get("__file__") if issubclass(type(module), ModuleType) else None
    return file if isinstance(file, str) else ""


def _is_text(path: str) -> bool:
    return path.isascii() or path.encode(errors="replace").decode() == path


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
