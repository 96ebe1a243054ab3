"""What the recorder uses of dynamo, which traces the frames of compiled code.

Dynamo looks at frames through a callback of the thread. None: everything runs as written. Anything
else: each frame that begins is traced, or run from what was compiled before if its guards hold.
Checked on torch 2.6 to 2.13. Nothing here imports dynamo.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType
from typing import Any, Final

import torch

_EVAL_FRAME: Any = torch._C._dynamo.eval_frame
#: The names under which ``torch._dynamo.eval_frame`` calls the function that sets the callback.
SETTERS: Final = ("set_eval_frame", "_maybe_set_eval_frame")


def setting_module() -> Any:
    """The module that sets the callback; None while nobody has imported the compiler."""
    module = sys.modules.get("torch._dynamo.eval_frame")
    return module if module is not None and hasattr(module, SETTERS[-1]) else None


def is_compiling() -> bool:
    """Whether the compiler works on this thread: what it calls sets and unsets the callback."""
    guards: Any = sys.modules.get("torch._guards")
    return guards is not None and guards.CompileContext.try_get() is not None


#: Sets the calling thread's callback and returns the one before; no patch of ours is asked.
set_frame_callback: Final[Callable[[Any], Any]] = _EVAL_FRAME.set_eval_frame


def never_trace(code: CodeType) -> None:
    """Keep dynamo from tracing frames of ``code``; it goes on to trace what they call."""
    set_strategy = getattr(_EVAL_FRAME, "set_code_exec_strategy", None)
    if set_strategy is None:  # before 2.7
        _EVAL_FRAME.skip_code(code)
    else:
        action = _EVAL_FRAME._FrameAction
        set_strategy(code, _EVAL_FRAME._FrameExecStrategy(action.SKIP, action.DEFAULT))
