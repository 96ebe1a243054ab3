"""``torch.func`` transforms, recorded without keeping what they wrap alive.

The profiler remembers each operator's inputs by weak references, so that one tensor is not taken
for another that came to the same address. A weak reference keeps no memory alive, but it keeps the
tensor's object, and the object of a wrapper holds the tensor that it wraps until it goes itself. So
everything that passes through ``vmap`` or ``func.grad`` would live until the recording ends.

Within a transform operators are therefore not observed. Allocations still are, and a function mode
stands in for the rest: it names what is called, and logs which tensors are used.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from pytest_torchmem.record import torch_api
from pytest_torchmem.record.autograd_graph import tensors_in

#: What the events begin with that stand for operators which were not observed.
OPERATOR_NAME: Final = "pytest-torchmem operator "


class FunctorchWatch:
    """Notices when the recording thread enters and leaves the outermost transform.

    ``used`` is told of each tensor that something within a transform is called with, ``left`` is
    called when the outermost one is over.

    Attributes:
        entered: Whether any transform was entered.
    """

    def __init__(
        self, used: Callable[[torch.Tensor], None], left: Callable[[], None] = lambda: None
    ) -> None:
        self._used = used
        self._after = left
        self._thread = 0
        self._depth = 0
        self.entered = False
        self._mode: _Calls | None = None
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Begin to watch the calling thread; `remove` restores everything."""
        self._thread = threading.get_ident()
        for module, begin, end in torch_api.functorch_nesting():
            self._wrap(module, begin, self._entered)
            self._wrap(module, end, self._left)

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()
        if self._depth:
            self._depth = 0
            self._observe_again()

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Observe the block, even within a transform."""
        if self._depth:
            torch_api.observe_operators(True)
        try:
            yield
        finally:
            if self._depth:
                torch_api.observe_operators(False)

    def _wrap(self, module: Any, name: str, noticed: Callable[[], None]) -> None:
        original = getattr(module, name)

        def watched(*args: Any) -> Any:
            level = original(*args)
            if threading.get_ident() == self._thread:
                noticed()
            return level

        setattr(module, name, watched)
        self._undo.append(lambda: setattr(module, name, original))

    def _entered(self) -> None:
        self._depth += 1
        self.entered = True
        if self._depth == 1:
            torch_api.observe_operators(False)
            self._mode = _Calls(self._used)
            self._mode.__enter__()

    def _left(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._observe_again()
            self._after()

    def _observe_again(self) -> None:
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.__exit__(None, None, None)
        torch_api.observe_operators(True)


class _Calls(TorchFunctionMode):  # type: ignore[misc]  # has no annotations in torch
    """Puts an event around each function of torch's that is called."""

    def __init__(self, used: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._used = used

    def __torch_function__(
        self, func: Any, types: Iterable[Any], args: Any = (), kwargs: Any = None
    ) -> Any:
        name = str(getattr(func, "__name__", "")).strip("_")
        with torch_api.unseen_by_modes():
            for value in (*args, *(kwargs or {}).values()):
                for tensor in tensors_in(value):
                    self._used(tensor)
        # Neither a property such as ``shape`` nor a whole backward pass is an operator.
        if name == "get" or getattr(func, "__module__", "") == "torch.autograd":
            return func(*args, **(kwargs or {}))
        torch_api.observe_operators(True)
        # Not by calling `__enter__`: the profiler closes what begins in a call when that returns.
        with torch_api.RecordFunction(f"{OPERATOR_NAME}aten::{name}"):
            torch_api.observe_operators(False)
            return func(*args, **(kwargs or {}))
