"""Takes our hooks out of torch while compiled code runs.

Dynamo guards on what it has traced: on the lengths of the tables of global hooks, and on functions
that stand where torch's stood. A hook of ours would fail the guards of code that was compiled
before, and be traced with what is compiled now. So there is none while dynamo looks at frames. What
happens meanwhile is found by a look at what is alive, later.

    g = torch.compile(model)    the thread's callback
    g(x)                        None -> dynamo's: hooks out ... -> None: hooks in
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

from pytest_torchmem.record.patches import Installed
from pytest_torchmem.record.torch_api import compiler

_PACKAGE: Final = f"{__name__.partition('.')[0]}."
_looked_at: Final[set[str]] = set()


class CompiledRegions:
    """Calls ``enter`` before dynamo begins to look at frames, and ``leave`` after it has ended."""

    def __init__(self, enter: Callable[[], None], leave: Callable[[], None]) -> None:
        self._enter, self._leave = enter, leave
        self._inside: set[int] = set()

    def install(self, patches: Installed) -> None:
        """Begin to listen, unless the compiler is not even imported."""
        hide_from_dynamo()
        if compiler.is_imported():
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
        thread = threading.get_ident()
        if inside == (thread in self._inside):
            return
        if inside:
            self._inside.add(thread)
        else:
            self._inside.remove(thread)
        # Tables and functions are those of all threads.
        if len(self._inside) == inside:
            (self._enter if inside else self._leave)()


def hide_from_dynamo() -> None:
    """Keep dynamo from tracing any function of this package.

    A hook or a patch may be called where the callback is set: in a backward pass in the middle of a
    compiled function, or when a storage dies.
    """
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
