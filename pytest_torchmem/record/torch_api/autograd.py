"""Autograd: its engine, its nodes and what they have saved; ``torch.func``'s levels of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch
from torch.autograd.graph import Node
from torch.utils._python_dispatch import _disable_current_modes

from pytest_torchmem.record.torch_api import ALL_RELEASES, Checked, profiler

CHECKED: Final[Checked] = {
    "torch._C._current_graph_task_id": ALL_RELEASES,
    "torch._C._functorch.get_unwrapped": ALL_RELEASES,
    "torch._C._functorch.is_functorch_wrapped_tensor": ALL_RELEASES,
    "torch._C._functorch.peek_interpreter_stack": ALL_RELEASES,
    "torch.autograd.Variable._execution_engine": ALL_RELEASES,
    "torch.autograd._engine_run_backward": ALL_RELEASES,
    "torch.autograd.graph.Node._raw_saved_*": ALL_RELEASES,
    "torch.utils._python_dispatch._disable_current_modes": ALL_RELEASES,
}

#: Whether a tensor stands for another one within a ``torch.func`` transform.
is_wrapper: Callable[[Any], bool] = torch._C._functorch.is_functorch_wrapped_tensor


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor below the wrappers of ``torch.func`` transforms."""
    return levels_of(tensor)[-1]


def levels_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensor and what each wrapper of ``torch.func`` holds, down to the plain tensor.

    Each level of ``func.grad`` has a graph of its own.
    """
    levels = [tensor]
    while is_wrapper(levels[-1]):
        levels.append(torch._C._functorch.get_unwrapped(levels[-1]))
    return levels


def is_leaf(tensor: torch.Tensor) -> bool:
    """Return whether no graph made a tensor; False where torch does not say.

    It refuses to for a view that was made with others at once, as by ``split``, when their base was
    changed in place since.
    """
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


def node_of(tensor: torch.Tensor) -> Node | None:
    """Return the node of the graph that made a tensor; None for none, and see `is_leaf`."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def has_graph(tensor: torch.Tensor) -> bool:
    return node_of(tensor) is not None


_kind: Any = torch.Tensor
_gradient: Final[Callable[[torch.Tensor], torch.Tensor | None]] = _kind.grad.__get__


_is_leaf: Final[Callable[[torch.Tensor], bool]] = _kind.is_leaf.__get__
_retains: Final[Callable[[torch.Tensor], bool]] = _kind.retains_grad.__get__


def gradient_of(tensor: object) -> torch.Tensor | None:
    """Return a tensor's ``.grad``, whatever a class of the program's makes of that name.

    A result of operators keeps a gradient if it was told to. torch warns whoever asks another one:
    meta-learning has such results in the place of parameters.
    """
    if not isinstance(tensor, torch.Tensor) or not (_is_leaf(tensor) or _retains(tensor)):
        return None
    return _gradient(tensor)


def within_transform() -> bool:
    """Return whether a ``torch.func`` transform is running on this thread."""
    return torch._C._functorch.peek_interpreter_stack() is not None


#: Every Python call of the engine goes through the object of this name.
ENGINE: Final = "torch.autograd.Variable._execution_engine"
#: Torch itself calls it with this function.
RUN_BACKWARD: Final = "torch.autograd._engine_run_backward"


def engine() -> Any:
    """The object through which every Python call of the autograd engine goes."""
    return torch.autograd.Variable._execution_engine


def await_engine(device: torch.device, watched: Any = None) -> None:
    """Wait until the thread in which the engine works for a device has let go of its last task.

    A backward pass is over before that: what the thread alone still holds is freed a moment later,
    while the program goes on. The CPU has no such thread. It runs a graph of no bytes; ``watched``
    is the real one, if it is not the one that `engine` gives, and has just worked.
    """
    if device.type == "cpu" or in_backward() or within_transform():
        return
    if watched is None and not has_threads():
        return
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    profiler.observe_operators(False)
    try:
        with torch.inference_mode(False), torch.enable_grad(), _disable_current_modes():
            leaf = torch.empty(0, device=device, requires_grad=True)
            (watched or engine()).run_backward(
                (leaf.view(0),), (torch.empty(0, device=device),), False, False, (leaf,), True
            )
    finally:
        profiler.observe_operators(True)


# Linux has a folder for each thread there, with its name.
_THREADS: Final = Path("/proc/self/task")


def has_threads() -> bool:
    """Return whether the engine may have threads for devices, which it gets when it first works.

    We must not be the first: it refuses to work in the children of a process that has them.
    """
    if not _THREADS.is_dir():
        return True
    for name in _THREADS.glob("*/comm"):
        with suppress(OSError):  # it may end meanwhile
            if name.read_bytes().startswith(b"pt_autograd"):
                return True
    return False


def in_backward() -> bool:
    """Return whether the calling thread is inside the autograd engine."""
    return bool(torch._C._current_graph_task_id() >= 0)


def raw_saved(saved: Any) -> Any:
    """Return what autograd stored: a tensor, or a pack hook's result. Unpacks nothing."""
    return saved if isinstance(saved, torch.Tensor) else getattr(saved, "data", None)


def raw_names(kind: type[object]) -> list[str]:
    """The attributes of a class of nodes that hold what a node has saved, as it was saved."""
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]
