"""The compiler: its modules, its callbacks, and the code that it generates; and dynamo.

Dynamo traces the frames of compiled code. It looks at frames through a callback of the thread.
None: everything runs as written. Anything else: each frame that begins is traced, or run from what
was compiled before if its guards hold. Nothing here imports dynamo.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from types import CodeType
from typing import Any, Final, ParamSpec, TypeVar

import torch

from pytest_torchmem.record.torch_api import ALL_RELEASES, Checked

CHECKED: Final[Checked] = {
    "torch._C._dynamo.eval_frame._FrameAction": ("2.13.0", "2.13.0"),
    "torch._C._dynamo.eval_frame._FrameExecStrategy": ("2.13.0", "2.13.0"),
    "torch._C._dynamo.eval_frame.set_code_exec_strategy": ("2.13.0", "2.13.0"),
    "torch._C._dynamo.eval_frame.set_eval_frame": ("2.13.0", "2.13.0"),
    "torch._dynamo": ALL_RELEASES,
    "torch._dynamo.callback": ALL_RELEASES,
    "torch._dynamo.eval_frame._maybe_set_eval_frame": ("2.13.0", "2.13.0"),
    "torch._dynamo.eval_frame.set_eval_frame": ("2.13.0", "2.13.0"),
    "torch._guards.CompileContext.try_get": ("2.13.0", "2.13.0"),
    "torch._inductor": ALL_RELEASES,
    "torch._inductor.codecache": ALL_RELEASES,
    "torch._inductor.output_code.CompiledFxGraph.__call__": ("2.13.0", "2.13.0"),
}

#: Runs a graph that inductor compiled.
RUN_GRAPH: Final = "torch._inductor.output_code.CompiledFxGraph.__call__"


def generated_file(graph_module: object) -> str:
    """The name under which the profiler shows the code generated for a graph module."""
    kind: Any = type(graph_module)
    return str(kind.forward.__code__.co_filename)


_CALLBACKS: Final = "torch._dynamo.callback.callback_handler"
#: Registers a function that is called when a compilation ends.
END_CALLBACK: Final = f"{_CALLBACKS}.register_end_callback"
#: Called by ``torch._dynamo.reset()``, in the middle of a body.
CLEAR_CALLBACKS: Final = f"{_CALLBACKS}.clear"


#: With one of them begins the import of the compiler: of dynamo itself, or of what leads there.
PACKAGES: Final = ("torch._dynamo", "torch._inductor")


def has_begun() -> bool:
    """Return whether anybody imported the compiler, as the first optimizer of a process does."""
    return "torch._dynamo" in sys.modules


def callbacks() -> Any:
    """Return the object that calls back after compilations; None while there is no compiler.

    The compiler is not imported: a process that does not use it does not pay for it.
    """
    return getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)


def inductor_line_map(path: str) -> tuple[Sequence[int], Sequence[str]] | None:
    """First lines and the stacks that they were traced at, for a file that inductor wrote.

    Inductor keeps them for as long as the process lives, also for code from its cache on disk. None
    for any other file.
    """
    code_cache = getattr(sys.modules.get("torch._inductor.codecache"), "PyCodeCache", None)
    entry = getattr(code_cache, "linemaps", {}).get(path)
    if entry is None:
        return None
    # Without any node there is an empty list in place of the pair.
    return tuple(entry) if len(entry) == 2 else ((), ())


_P = ParamSpec("_P")
_R = TypeVar("_R")
_eval_frame: Any = torch._C._dynamo.eval_frame
#: The functions by which the compiler sets the callback, in any release.
SETTERS: Final = (
    "torch._dynamo.eval_frame.set_eval_frame",
    "torch._dynamo.eval_frame._maybe_set_eval_frame",
)


def is_imported() -> bool:
    """Return whether the compiler is there, whole."""
    return hasattr(sys.modules.get("torch._dynamo.eval_frame"), "_maybe_set_eval_frame")


def has_graphs() -> bool:
    """Return whether inductor has been imported as far as it compiles with."""
    return hasattr(sys.modules.get("torch._inductor.output_code"), "CompiledFxGraph")


def setters() -> list[str]:
    """Return the setters that this release has."""
    module = sys.modules["torch._dynamo.eval_frame"]
    return [name for name in SETTERS if hasattr(module, name.rpartition(".")[2])]


def is_compiling() -> bool:
    """Return whether the compiler works on this thread: its calls set and unset the callback."""
    guards: Any = sys.modules.get("torch._guards")
    return guards is not None and guards.CompileContext.try_get() is not None


#: Sets the calling thread's callback and returns the one before; no patch of ours is asked.
set_frame_callback: Final[Callable[[Any], Any]] = _eval_frame.set_eval_frame


def never_trace(code: CodeType) -> None:
    """Keep dynamo from tracing frames of ``code``; it goes on to trace what they call."""
    action = _eval_frame._FrameAction
    strategy = _eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT)
    _eval_frame.set_code_exec_strategy(code, strategy)


def untraced(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Keep dynamo from tracing what a function calls.

    Torch calls us in the middle of compiled code, and in the middle of the compiler with its locks
    held: one more compilation there would wait for them for ever.
    """

    @wraps(function)
    def untraced_call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        before = set_frame_callback(None)
        try:
            return function(*args, **kwargs)
        finally:
            set_frame_callback(before)

    return untraced_call
