"""torch.compile while a body runs: what it made is learnt, and our hooks are out of its way."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from gc import collect, isenabled
from threading import get_ident
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

from pytest_torchmem.contexts import gc_paused
from pytest_torchmem.record.patches import Installed
from pytest_torchmem.record.torch_api import autograd, compiler
from pytest_torchmem.record.torch_api.compiler import untraced


class CompilerImport:
    """Calls ``done`` once the body has imported torch's compiler.

    The import leaves cycles behind: `torch.fx.wrap` refers to its own frame, and so to the frames
    of all its callers, down to the body's with its model and its optimizer. The collector would
    free them later, mostly before the body is over. It runs here, so that luck does not decide what
    the body retains. For that it rests while the compiler is imported.
    """

    def __init__(self, done: Callable[[], None]) -> None:
        self._when_done = untraced(done)

    def install(self, patches: Installed) -> None:
        """Begin, until ``patches`` are removed; needless where the compiler is there."""
        if not compiler.is_imported():
            patches.replace("importlib._bootstrap._find_and_load", self._noticing)

    def _noticing(self, original: Any) -> Any:
        done = self._when_done

        def _find_and_load(name: str, import_: Any) -> Any:
            if name not in compiler.PACKAGES or compiler.has_begun():
                return original(name, import_)
            try:
                with gc_paused():
                    return original(name, import_)
            finally:
                if compiler.has_begun() and isenabled():
                    collect()
                done()

        # Python leaves the frames of importing out of tracebacks, by the name of their file.
        code = _find_and_load.__code__.replace(co_filename=original.__code__.co_filename)
        _find_and_load.__code__ = code
        return _find_and_load


class CompilationWatch:
    """Calls ``done`` after each compilation, on whatever thread, while its graphs are alive."""

    def __init__(self, done: Callable[[], None]) -> None:
        self._when_done = untraced(done)

    def install(self, patches: Installed) -> None:
        """Begin to listen, unless the compiler is not even imported."""
        callbacks = compiler.callbacks()
        if callbacks is None:
            return

        def clearing(clear: Callable[[], None]) -> Callable[[], None]:
            def clear_others() -> None:
                try:
                    clear()
                finally:
                    callbacks.register_end_callback(self._end)

            return clear_others

        callbacks.register_end_callback(self._end)
        patches.note(compiler.END_CALLBACK, lambda: callbacks.remove_end_callback(self._end))
        patches.replace(compiler.CLEAR_CALLBACKS, clearing)

    def _end(self, *args: object) -> None:
        self._when_done()


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
        self._threads_inside: set[int] = set()

    def install(self, patches: Installed) -> None:
        """Begin to listen, unless the compiler is not even imported."""
        if compiler.is_imported():
            hide_from_dynamo()
            patches.finally_do(self._threads_inside.clear)
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
        if inside == (thread in self._threads_inside):
            return
        self._threads_inside ^= {thread}
        # Tables and functions are those of all threads.
        if len(self._threads_inside) == inside:
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
