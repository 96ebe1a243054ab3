"""Every private torch name the recorder uses, but for those of allocators, in one place.

Checked on torch 2.13; each line names what the public interface lacks. A name that a release may
lack is looked up here, so that the rest of the package sees one shape.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from operator import attrgetter
from typing import Any

import torch

# The event tree itself: torch.profiler exposes it only through these bindings.
from torch._C._profiler import (
    RecordScope,
    _ExtraFields_Allocation,
    _ExtraFields_OutOfMemory,
    _ExtraFields_PyCall,
    _ExtraFields_PyCCall,
    _ExtraFields_TorchOp,
    _ProfilerEvent,
    _RecordFunctionFast,
    _TensorMetadata,
)
from torch._functorch import eager_transforms, vmap
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import (
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)

from pytest_torchmem.values.errors import RecordingError

AllocationFields: Any = _ExtraFields_Allocation
OutOfMemoryFields: Any = _ExtraFields_OutOfMemory
PyCallFields: Any = _ExtraFields_PyCall
PyCCallFields: Any = _ExtraFields_PyCCall
TorchOpFields: Any = _ExtraFields_TorchOp
ProfilerEvent: Any = _ProfilerEvent
TensorMetadata: Any = _TensorMetadata
RecordFunction: Any = _RecordFunctionFast
BACKWARD_FUNCTION: Any = RecordScope.BACKWARD_FUNCTION
FUNCTION: Any = RecordScope.FUNCTION


def reader(bindings: Any, name: str) -> Callable[[Any], Any]:
    """The function behind an attribute of a class of ``torch._C``.

    Calling it costs less than looking the attribute up on each of many thousand objects.
    """
    return getattr(getattr(bindings, name), "fget", None) or attrgetter(name)


def _fields_reader() -> Callable[[Any], Any]:
    # Older releases give the fields only together with a tag that costs more than they do.
    if hasattr(ProfilerEvent, "extra_fields"):
        return reader(ProfilerEvent, "extra_fields")
    typed = reader(ProfilerEvent, "typed")
    return lambda event: typed(event)[1]


#: What an event of the tree has beside name and times, according to its type.
fields_of: Callable[[Any], Any] = _fields_reader()


def name_of(event: Any) -> str:
    """The name of an event: for a Python call its file, line and function.

    The tracer keeps no reference to a function's name. That of a module's code is gone when the
    module has been imported, and what is found in its place need not even be text.
    """
    try:
        return str(event.name)
    except UnicodeDecodeError as error:
        place, _, _ = error.object.rpartition(b": ")
        return f"{place.decode(errors='replace')}: <module>"


def import_compiler() -> None:
    """Import what the first optimizer or checkpoint of a process would import in any case.

    That is some thousand modules. Recorded with Python stacks it takes half a minute instead of two
    seconds.
    """
    importlib.import_module("torch._dynamo")


def schemas_of(operator_name: str) -> tuple[Any, ...]:
    """Every registered schema of a qualified operator name; empty if there is none."""
    # Annotations reach the profiler under names of the same shape. Lookup raises for some of them,
    # and a name without a namespace can never be an operator.
    if "::" not in operator_name:
        return ()
    try:
        return tuple(torch._C._jit_get_schemas_for_operator(operator_name))
    except RuntimeError:
        return ()


@lru_cache(maxsize=1024)
def is_view(operator_name: str) -> bool:
    """Whether an operator does nothing but look at its input in another way."""
    schemas = schemas_of(operator_name)
    return bool(schemas) and all(
        any(value.alias_info is not None for value in schema.returns)
        and not any(getattr(a.alias_info, "is_write", False) for a in schema.arguments)
        for schema in schemas
    )


def graph_module_classes() -> list[type[Any]]:
    """The classes of graph modules that are alive: each has one of its own, of this name."""
    waiting: list[type[Any]] = [torch.fx.GraphModule]
    found = []
    while waiting:
        found.append(waiting.pop())
        waiting += found[-1].__subclasses__()
    return [kind for kind in found if kind.__qualname__.endswith(".GraphModuleImpl")]


def generated_file(graph_module: Any) -> str:
    """The name under which the profiler shows the code generated for a graph module."""
    return str(type(graph_module).forward.__code__.co_filename)


def compiler_callbacks() -> Any:
    """Where to register for the end of compilations; None while there is no compiler.

    The compiler is not imported: a process that does not use it does not pay for it.
    """
    return getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)


def inductor_line_map(path: str) -> tuple[Any, Any] | None:
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


def autograd_engine() -> Any:
    """The object through which every Python call of the autograd engine goes."""
    return torch.autograd.Variable._execution_engine


def set_autograd_engine(engine: Any) -> None:
    torch.autograd.Variable._execution_engine = engine


def await_autograd(device: torch.device, engine: Any = None) -> None:
    """Wait until the thread in which the engine works for a device has let go of its last task.

    A backward pass is over before that: what the thread alone still holds is freed a moment later,
    while the program goes on. The CPU has no such thread. It runs a graph of no bytes; ``engine``
    is the real one, if it is not the one that `autograd_engine` gives.
    """
    if device.type == "cpu" or in_backward() or within_functorch():
        return
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    recorded = profiler_is_active()
    if recorded:
        observe_operators(False)
    try:
        with torch.inference_mode(False), torch.enable_grad(), _disable_current_modes():
            leaf = torch.empty(0, device=device, requires_grad=True)
            (engine or autograd_engine()).run_backward(
                (leaf.view(0),), (torch.empty(0, device=device),), False, False, (leaf,), True
            )
    finally:
        if recorded:
            observe_operators(True)


def hold(tensor: torch.Tensor) -> None:
    """Let Python own a tensor that the collector or a weak reference gave.

    Where only C++ held on to it, releases before 2.10 could free it while Python refers to it.
    """
    torch._C.TensorBase._fix_weakref(tensor)


#: What holds memory and may be asked of the collector. Before 2.10 that has storages, too, whose
#: memory C++ has freed already: to look at one ends the process.
HOLDING: tuple[type[Any], ...] = (
    (torch.Tensor, torch.UntypedStorage)
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10)
    else (torch.Tensor,)
)


def in_backward() -> bool:
    """Whether the calling thread is inside the autograd engine."""
    return bool(torch._C._current_graph_task_id() >= 0)


#: Whether what a node saved can be looked at without unpacking it. Since 2.10.
READS_SAVED: bool = hasattr(torch._C._autograd.SavedTensor, "data")


def raw_saved(saved: Any) -> Any:
    """What autograd stored: a tensor, or whatever a pack hook returned. Unpacks nothing."""
    return saved if isinstance(saved, torch.Tensor) else getattr(saved, "data", None)


def next_sequence_number() -> int:
    """The number that the next node of an autograd graph made by this thread gets."""
    return int(torch._C._autograd._get_sequence_nr())


#: Whether a tensor stands for another one within a ``torch.func`` transform.
is_functorch_wrapper: Callable[[Any], bool] = torch._C._functorch.is_functorch_wrapped_tensor


def unwrap_functorch(tensor: Any) -> Any:
    """The plain tensor below the wrappers of ``torch.func`` transforms."""
    return functorch_levels(tensor)[-1]


def functorch_levels(tensor: Any) -> list[Any]:
    """The tensor and what each wrapper of ``torch.func`` holds, down to the plain tensor.

    Each level of ``func.grad`` has a graph of its own.
    """
    levels = [tensor]
    while is_functorch_wrapper(levels[-1]):
        levels.append(torch._C._functorch.get_unwrapped(levels[-1]))
    return levels


def functorch_nesting() -> list[tuple[Any, str, str]]:
    """Modules that enter and leave ``torch.func`` transforms, with the functions they call for it.

    They are called by the names that they were imported under. Checked on 2.6 to 2.13.
    """
    pairs = [
        (eager_transforms, "_grad_increment_nesting", "_grad_decrement_nesting"),
        (eager_transforms, "_jvp_increment_nesting", "_jvp_decrement_nesting"),
        (eager_transforms, "_func_increment_nesting", "_func_decrement_nesting"),
        (vmap, "_vmap_increment_nesting", "_vmap_decrement_nesting"),
    ]
    return [(m, begin, end) for m, begin, end in pairs if hasattr(m, begin) and hasattr(m, end)]


def within_functorch() -> bool:
    """Whether a ``torch.func`` transform is running on this thread."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def observe_operators(on: bool) -> None:
    """Let the profiler see the operators of this thread, or not; allocations it sees always."""
    torch.autograd._enable_record_function(on)


def unseen_by_modes() -> Any:
    """A context manager: what is asked of tensors in it goes to no function mode of the user's."""
    return torch._C.DisableTorchFunction()


def allocations_in(result: Any) -> list[Any]:
    """The fields of all allocations and frees in a kineto result."""
    waiting, found = list(result.experimental_event_tree()), []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        fields = fields_of(event)
        if isinstance(fields, AllocationFields):
            found.append(fields)
    return found


def undispatched() -> Any:
    """A context manager: operators in it go to no dispatch mode of the user's."""
    return torch._C._DisableTorchDispatch()


def flattened(tensor: Any) -> list[Any]:
    """The tensors that a wrapper subclass says it is made of; none where it does not say."""
    if not is_traceable_wrapper_subclass(tensor):
        return []
    names, _ = tensor.__tensor_flatten__()
    return [getattr(tensor, name) for name in names]


def has_memory(tensor: torch.Tensor) -> bool:
    """False for a stand-in: asking one for its data warns on some releases, raises on others."""
    return tensor.device.type != "meta" and not isinstance(tensor, FakeTensor)


class Profiler:
    """One session of the kineto profiler, without the front end's own bookkeeping.

    The front end builds an event list when it stops, which costs more than the recording.
    """

    def __init__(self) -> None:
        front_end = torch.autograd.profiler.profile(
            use_cpu=True, use_kineto=True, record_shapes=True, profile_memory=True, with_stack=True
        )
        self._config = front_end.config()
        self._activities = {torch.profiler.ProfilerActivity.CPU}

    def start(self) -> None:
        """Begin; raises `RuntimeError` when another session is active."""
        if profiler_is_active():
            raise RuntimeError("another profiler session is active")
        with _without_own_log():
            torch.autograd._prepare_profiler(self._config, self._activities)
            torch.autograd._enable_profiler(self._config, self._activities)

    def stop(self) -> Any:
        """End, and return the kineto result with the event tree.

        Raises `RecordingError` where torch cannot make sense of what it recorded: so it may be
        before 2.8 when a thread waits in a call of C as the session begins.
        """
        try:
            with _without_own_log():
                return torch.autograd._disable_profiler()
        except RuntimeError as error:
            raise RecordingError(f"torch's profiler failed: {str(error).splitlines()[0]}") from None


@contextmanager
def _without_own_log() -> Iterator[None]:
    """Keep the profiler's notes of its start and stop off standard error.

    Its library writes them whatever the log level. All else that is written meanwhile is passed on.
    """
    try:
        sys.stderr.flush()
        original = os.dup(2)
    except (OSError, ValueError, AttributeError):  # no standard error to protect
        yield
        return
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(original, 2)
            os.close(original)
            caught.seek(0)
            for line in caught:
                if not line.startswith(b"USDT:"):
                    os.write(2, line)


def profiler_is_active() -> bool:
    return bool(torch.autograd._profiler_enabled())
