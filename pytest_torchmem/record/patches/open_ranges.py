"""The calls of torch's that are open around a program's line, and the labels that it opened."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import get_ident
from types import FrameType
from typing import Final, NamedTuple, TypeAlias
from weakref import ref

import torch

from pytest_torchmem.contexts import Around
from pytest_torchmem.record.patches import Installed
from pytest_torchmem.record.patches.python_tracing import quiet
from pytest_torchmem.record.torch_api import compiler, profiler
from pytest_torchmem.record.tree.mentions import LABELLED
from pytest_torchmem.values.errors import RecordingError

_Range: TypeAlias = torch.autograd.profiler.record_function
_TORCH: Final = f"{Path(torch.__file__).parent}/"
# These files of torch's call the user's code without an operator around it: decorators such as
# no_grad,
_HARMLESS: Final = ("/utils/_contextlib.py",)
# modules,
_MODULES: Final = (*_HARMLESS, "/nn/modules/module.py", "/nn/modules/container.py")
# and the conversion of a module, down to the swap of its tensors.
CONVERSION: Final = (*_HARMLESS, "/nn/modules/module.py", "/torch/utils/__init__.py")
# These call the engine.
BACKWARD: Final = (*_MODULES, "/torch/_tensor.py", "/autograd/__init__.py", "/autograd/graph.py")
# These begin and end ranges and sessions,
_PROFILERS: Final = ("autograd/profiler.py", "profiler/profiler.py")
# and these compile, while the Python tracer may be suspended.
_COMPILERS: Final = (
    *("_dynamo/", "_inductor/", "_functorch/_aot_autograd/", "_functorch/aot_autograd.py"),
    *("_export/", "export/", "fx/", "jit/"),
)
_RECORDERS: Final = f"{Path(__file__).parents[1]}/"
_LOADERS: Final = "enumerate(DataLoader)#"
#: What is in the way of a cut below these.
COMPILES: Final = "torch compiles or profiles there"
_UNCUT: Final = tuple(f"{_TORCH}{place}" for place in (*_PROFILERS, *_COMPILERS))


class _Label(NamedTuple):
    """A block that is open, the range of ours that stands for it, and the thread of both."""

    block: ref[_Range]
    name: str
    range: profiler.RecordFunction
    thread: int


class OpenRanges:
    """Puts a range of ours around each ``record_function`` block, and looks for calls of torch.

    An operator or range that is open when the profiler stops writes its end into the session that
    is gone, as soon as the next one has begun: into memory that is somebody else's. So no range of
    the program's is recorded. It may be open for as long as the program likes, by whatever
    function opened it, and be closed on any thread. Ours are closed before a session ends, and
    opened again in the next one.

    A loader opens a block around each ``__next__``. That is no label of the program's.
    """

    def __init__(self) -> None:
        self._open: list[_Label] = []
        #: How many of torch's functions were being called when the recording began.
        self.around = 0

    def install(self, patches: Installed) -> None:
        """Begin to count. What torch is calling already, as ``mp.spawn`` does, is not counted."""
        self.around = _calls_by_torch(_HARMLESS)
        annotation = "torch.autograd.profiler.record_function"
        patches.replace(f"{annotation}.__enter__", self._opening)
        patches.replace(f"{annotation}.__exit__", self._closing)
        patches.replace(profiler.BEGIN_RANGE, _ours_alone)

    def _opening(self, enter: Callable[..., object]) -> Callable[..., object]:
        def opened(block: _Range) -> object:
            entered = enter(block)
            # A profiler of the program's has the block itself.
            if not (str(block.name).startswith(_LOADERS) or profiler.front_end_is_active()):
                self._end(lambda label: label.block() is block)
                self._begin(ref(block), str(block.name))
            return entered

        return opened

    def _closing(self, leave: Callable[..., object]) -> Callable[..., object]:
        def closed(block: _Range, *error: object) -> object:
            try:
                return leave(block, *error)
            finally:
                self._end(lambda label: label.block() is block)

        return closed

    @compiler.untraced
    def _begin(self, block: ref[_Range], name: str) -> None:
        ours = profiler.RecordFunction(f"{LABELLED}{name}")
        ours.__enter__()
        self._open.append(_Label(block, name, ours, get_ident()))

    def _end(self, which: Callable[[_Label], bool]) -> list[_Label]:
        """Close those labels, the last first; return them in the order in which they began."""
        ended = [label for label in self._open if which(label)]
        self._open = [label for label in self._open if label not in ended]
        for label in reversed(ended):
            label.range.__exit__(None, None, None)
        return ended

    def require_none_open(self) -> None:
        """Raise `RecordingError` inside a ``record_function`` block or a call of torch."""
        if not self.none_open():
            raise RecordingError(
                "this cannot be done inside a record_function block, an autograd function, a hook "
                "or anything else that torch calls; read a region's numbers, or estimate, after it"
            )

    def none_open(self, but: tuple[str, ...] = _HARMLESS) -> bool:
        """Return whether `require_none_open` raises nothing, for calls in the files ``but`` too."""
        self.forget_dropped()
        return not self._open and _calls_by_torch(but) <= self.around

    def forget_dropped(self) -> None:
        """Close the label of a block that is gone, which torch has closed then."""
        self._end(lambda label: label.block() is None)

    def in_the_way(self, *, has_calls: bool) -> str:
        """Return what forbids a cut: what cannot be `closed`, or torch's compilers; "" for nothing.

        Torch's other functions in Python are as good as the body's: an operator that calls Python
        is found on the stack of the process. Where a session ``has_calls`` of Python, a range is
        within the call that opened it. Elsewhere it is around all that follows.
        """
        self.forget_dropped()
        here = get_ident()
        if not all(has_calls and label.thread == here for label in self._open):
            return "a record_function block is open that cannot be closed from there"
        return COMPILES if any(file.startswith(_UNCUT) for file in _files_called()) else ""

    def closed(self) -> Around[list[_Label]]:
        """Have no label open in the block; those that were are opened again after it."""
        return Around(self.close, self._open_again)

    @quiet
    def close(self) -> list[_Label]:
        """Close all labels: no session of ours may end with one."""
        return self._end(lambda _: True)

    @quiet
    def _open_again(self, closed: list[_Label]) -> None:
        for label in closed:
            self._begin(label.block, label.name)


def _ours_alone(begin: Callable[[profiler.RecordFunction], object]) -> property:
    """Return a way to begin a range that is observed where it is ours, or another's profiler is.

    No function of Python's is around the beginning of ours: the range would end with it.
    """

    def beginning(found: profiler.RecordFunction) -> Callable[[], object]:
        is_ours = sys._getframe(1).f_code.co_filename.startswith(_RECORDERS)
        if is_ours or profiler.front_end_is_active():
            return partial(begin, found)
        return partial(profiler.begin_unobserved, begin, found)

    return property(beginning)


def _calls_by_torch(harmless: tuple[str, ...]) -> int:
    """Return how many functions of torch's are being called, below pytest where that is."""
    return sum(file.startswith(_TORCH) and not file.endswith(harmless) for file in _files_called())


def _files_called() -> Iterator[str]:
    """Yield the file of each function that is being called, below pytest where that is."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and "/_pytest/" not in (file := frame.f_code.co_filename):
        yield file
        frame = frame.f_back
