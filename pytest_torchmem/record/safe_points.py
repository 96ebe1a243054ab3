"""Interrupts a body that has run for a while, at a moment when no operator of torch's is open.

A timer of the operating system counts the processor time of the thread. When it runs out, Python is
asked for a pending call, which the main thread makes between two bytecodes, as it does for a
signal. The body's own calls may still be called by torch: by autograd, by an operator that is
written in Python, in the middle of a compilation. The stack of the process says so, and then the
moment is not safe: what is neither Python's nor the operating system's may be in an operator.

The moment is not safe either where torch's tracer of Python would count the open calls wrongly.
When a session begins, the tracer learns of the Python functions on the stack, and of no function of
C. It would count a function twice that has just been called: the function is on the stack already,
and Python reports its call a moment later.

    body's bytecodes    x + 1 | x + 1 | x + 1 | ...
    timer                         runs out
    main thread                          `_PendingCall.__bool__` -> `reached`

To ask, the timer's thread becomes one of Python's threads. When a session begins or ends, torch's
tracer goes through the list of Python's threads without its lock, and a thread that is half made
ends the process. So no session begins or ends while a timer runs or a call is on its way: `hold`.
"""

from __future__ import annotations

import builtins
import ctypes
import functools
import gc
import opcode
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from ctypes import byref
from functools import cache
from itertools import takewhile
from os import getpid
from pathlib import Path
from threading import get_ident
from time import sleep
from types import BuiltinFunctionType, FrameType, GeneratorType, MethodDescriptorType
from typing import TYPE_CHECKING, Any, Final

from pytest_torchmem.record.patches import Installed
from pytest_torchmem.record.patches.python_tracing import unheard
from pytest_torchmem.record.patches.threads import UnknownThreads
from pytest_torchmem.record.recursion_room import RecursionRoom
from pytest_torchmem.record.torch_api.compiler import untraced

if TYPE_CHECKING:
    _Hook = Callable[[sys.UnraisableHookArgs], object]

_RECORDERS: Final = f"{Path(__file__).parent}/"
# What may be called between an operator and the next one: Python, its own modules, and what these
# are linked with.
_PYTHONS: Final = re.compile(
    r"(.*/)?((python|libpython)[\d.]+\w*(\.so[\d.]*)?|(libc|libm|libpthread|libffi|ld)[-.][^/]*"
    r"|lib-dynload/[^/]+|\[vdso\])"
)
# Python's tracer notes at most so many of the functions that are open when it begins.
_MOST_FRAMES: Final = 120
_MOST_ADDRESSES: Final = 4096
# A type that is made in a body would be garbage there, for the collector to find.
_Addresses = ctypes.c_void_p * _MOST_ADDRESSES
#: What is in the way of a cut for a moment.
PASSING: Final = "a call begins there"
_RESUME: Final = opcode.opmap["RESUME"]
_TP_CALL: Final = 50
_THREAD_TIME: Final = 3
_CALL_IN_THREAD: Final = 2
# So often we look whether the thread of a timer that has run out has asked.
_MOST_LOOKS: Final = 10_000
_SOON_S: Final = 0.0001


class SafePoints:
    """Calls ``reached`` on the main thread when the time given to `after` is over.

    Only Linux has such a timer. It does nothing elsewhere and on other threads than the main one.
    """

    def __init__(self, reached: Callable[[], None]) -> None:
        self._reached = reached
        self._timer = ctypes.c_void_p()
        self._is_reached = False
        self._next_s: float | None = None
        #: The process that the timer is in.
        self.process = getpid()
        self._began: list[int] = []
        self._dropped: list[BaseException] = []

    def install(self, patches: Installed) -> None:
        """Raise in the body what a signal's handler raises where Python would drop it.

        Python drops what is raised while it calls a weak reference's callback, or the collector's.
        Without us the body's own code would have run then.
        """

        def handing_on(hook: _Hook) -> _Hook:
            def dropped(what: sys.UnraisableHookArgs) -> None:
                raised = what.exc_value
                if raised is not None and self in _LISTENING and _is_a_signals(what):
                    self._dropped.append(raised)
                    self.after(_SOON_S)
                else:
                    hook(what)

            return dropped

        patches.replace("sys.unraisablehook", handing_on)

    def begin(self) -> None:
        """Get ready, on the thread that is to run the body."""
        if (
            _timers() is None
            or threading.current_thread() is not threading.main_thread()
            or not _knows_functions_of_c()
        ):
            return
        self._began = _addresses()
        # What is asked for once is asked for before a body may replace what it takes.
        _code_of_python(), _request()
        ask = ctypes.cast(_on_timer(), ctypes.c_void_p)
        event = byref(_Notification(0, 0, _CALL_IN_THREAD, ask))
        if _timers().timer_create(_THREAD_TIME, event, byref(self._timer)) == 0:
            _LISTENING.append(self)

    def after(self, seconds: float) -> None:
        """Call ``reached`` once, after so much processor time of the thread from now on.

        Within ``reached`` the time begins when that is over. A call that is on its way already
        comes instead, and too early.
        """
        if self._is_reached:
            self._next_s = seconds
        elif self in _LISTENING and not _is_coming():
            self._set(max(seconds, 1e-9))
            _ASKED.append(self)

    def hold(self) -> None:
        """Stop the time, and wait for a call that is on its way; it is made meanwhile.

        We count how often we look: a clock goes on while a busy machine runs no thread of ours.
        """
        for _ in range(_MOST_LOOKS):
            if not _is_coming():
                break
            sleep(_SOON_S)
        _ASKED.clear()

    def end(self) -> None:
        """Call nothing any more."""
        if self in _LISTENING:
            self.hold()
            _timers().timer_delete(self._timer)
            _LISTENING.remove(self)

    def _set(self, seconds: float) -> bool:
        """Set the timer, to nothing for 0; return whether it had run out."""
        whole, before = int(seconds), _TimerSetting()
        times = _TimerSetting(0, 0, whole, round((seconds - whole) * 1e9))
        exists = not _timers().timer_settime(self._timer, 0, byref(times), byref(before))
        return exists and not before.is_running()

    def has_run_out(self) -> bool:
        """Return whether the time is over; if not, stop it. A forked process has no timers."""
        now = _TimerSetting()
        exists = not _timers().timer_gettime(self._timer, byref(now))
        # A timer that has run out and is set again might not make its call any more.
        return exists and (not now.is_running() or self._set(0))

    # To record these calls would take longer than the calls.
    @unheard
    def in_the_way(self) -> str:
        """Return what is open: an operator, a function of ours, a new function of C; "" for none.

        A function of C is new where it was called after `begin`. Only ``reached`` may ask.
        """
        return self._stack_in_the_way() or _frames_in_the_way()

    def _stack_in_the_way(self) -> str:
        addresses, began = _addresses(), self._began
        # A stack that could not be followed to its end may hide anything.
        if addresses[-2:] != began[-2:] or len(addresses) == _MOST_ADDRESSES:
            return "calls are open that cannot be followed"
        pythons = _code_of_python()
        if not all(any(low <= a < high for low, high in pythons) for a in addresses if a):
            return "torch or an extension called that, as it does a backward written in Python"
        called = _calls_function_of_c(addresses, began)
        return "a function of C called that, as sum calls a generator" if called else ""

    @untraced
    def reach(self) -> None:
        """Call ``reached``, and let the time begin that it asked for meanwhile."""
        self._is_reached, self._next_s = True, None
        try:
            self._reached()
        finally:
            self._is_reached = False
            if self._next_s is not None:
                self.after(self._next_s)
        if self._dropped:
            raise self._dropped.pop(0)


#: Those that have begun and not ended. The last one is called; the others are paused below it.
_LISTENING: Final[list[SafePoints]] = []
#: The one whose timer was set, until the timer has led to a call: one at most.
_ASKED: Final[list[SafePoints]] = []


class _PendingCall:
    """Runs our code as a pending call, which asks it whether it is true.

    The function of C that asks hands on what our code raises, such as the exception of a signal
    that arrived meanwhile.
    """

    def __bool__(self) -> bool:
        # No call: the body's recursion may have left none.
        del _ASKED[:]
        room = None
        try:
            try:
                room = RecursionRoom()
                room.begin()
            except RecursionError:
                return False
            # A forked process may have a call that its parent has asked for.
            if _LISTENING and _LISTENING[-1].process == getpid():
                _LISTENING[-1].reach()
        finally:
            if room is not None:
                try:
                    room.end()
                finally:
                    # The handler of a signal may have raised when that began.
                    room.end()
        return False


def _is_coming() -> bool:
    """Stop the time that is running; return whether none is, and a call is on its way."""
    if _ASKED and not _ASKED[0].has_run_out():
        _ASKED.clear()
    return bool(_ASKED)


def _is_a_signals(dropped: sys.UnraisableHookArgs) -> bool:
    """Return whether it was raised while Python called the recorder, and not by the recorder.

    Only the main thread calls handlers. Functions of other threads may run below one of ours.
    """
    if get_ident() != threading.main_thread().ident:
        return False
    called = [frame.f_code for frame, _ in traceback.walk_tb(dropped.exc_traceback)]
    if _PendingCall.__bool__.__code__ in called:
        return True  # it was handed on where somebody's callback ran
    ours = [code.co_filename.startswith(_RECORDERS) for code in called]
    # Python's own handler of SIGINT has no frame.
    return bool(ours) and ours[0] and not (ours[-1] and isinstance(dropped.exc_value, Exception))


@cache
def _request() -> Callable[[], int]:
    """Return the call that asks Python for a `_PendingCall`, all of it functions of C.

    No more than one may be waiting: Python 3.11 would go round in circles at another one in the
    middle of ours. The call is kept for good: Python may make it when nobody listens any more.
    """
    is_true = ctypes.cast(ctypes.pythonapi.PyObject_IsTrue, ctypes.c_void_p)
    add = ctypes.pythonapi.Py_AddPendingCall
    return functools.partial(add, is_true, ctypes.py_object(_PendingCall()))


@cache
def _on_timer() -> Any:
    """Return the function that the timer's thread calls; that thread exists for this call alone."""
    return ctypes.CFUNCTYPE(None, ctypes.c_size_t)(_ask)


def _ask(_: int) -> None:
    UnknownThreads.ours += 1
    if _request()():
        # Too many wait already.
        _ASKED.clear()


class _Notification(ctypes.Structure):
    """The action of a timer: ``struct sigevent``."""

    _fields_ = (
        ("value", ctypes.c_size_t),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("rest", ctypes.c_char * 32),
    )


class _TimerSetting(ctypes.Structure):
    """When a timer runs out: ``struct itimerspec``."""

    _fields_ = tuple(
        (name, ctypes.c_long) for name in ("every_s", "every_ns", "first_s", "first_ns")
    )

    def is_running(self) -> bool:
        return bool(self.first_s or self.first_ns)


@cache
def _timers() -> Any:
    library = ctypes.PyDLL(None) if sys.platform == "linux" else None
    return library if hasattr(library, "timer_create") and hasattr(library, "backtrace") else None


def _addresses() -> list[int]:
    """The addresses to which the functions on the stack of the process return, innermost first."""
    buffer = _Addresses()
    count = _timers().backtrace(buffer, _MOST_ADDRESSES)
    return [address or 0 for address in buffer[:count]]


@cache
def _code_of_python() -> list[tuple[int, int]]:
    """Return the addresses of the code of Python, and of the libraries that it calls by itself."""
    found = []
    program = str(Path(sys.executable).resolve())
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        place, access, *_, path = line.split(maxsplit=5)
        if "x" in access and (path == program or _PYTHONS.fullmatch(path)):
            low, _, high = place.partition("-")
            found.append((int(low, 16), int(high, 16)))
    return found


@cache
def _functions_of_c() -> frozenset[int]:
    """Return the addresses of the functions by which Python calls those of C, one for each kind."""
    of_object, of_type = ctypes.pythonapi.PyVectorcall_Function, ctypes.pythonapi.PyType_GetSlot
    of_object.restype, of_object.argtypes = ctypes.c_void_p, [ctypes.py_object]
    of_type.restype, of_type.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_int]
    kinds = (BuiltinFunctionType, MethodDescriptorType)
    owners = (builtins, functools, gc, list, dict, str, bytes, GeneratorType)
    functions = (f for owner in owners for f in vars(owner).values() if isinstance(f, kinds))
    return frozenset(
        address
        for address in (*map(of_object, functions), *(of_type(kind, _TP_CALL) for kind in kinds))
        if address
    )


@cache
def _function_at(address: int) -> int:
    """Return where the function begins that an address on the stack belongs to."""
    found = _unwinder()._Unwind_FindEnclosingFunction(ctypes.c_void_p(address - 1))
    return int(found or 0)


@cache
def _unwinder() -> Any:
    """Return the library that follows the stack of the process, also for ``backtrace``."""
    library = ctypes.PyDLL("libgcc_s.so.1")
    library._Unwind_FindEnclosingFunction.restype = ctypes.c_void_p
    return library


def _calls_function_of_c(addresses: Sequence[int], began: Sequence[int]) -> bool:
    """Return whether Python has called a function of C that has not returned.

    Those count that were called since the stack had the addresses ``began``.
    """
    pairs = zip(reversed(addresses), reversed(began), strict=False)
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    functions, since = _functions_of_c(), addresses[: len(addresses) - common]
    return any(_function_at(address) in functions for address in since if address)


@cache
def _knows_functions_of_c() -> bool:
    """Return whether such calls are found: a compiler may have put them into other functions."""
    began = _addresses()

    def found() -> Iterator[bool]:
        yield _calls_function_of_c(_addresses(), began)

    # Python calls a function that it has called here before in a shorter way, unless it is traced.
    calls = [functools.partial(function, found()) for function in (sum, max, next, any)]
    try:
        return all(call() for call in calls)
    except (OSError, AttributeError):
        return False


def _frames_in_the_way() -> str:
    """Return what calls the body's code beside Python: the recorder or a trace function."""
    stack: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _PendingCall.__bool__.__code__:
        frame = frame.f_back
    while frame is not None and (frame := frame.f_back) is not None:
        stack.append(frame)
    tracing = {getattr(function, "__code__", None) for function in _trace_functions(stack)}
    if len(stack) > _MOST_FRAMES:
        return f"more than {_MOST_FRAMES} functions are open there"
    codes = (frame.f_code for frame in stack)
    own = any(code in tracing or code.co_filename.startswith(_RECORDERS) for code in codes)
    return PASSING if not stack or own or _begins(stack[0]) else ""


def _begins(frame: FrameType) -> bool:
    """Return whether a function has just been called, or a generator goes on."""
    return frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] == _RESUME


def _trace_functions(stack: Iterable[FrameType]) -> Iterator[object]:
    yield sys.gettrace()
    yield from (frame.f_trace for frame in stack)
