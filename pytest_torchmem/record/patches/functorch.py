"""``torch.func`` transforms, recorded without keeping what they wrap alive.

The profiler remembers each operator's inputs by weak references, so that one tensor is not taken
for another that came to the same address. A weak reference keeps no memory alive, but it keeps the
tensor's object, and the object of a wrapper holds the tensor that it wraps until it goes itself. So
everything that passes through ``vmap`` or ``func.grad`` would live until the recording ends.

Within a transform operators are therefore not observed. Allocations still are, and a function mode
stands in for the rest: it names what is called, and logs which tensors it reads and writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from pytest_torchmem.record.owners.places import tensors_within
from pytest_torchmem.record.patches import Installed
from pytest_torchmem.record.patches.python_tracing import quiet
from pytest_torchmem.record.torch_api import autograd, profiler
from pytest_torchmem.record.torch_api.compiler import untraced
from pytest_torchmem.record.tree.kineto import MARKED

# Functions that write to their first argument.
_IN_PLACE: Final = re.compile(
    r"\w*[^_]_|__(setitem|i(add|and|div|floordiv|lshift|mod|mul|or|pow|rshift|sub|truediv|xor))__"
)

#: Logs the tensors that an operator reads and those that it writes to; returns the mark.
NoteCall = Callable[[list[torch.Tensor], list[torch.Tensor]], int]


class FunctorchWatch:
    """Notices when the recording thread enters and leaves the outermost transform.

    ``called`` is told what each operator within a transform is called with, ``left`` is called when
    the outermost transform is over.
    """

    def __init__(self, called: NoteCall, left: Callable[[], None] = lambda: None) -> None:
        self._called = called
        self._after = left
        self._thread = 0
        self._depth = 0
        self.entered = False
        self._mode: _Calls | None = None

    def install(self, patches: Installed) -> None:
        """Begin to watch the calling thread, until ``patches`` are removed."""
        self._thread = get_ident()
        patches.finally_do(self._leave)

    def install_hooks(self, patches: Installed) -> None:
        """Do the same with what dynamo would see; see `CompiledRegions`."""
        for begin, end in autograd.NESTING:
            patches.replace(begin, lambda function: self._noticing(function, self._entered))
            patches.replace(end, lambda function: self._noticing(function, self._left))

    @property
    def within(self) -> bool:
        """Return whether a transform is under way."""
        return self._depth > 0

    def _leave(self) -> None:
        if self._depth:
            self._depth = 0
            self._observe_again()

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Observe the block, even within a transform."""
        if self._depth:
            profiler.observe_operators(True)
        try:
            yield
        finally:
            if self._depth:
                profiler.observe_operators(False)

    def _noticing(
        self, function: Callable[..., object], noticed: Callable[[], None]
    ) -> Callable[..., object]:
        def watched(*args: object) -> object:
            __tracebackhide__ = True
            level = function(*args)
            if get_ident() == self._thread:
                noticed()
            return level

        return watched

    @untraced
    def _entered(self) -> None:
        self._depth += 1
        self.entered = True
        if self._depth == 1:
            profiler.observe_operators(False)
            self._mode = _Calls(self._called)
            self._mode.__enter__()  # type: ignore[no-untyped-call]  # as all of it in torch

    @untraced
    def _left(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._observe_again()
            self._after()

    def _observe_again(self) -> None:
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        profiler.observe_operators(True)


class _Calls(TorchFunctionMode):
    """Puts an event around each function of torch's that is called."""

    def __init__(self, called: NoteCall) -> None:
        super().__init__()
        self._called = called

    def __torch_function__(
        self, func: Any, types: Iterable[Any], args: Any = (), kwargs: Any = None
    ) -> Any:
        __tracebackhide__ = True
        name, kwargs = str(getattr(func, "__name__", "")), kwargs or {}
        # Neither a property such as ``shape`` nor a whole backward pass is an operator.
        if name == "__get__" or getattr(func, "__module__", "") == "torch.autograd":
            return func(*args, **kwargs)
        label = self._label(name, args, kwargs)
        # Not by calling `__enter__`: the profiler closes what begins in a call when that returns.
        with profiler.RecordFunction(label):
            profiler.observe_operators(False)
            return func(*args, **kwargs)

    @quiet
    def _label(self, name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> str:
        """Note a call, and observe what comes next: the event of this name."""
        mark = self._called(*_read_and_written(name, args, kwargs))
        profiler.observe_operators(True)
        return f"{MARKED}{mark} aten::{name.strip('_')}"


def _read_and_written(
    name: str, args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that a call of the function of this name reads, and those that it writes to."""
    in_place = bool(args) and (kwargs.get("inplace") is True or _IN_PLACE.fullmatch(name))
    written = [*tensors_within(args[0])] if in_place else []
    written += tensors_within(kwargs.get("out"))
    read = [*args[1:]] if in_place else [*args]
    read += (value for key, value in kwargs.items() if key != "out")
    return [*tensors_within(read)], written
