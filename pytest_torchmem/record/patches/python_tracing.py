"""Suspends the Python tracer in our own calls, in imports and in compilations, and our hooks there.

A profiler session must not be ended and begun again while an operator or an annotation is open:
torch notes the end of these in the session that they began in, which would be gone. CPython itself
can stop calling a tracer for a while instead. Operators and allocations are seen all the time.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from gc import collect, isenabled
from threading import get_ident
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final, ParamSpec, TypeVar

from pytest_torchmem.contexts import Around, gc_paused
from pytest_torchmem.record.deferred_signals import DeferredSignals
from pytest_torchmem.record.patches import Installed, named
from pytest_torchmem.record.torch_api import autograd, compiler, dispatcher, profiler
from pytest_torchmem.record.torch_api.compiler import (
    pauses_halt_dynamo,
    set_frame_callback,
    untraced,
)

_P = ParamSpec("_P")
_R = TypeVar("_R")


def interpreter_call(name: str, result: Any) -> Any:
    """Return a function of the interpreter's.

    It gets values of ctypes': to make them of others is a call, which fails deep in a recursion.
    """
    call = getattr(ctypes.pythonapi, name)
    call.restype = result
    return call


_enter = interpreter_call("PyThreadState_EnterTracing", None)
_leave = interpreter_call("PyThreadState_LeaveTracing", None)
_current = interpreter_call("PyThreadState_Get", ctypes.c_void_p)
_set_profile = interpreter_call("PyEval_SetProfile", None)
# A thread's state is larger in each release of Python; what is looked for is near its beginning.
_STATE_WORDS: Final = 32
_State = ctypes.c_size_t * _STATE_WORDS


class TracingPause:
    """Suspends tracers and profilers that were set in Python, on one thread.

    The tracer sees neither that the functions on the stack at `suspend` return nor that those on
    the stack at `resume` were called. So both have to be called at the same depth below a function
    that is there all the time.
    """

    def __init__(self) -> None:
        self._thread_state: ctypes.c_void_p | None = None

    @property
    def is_suspended(self) -> bool:
        """True from `suspend` to `resume`."""
        return self._thread_state is not None

    def suspend(self) -> None:
        """Suspend on the calling thread; does nothing while suspended.

        Nor does it where dynamo looks at frames that begin: it would look at none meanwhile, and
        compiled code would run as written.
        """
        if self._thread_state is None and not pauses_halt_dynamo():
            # Called here so that it is not first called while suspended.
            self.resume()
            thread_state = ctypes.c_void_p(_current())
            try:
                _enter(thread_state)
            except BaseException as error:
                _leave_after(error, thread_state)
                raise
            self._thread_state = thread_state

    def resume(self) -> None:
        """Undo `suspend`; does nothing where nothing is suspended."""
        if self._thread_state is not None:
            thread_state, self._thread_state = self._thread_state, None
            _leave(thread_state)


class TracerPause(TracingPause):
    """Suspends torch's Python tracer alone: whoever else listens goes on.

    It takes the tracer's place as the thread's profile function away, which nobody else has then.
    """

    def __init__(self) -> None:
        super().__init__()
        self._away: tuple[int, object, tuple[int, int]] | None = None

    @property
    def is_suspended(self) -> bool:
        return self._away is not None

    def suspend(self) -> None:
        tracer = profiler.profile_function()
        if self._away is None and (function := _function_of_c(tracer)):
            self.resume()
            self._away = function, tracer, (_current(), profiler.Profiler.over_count)
            _set_profile(None, None)

    def resume(self) -> None:
        """Undo `suspend` on its thread, unless that session is over or another function is set."""
        if self._away is not None:
            (function, tracer, place), self._away = self._away, None
            is_here = place == (_current(), profiler.Profiler.over_count)
            if is_here and profiler.profile_function() is None:
                _set_profile(ctypes.c_void_p(function), ctypes.py_object(tracer))


def _function_of_c(tracer: object) -> int:
    """Return the address of the function by which Python calls torch's tracer; 0 if not found.

    The state of a thread has, one after the other, the profile function's, the trace function's,
    and the objects that these two are called with.
    """
    if not profiler.is_tracer(tracer):
        return 0
    trace = sys.gettrace()
    objects = [id(tracer), 0 if trace is None else id(trace)]
    words = list(_State.from_address(_current()))
    places = (place for place in range(2, _STATE_WORDS) if words[place : place + 2] == objects)
    return next((words[place - 2] for place in places), 0)


def pause_beside_others() -> TracingPause:
    """Return a pause of torch's Python tracer that nobody notices who listens as well.

    Who measures coverage, or profiles, must see the calls.
    """
    return TracerPause() if profiler.others_listen() else TracingPause()


def see_returns() -> None:
    """Have tracers see that the functions on the stack return.

    A function learns that it is traced when somebody calls it. If its first call came while tracers
    were suspended, it has not learned it, and from Python 3.13 on no tracer sees it return.
    """
    if sys.version_info >= (3, 13):
        sys.monitoring.restart_events()


def quiet(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Hide what a method does from the body's function modes, from the collector and the recording.

    The collector runs after a number of new objects: if it counted the method's, it would run
    earlier than without us. The recording of the method's calls would take longer than the calls.
    Dynamo traces none of them, and handlers of signals run after it.
    """

    @wraps(method)
    def quietly(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        # What `unheard` does, before anything else: all calls from here on would be recorded.
        thread_state = signals = None
        try:
            thread_state = ctypes.c_void_p(_current())
            _enter(thread_state)
        except BaseException as error:
            _leave_after(error, thread_state)
            raise
        try:
            traced_by, signals = set_frame_callback(None), DeferredSignals()
            try:
                signals.begin()
                with gc_paused(), dispatcher.unseen_by_modes():
                    return method(*args, **kwargs)
            finally:
                try:
                    signals.end()
                finally:
                    set_frame_callback(traced_by)
        finally:
            try:
                _leave(thread_state)
            finally:
                if signals is not None and signals.came:
                    signals.handle()

    return quietly


def unheard(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Suspend tracers and profilers that were set in Python while a function runs.

    A signal's handler may raise after any call; the suspension ends all the same.
    """

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        thread_state = None
        try:
            thread_state = ctypes.c_void_p(_current())
            _enter(thread_state)
        except BaseException as error:
            _leave_after(error, thread_state)
            raise
        try:
            return function(*args, **kwargs)
        finally:
            _leave(thread_state)

    return call


def _leave_after(error: BaseException, thread_state: ctypes.c_void_p | None) -> None:
    """Undo a call of ``_enter`` that a signal's handler has raised after."""
    # Deep in a recursion the call itself fails, and there is nothing to undo.
    if thread_state is not None and not isinstance(error, RecursionError):
        _leave(thread_state)


def handlers_wait() -> Around[DeferredSignals]:
    """Have the handlers of signals wait for the end of the block."""
    return Around(_defer, _handle)


@unheard
def _defer() -> DeferredSignals:
    signals = DeferredSignals()
    signals.begin()
    return signals


def _handle(signals: DeferredSignals) -> None:
    try:
        _end(signals)
    finally:
        signals.handle()


_end: Final = unheard(DeferredSignals.end)


class ImportWatch:
    """Suspends the Python tracer while the calling thread imports, and calls ``done`` after it.

    An import is millions of calls: what takes two seconds would take half a minute, and gigabytes.
    What is allocated meanwhile is recorded as ever.

    The import of torch's compiler leaves cycles behind: `torch.fx.wrap` refers to its own frame,
    and so to the frames of all its callers, down to the body's with its model and its optimizer.
    The collector would free them later, mostly before the body is over. It runs here, so that luck
    does not decide what the body retains. For that it rests while the compiler is imported: else
    it would look at everything three times in that second, and then once more.
    """

    def __init__(self, done: Callable[[], None]) -> None:
        self._done = untraced(done)
        self._tracing = self._resting = TracingPause()
        self.importing = False

    def install(self, patches: Installed) -> None:
        """Begin, until ``patches`` are removed."""
        patches.finally_do(self._resume)
        # An import statement calls it only for a module that is not there yet, others for any.
        patches.replace("importlib._bootstrap._find_and_load", self._rested)

    def _resume(self) -> None:
        self._tracing.resume()
        self._resting.resume()

    def _rested(self, original: Any) -> Any:
        here, tracing, done = get_ident(), self._tracing, self._done

        def load(name: str, import_: Any) -> Any:
            if name in compiler.PACKAGES and not compiler.has_begun():
                with gc_paused():
                    return original(name, import_)
            return original(name, import_)

        def _find_and_load(name: str, import_: Any) -> Any:
            if name in sys.modules or get_ident() != here:
                return original(name, import_)
            if self.importing:
                return load(name, import_)
            compiler_is_new = not compiler.has_begun()
            # One that a signal's handler has kept from its end.
            self._resume()
            resting = self._resting = pause_beside_others()
            self.importing = True
            try:
                resting.suspend()
                return load(name, import_)
            finally:
                try:
                    if compiler_is_new and compiler.has_begun() and isenabled():
                        collect()
                    # It takes a hundred thousand calls to find out which functions are ours.
                    tracing.suspend()
                    done()
                finally:
                    tracing.resume()
                    resting.resume()
                    self.importing = False

        # Python leaves the frames of importing out of tracebacks, by the name of their file.
        for function in (load, _find_and_load):
            code = function.__code__.replace(co_filename=original.__code__.co_filename)
            function.__code__ = code
        return _find_and_load


def _resting_on(thread: int) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Return a decorator: a call on ``thread`` suspends the Python tracer until it returns."""

    def resting(original: Callable[..., object]) -> Callable[..., object]:
        def rest(*args: object, **kwargs: object) -> object:
            if get_ident() != thread:
                return original(*args, **kwargs)
            # Such a function calls another: each has a pause of its own.
            tracing = pause_beside_others()
            try:
                tracing.suspend()
                return original(*args, **kwargs)
            finally:
                try:
                    tracing.resume()
                finally:
                    # The handler of a signal may have raised when the call began.
                    tracing.resume()

        if isinstance(original, FunctionType):
            # Dynamo looks for the first frame that is not its own: it may be a disabled function's.
            rest.__code__ = named(rest.__code__, original.__code__.co_filename)
        return wraps(original)(rest)

    return resting


class CompilationWatch:
    """Suspends the Python tracer while torch.compile looks at functions, and compiles them.

    It would see every call of the compiler: millions of them for a small model, which makes its
    compilation thirty times slower.
    ``done`` is called after each compilation, on whatever thread, while its graphs are alive.
    """

    def __init__(self, done: Callable[[], None]) -> None:
        self._done = done
        self._tracing = TracingPause()
        self._thread = get_ident()

    def install(self, patches: Installed) -> None:
        """Begin to listen, unless the compiler is not even imported."""
        callbacks = compiler.callbacks()
        if callbacks is None:
            return
        patches.finally_do(self._resume)

        def clearing(clear: Callable[[], None]) -> Callable[[], None]:
            def clear_others() -> None:
                try:
                    clear()
                finally:
                    callbacks.register_start_callback(self._begin)
                    callbacks.register_end_callback(self._end)

            return clear_others

        callbacks.register_start_callback(self._begin)
        patches.note(compiler.START_CALLBACK, lambda: callbacks.remove_start_callback(self._begin))
        callbacks.register_end_callback(self._end)
        patches.note(compiler.END_CALLBACK, lambda: callbacks.remove_end_callback(self._end))
        patches.replace(compiler.CLEAR_CALLBACKS, clearing)
        # A backward graph is compiled outside of these: the callbacks alone are told of it.
        for name in compiler.PREPARING:
            patches.replace(name, _resting_on(self._thread))

    def _resume(self) -> None:
        self._tracing.resume()

    def _begin(self, *args: object) -> None:
        # A backward graph that is compiled within compiled code.
        if not pauses_halt_dynamo():
            self._suspend()

    @untraced
    def _suspend(self) -> None:
        # The threads of the autograd engine, where backward graphs may be compiled, never end.
        is_known = get_ident() == self._thread or autograd.in_backward()
        if is_known and not self._tracing.is_suspended:
            self._tracing = pause_beside_others()
            self._tracing.suspend()

    def _end(self, *args: object) -> None:
        # As deep as `_begin` suspends.
        self._go_on()

    @untraced
    def _go_on(self) -> None:
        try:
            self._done()
        finally:
            self._tracing.resume()
            see_returns()


class ParsingWatch:
    """Suspends the Python tracer while the calling thread parses for TorchScript, or a template.

    Both call a function or more for each token of a source: a tenth of a second would take two, and
    hundreds of megabytes.
    """

    def install(self, patches: Installed) -> None:
        """Begin, until ``patches`` are removed."""
        resting = _resting_on(get_ident())
        for name in compiler.SCRIPTING:
            patches.replace(name, resting)
        # Makes Python of a template; torch brings the package along.
        if "jinja2.environment" in sys.modules:
            patches.replace("jinja2.environment.Environment.compile", resting)


_PACKAGE: Final = f"{__name__.partition('.')[0]}."
_looked_at: Final[set[str]] = set()


class CompiledRegions:
    """Takes our hooks out of torch while compiled code runs.

    Dynamo guards on what it has traced: on the lengths of the tables of global hooks, and on
    functions that stand where torch's stood. A hook of ours would fail the guards of code that was
    compiled before, and be traced with what is compiled now. So ``enter`` is called before dynamo
    begins to look at frames, and ``leave`` after it has ended. What happens meanwhile is found by a
    look at what is alive, later::

        g = torch.compile(model)    the thread's callback
        g(x)                        None -> dynamo's: hooks out ... -> None: hooks in
    """

    def __init__(self, enter: Callable[[], None], leave: Callable[[], None]) -> None:
        self._enter, self._leave = enter, leave
        self._inside: set[int] = set()

    def install(self, patches: Installed) -> None:
        """Begin to listen, unless the compiler is not even imported."""
        if compiler.is_imported():
            hide_from_dynamo()
            patches.finally_do(self._inside.clear)
            for name in compiler.setters():
                patches.replace(name, self._listening)

    def _listening(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def set_eval_frame(callback: Any) -> Any:
            if callback is not None:
                self._note(True)
            try:
                return original(callback)
            finally:
                if callback is None and not compiler.is_compiling():
                    self._note(False)

        return set_eval_frame

    def _note(self, inside: bool) -> None:
        thread = get_ident()
        if inside == (thread in self._inside):
            return
        self._inside ^= {thread}
        # Tables and functions are those of all threads.
        if len(self._inside) == inside:
            (self._enter if inside else self._leave)()


def note_graphs(patches: Installed, note: Callable[[Sequence[object]], object]) -> None:
    """Have ``note`` told what inductor's graphs are called with, on the calling thread.

    A fused kernel is no operator, so nobody else says what it reads. The first compilation imports
    inductor: before that there is nothing to replace, and afterwards it is replaced once.
    """
    if compiler.RUN_GRAPH in patches.names or not compiler.has_graphs():
        return
    thread = get_ident()

    def noting(run: Callable[[object, Sequence[object]], object]) -> Callable[..., object]:
        def run_graph(graph: object, inputs: Sequence[object]) -> object:
            __tracebackhide__ = True
            # On a GPU backward graphs are run by a thread of autograd's.
            if get_ident() == thread or autograd.in_backward():
                note(inputs)
            return run(graph, inputs)

        return run_graph

    patches.replace(compiler.RUN_GRAPH, noting)


def hide_from_dynamo() -> None:
    """Keep dynamo from tracing any function of this package.

    A hook or a patch may be called where the callback is set: in a backward pass in the middle of a
    compiled function, or when a storage dies.
    """
    if _looked_at.issuperset(sys.modules):
        return
    fresh = sys.modules.keys() - _looked_at
    _looked_at.update(fresh)
    for name in [name for name in fresh if name.startswith(_PACKAGE)]:
        for code in _codes(sys.modules[name]):
            compiler.never_trace(code)


def _codes(module: ModuleType) -> Iterator[CodeType]:
    """The code of every function that a module defines, nested ones included."""
    waiting: list[Any] = [*vars(module).values()]
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, CodeType):
            yield thing
            waiting += thing.co_consts
        elif isinstance(thing, type) and thing.__module__ == module.__name__:
            waiting += vars(thing).values()
        elif isinstance(thing, property):
            waiting += [thing.fget, thing.fset]
        elif isinstance(thing, (staticmethod, classmethod)):
            waiting.append(thing.__func__)
        elif isinstance(thing, FunctionType) and thing.__module__ == module.__name__:
            waiting += [thing.__code__, getattr(thing, "__wrapped__", None)]
