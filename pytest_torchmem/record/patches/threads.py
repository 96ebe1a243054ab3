"""Threads beside the recording one: those whose allocations are in no figure, and gloo's.

The profiler records the thread that started it, and on a GPU the engine's own. What a thread that
the body starts allocates on the CPU is counted there, while it runs torch. A pool that was there
before may run torch uncounted: then the result says so instead of being too small in silence.
"""

from __future__ import annotations

import ctypes
import queue
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from functools import wraps
from gc import get_referents
from pathlib import Path
from threading import current_thread, get_ident
from time import monotonic, sleep
from types import FrameType
from typing import Any, ClassVar, Final

import torch

from pytest_torchmem.record.patches import THREAD_STARTERS, Installed
from pytest_torchmem.record.patches.python_tracing import interpreter_call, quiet
from pytest_torchmem.record.patches.thread_memory import ThreadMemory, name_thread, thread_name
from pytest_torchmem.record.torch_api import dispatcher, profiler
from pytest_torchmem.record.torch_api.compiler import untraced
from pytest_torchmem.values.json_values import Json

# After this many calls without one of torch's, a thread is followed no longer.
_PATIENCE: Final = 200_000
_LAYERS: Final = str(Path(torch.__file__).parent / "nn")
_HOLDERS: Final = (torch.Tensor, torch.UntypedStorage, torch.nn.Module)
_CONTAINERS: Final = (list, tuple, dict, set)
# We look at so many of the things in a container.
_MOST_PARTS: Final = 16
# How the Python tracer names a builtin function: of ``torch``, of a tensor, of a layer.
_TRACED: Final = re.compile(r"<built-in (?:method (\w+) of (type|\w+) object at|function (\w+)>)")


# Functions of these modules run the work of a thread.
_RUNNERS: Final = frozenset({__file__}).union(
    str(Path(threading.__file__).parent / file)
    for file in ("threading.py", "concurrent/futures/thread.py", "multiprocessing/pool.py")
)
# In these functions a thread waits for its next work.
_WAITS: Final = frozenset(
    id(function.__code__)
    for function in (queue.Queue.get, queue.Queue.put, threading.Condition.wait)
)


class ThreadWatch:
    """Learns which other threads run torch while a body is recorded, and what they allocate.

    ``seen`` is called before one of them runs torch, ``profiled`` where one begins a profiler of
    its own.
    """

    def __init__(
        self, device: torch.device, seen: Callable[[], None], profiled: Callable[[], None]
    ) -> None:
        self._memory = ThreadMemory(device, seen)
        self._switch = profiler.all_threads_switch() if device.type == "cpu" else None
        self._profiled = profiled
        self._existing: list[threading.Thread] = []
        self._recorded: Collection[int] = ()
        self._calling: set[int] = set()
        self._thread = get_ident()
        self._users: Any = None
        self._unfollowed: set[str] = set()
        self._unknown = UnknownThreads()

    def install(self, patches: Installed) -> None:
        """Begin to watch threads that start from now on."""
        here = current_thread()
        self._existing = [thread for thread in threading.enumerate() if thread is not here]
        self._users = threading.getprofile()
        patches.note("threading.setprofile", self._stop)
        threading.setprofile(self._on_event)
        for name in profiler.GETTERS:
            patches.replace(name, self._hidden)
        patches.replace(profiler.PREPARE, self._noticed)
        patches.replace("_thread.start_new_thread", self._followed)
        self._unknown.install(patches)
        self._memory.install(patches)

    def count_all(self, patches: Installed) -> None:
        """Let torch's total of the CPU's memory count every thread, where that can be."""
        # A switch that is off is false itself.
        if (switch := self._switch) is not None:
            before, switch.value = switch.value, True
            patches.note(profiler.COUNT_ALL_THREADS, lambda: setattr(switch, "value", before))

    def _hidden(self, getter: Callable[[], object]) -> Callable[[], object]:
        @wraps(getter)
        def getprofile() -> object:
            found = getter()
            if isinstance(found, _Watched):
                return found.users
            return self._users if found == self._on_event else profiler.users_function(found)

        return getprofile

    def _followed(self, original: Callable[..., int]) -> Callable[..., int]:
        start = self._unknown.counted(original)

        @wraps(original)
        def start_new_thread(*args: object, **kwargs: object) -> int:
            # Python says what is wrong with other arguments.
            if args and callable(args[0]):
                # No profile function that the program sets in `threading` is called there.
                watched = _Watched(self._memory, self._unfollowed, None)
                args = (_Followed(args[0], watched), *args[1:])
            return start(*args, **kwargs)

        return start_new_thread

    def _noticed(self, prepare: Callable[..., object]) -> Callable[..., object]:
        @wraps(prepare)
        def prepared(*args: object, **kwargs: object) -> object:
            profiler.Profiler.over_count += 1
            if get_ident() != self._thread:
                self._profiled()
                self._memory.close()
            return prepare(*args, **kwargs)

        return prepared

    def _stop(self) -> None:
        if threading.getprofile() == self._on_event:
            threading.setprofile(self._users)

    def look_at(self, result: profiler.ProfilerResult, recorded: Collection[int]) -> None:
        """Look for torch's functions in threads that only the Python tracer saw.

        ``result`` is the kineto result of a finished session, and ``recorded`` are the threads
        whose operators or allocations were seen in that session or before it.
        """
        self._recorded = recorded
        if not (self._existing or self._memory.was_used):
            return
        for root in result.experimental_event_tree():
            thread = root.start_tid
            is_known = thread in recorded or thread in self._calling
            if not is_known and any(map(_is_torch, _events(root))):
                self._calling.add(thread)

    def meta(self) -> dict[str, Json]:
        """Return the names of threads whose memory is not known, and what others held."""
        # A stretch in which the recording thread itself ran no operator says nothing of it.
        unseen = self._calling.difference(self._recorded, self._memory.of_executors)
        names = self._memory.uncounted() | ({"one from before the body"} if unseen else set())
        return {
            "unseen_threads": sorted(names),
            "unfollowed_threads": sorted(self._unfollowed - names),
            "unknown_threads": self._unknown.count(),
            "other_threads": self._memory.held(),
            "totals_of_all_threads": self._switch is not None,
        }

    def _on_event(self, frame: FrameType, event: str, function: object) -> None:
        watched = _Watched(self._memory, self._unfollowed, self._users)
        sys.setprofile(watched)
        watched(frame, event, function)


class _Followed:
    """The function of a thread that ``threading`` does not know; the thread is watched, too."""

    def __init__(self, function: Callable[..., object], watched: _Watched) -> None:
        self._function, self._watched = function, watched

    def __repr__(self) -> str:
        # Python shows it where the function raises.
        return repr(self._function)

    def __call__(self, *args: object, **kwargs: object) -> object:
        name_thread("a thread without a name")
        sys.setprofile(self._watched)
        return self._function(*args, **kwargs)


class _Watched:
    """The profile function of one thread: has its memory counted from when it first runs torch.

    ``users`` is the program's own, which is called as without us, and stays.
    """

    def __init__(self, memory: ThreadMemory, unfollowed: set[str], users: Any) -> None:
        self._memory, self._unfollowed = memory, unfollowed
        self.users = users
        self._left = _PATIENCE
        self._work = 0
        self._has_returned = False

    @untraced
    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if self._work:
            self._go_on(frame, event)
        else:
            self._look(frame, event, argument)
        if self.users is not None:
            self.users(frame, event, argument)

    def _look(self, frame: FrameType, event: str, argument: object) -> None:
        self._left -= 1
        of_torch = (event == "c_call" and _makes_tensors(argument)) or (
            event == "call" and _may_run_torch(frame)
        )
        if of_torch and self._memory.open():
            self._work = id(_work_of(frame))
        elif of_torch or self._left <= 0 or self._memory.is_over:
            if not of_torch and not self._memory.is_over:
                self._unfollowed.add(thread_name())
            sys.setprofile(self.users)

    def _go_on(self, frame: FrameType, event: str) -> None:
        """End the stretch where the thread's work has returned, or waits for more."""
        waits = event == "call" and id(frame.f_code) in _WAITS
        if self._has_returned or waits or self._memory.is_over:
            self._work, self._has_returned = 0, False
            self._memory.close()
        elif event == "return" and id(frame) == self._work:
            # Its variables live until just after this event.
            self._has_returned = True


def _work_of(frame: FrameType) -> FrameType:
    """Return the call of the thread's own work that a call belongs to."""
    while (outer := frame.f_back) is not None and outer.f_code.co_filename not in _RUNNERS:
        frame = outer
    return frame


def _may_run_torch(frame: FrameType) -> bool:
    """Return whether a function that has been called may run operators.

    Operators such as ``x + 1`` are no calls. So a tensor among the arguments or the variables
    around the function tells, or that the function names torch.
    """
    if frame.f_code.co_filename.startswith(_LAYERS):
        return True
    around = map(frame.f_globals.get, frame.f_code.co_names)
    return any(map(_is_of_torch, (*frame.f_locals.values(), *around)))


def _is_of_torch(value: object) -> bool:
    """Return whether a value is torch, or of it, or a container of such; none of its code runs."""
    if type(value) in _CONTAINERS:
        return any(issubclass(type(v), _HOLDERS) for v in get_referents(value)[:_MOST_PARTS])
    return value is torch or issubclass(type(value), _HOLDERS)


def _makes_tensors(function: object) -> bool:
    """Return whether a builtin function is one of torch's that work on tensors."""
    owner = getattr(function, "__self__", None)
    return (
        isinstance(owner, torch.Tensor) or getattr(function, "__module__", "") in dispatcher.MAKERS
    )


def _is_torch(event: profiler.ProfilerEvent) -> bool:
    """Return whether an event of the Python tracer is a call of such a function."""
    if not (match := _TRACED.match(profiler.name_of(event))):
        return False
    method, owner, function = match.groups()
    if function:
        return dispatcher.is_layer_function(function)
    if owner == "type":  # as torch's functions are, and ``__new__`` of each type
        return hasattr(torch, method) and not method.startswith("__")
    return owner in ("Tensor", "Parameter")


def _events(root: profiler.ProfilerEvent) -> Iterator[profiler.ProfilerEvent]:
    waiting = [root]
    while waiting:
        event = waiting.pop()
        yield event
        waiting += reversed(event.children)


_interpreter = interpreter_call("PyInterpreterState_Get", ctypes.c_void_p)
_new_state = interpreter_call("PyThreadState_New", ctypes.c_void_p)
_number_of = interpreter_call("PyThreadState_GetID", ctypes.c_uint64)
_clear = interpreter_call("PyThreadState_Clear", None)
_delete = interpreter_call("PyThreadState_Delete", None)

#: In this folder Linux describes each thread of the process.
TASKS: Final = Path("/proc/self/task")
# Threads of autograd's engine, which a process's first backward pass begins for its GPUs. They are
# recorded.
_ENGINE: Final = b"pt_autograd"
# All of torch's: those of its process groups call Python as often as a hook or an object wants it.
_TORCHS: Final = b"pt_"


class UnknownThreads:
    """Counts the threads that called Python since `install` and that nobody knows.

    Neither `threading` nor `_thread` has begun them: a library in C has. Python numbers the states
    of its threads. A library's thread that calls Python gets a state for that call, so a number
    that no known thread has tells that there was such a thread, also after its end.
    """

    #: How often threads of the recorder's own timers called Python.
    ours: ClassVar[int] = 0

    def __init__(self) -> None:
        self._known: list[str] = []
        self._ours_before = 0
        self._tasks: frozenset[Path] = frozenset()
        self._first = 0

    def install(self, patches: Installed) -> None:
        """Begin to count."""
        patches.replace(THREAD_STARTERS[sys.version_info < (3, 13)], self.counted)
        self._tasks = _tasks()
        self._ours_before = UnknownThreads.ours
        self._first = _next_number()

    def counted(self, start: Callable[..., int]) -> Callable[..., int]:
        """Return a function that starts threads, with what it starts known."""

        @wraps(start)
        def start_thread(*args: object, **kwargs: object) -> int:
            started = start(*args, **kwargs)
            # Other threads start some, too, and only this is done at once.
            self._known.append("")
            return started

        return start_thread

    def count(self) -> int:
        """Return how many there were; a thread that calls Python twice may count twice.

        None are told where torch has threads of its own beside the engine's, as in a job of several
        ranks: these cannot be told apart from others.
        """
        number = _next_number()
        ours = UnknownThreads.ours - self._ours_before
        unknown = number - self._first - len(self._known) - ours - 1
        # This look had a number, too.
        self._known.append("")
        if unknown > 0:
            names = {task: _name_of_task(task) for task in _tasks()}
            if any(n.startswith(_TORCHS) and not n.startswith(_ENGINE) for n in names.values()):
                return 0
            unknown -= sum(names[task].startswith(_ENGINE) for task in names.keys() - self._tasks)
        return max(0, unknown)


def _next_number() -> int:
    """Return the number that a new thread's state has."""
    state = ctypes.c_void_p(_new_state(ctypes.c_void_p(_interpreter())))
    number = int(_number_of(state))
    _clear(state)
    _delete(state)
    return number


def _tasks() -> frozenset[Path]:
    return frozenset(TASKS.iterdir()) if sys.platform == "linux" else frozenset()


def _name_of_task(task: Path) -> bytes:
    """Return the name that a thread has for Linux; nothing once it has ended."""
    return _read_task(task / "comm").strip()


def _read_task(file: Path) -> bytes:
    """Return what a file says of a thread; nothing once that has ended."""
    try:
        return file.read_bytes()
    except OSError:
        return b""


_NAME: Final = b"pt_gloo_runloop"
# A thread may have work of another collective: nobody waits longer than this for it.
_AT_MOST_S: Final = 2.0
_STEP_S: Final = 20e-6


class GlooWatch:
    """Has each wait for a collective wait for gloo's threads, too.

    A thread of the backend holds a collective's tensors until a moment after it has woken who waits
    for the collective. Whichever of the two is last frees what nobody else holds, and the profiler
    sees no free of a thread that it does not know. So whoever waits goes on only when the threads
    are at rest: all frees are then the program's own, and the numbers those of a program in which
    gloo is quick.
    """

    def install(self, patches: Installed) -> None:
        """Begin, until ``patches`` are removed."""
        if torch.distributed.is_available() and TASKS.is_dir():
            patches.replace("torch.distributed.Work.wait", _waiting)


def _waiting(wait: Callable[..., object]) -> Callable[..., object]:
    @wraps(wait)
    def watched(*args: object, **kwargs: object) -> object:
        __tracebackhide__ = True
        try:
            return wait(*args, **kwargs)
        finally:
            await_gloo()

    return watched


@quiet
def await_gloo() -> None:
    """Return when gloo's threads in this process sleep, for want of work or for another rank.

    One that waits for Python's lock seems to sleep, so each of two looks lets it have that first.
    """
    threads = [thread for thread in TASKS.iterdir() if _name_of_task(thread) == _NAME]
    until = monotonic() + _AT_MOST_S
    quiet_count = 0
    while threads and quiet_count < 2 and monotonic() < until:
        sleep(_STEP_S)
        quiet_count = 0 if any(map(_is_running, threads)) else quiet_count + 1


def _is_running(thread: Path) -> bool:
    # The letter after the name, which is in parentheses and may hold any.
    return _read_task(thread / "stat").rpartition(b") ")[2].startswith((b"R", b"D"))
