"""The compiler: its modules, its callbacks, and the code that it generates."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final

import torch

from pytest_torchmem.record.torch_api import Checked

CHECKED: Final[Checked] = {
    "torch._dynamo": ("2.6.0", "2.15.0"),
    "torch._dynamo.callback": ("2.6.0", "2.15.0"),
    "torch._dynamo.eval_frame.OptimizedModule._orig_mod": ("2.6.0", "2.15.0"),
    "torch._inductor.codecache": ("2.6.0", "2.15.0"),
    "torch.jit._recursive.create_script_module": ("2.13.0", "2.13.0"),
    "torch.jit._script.get_jit_def": ("2.13.0", "2.13.0"),
}

#: Parse functions and modules for TorchScript: Python that is called for every token of a source.
SCRIPTING: Final = (
    "torch.jit._recursive.create_script_module",
    "torch.jit._script.get_jit_def",
)


def generated_file(graph_module: object) -> str:
    """The name under which the profiler shows the code generated for a graph module."""
    kind: Any = type(graph_module)
    return str(kind.forward.__code__.co_filename)


_CALLBACKS: Final = "torch._dynamo.callback.callback_handler"
#: Registers a function that is called when a compilation begins.
START_CALLBACK: Final = f"{_CALLBACKS}.register_start_callback"
#: Registers a function that is called when a compilation ends.
END_CALLBACK: Final = f"{_CALLBACKS}.register_end_callback"
#: Called by ``torch._dynamo.reset()``, in the middle of a body.
CLEAR_CALLBACKS: Final = f"{_CALLBACKS}.clear"


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


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether a module is what ``torch.compile`` made of another one."""
    return hasattr(module, "_orig_mod")
