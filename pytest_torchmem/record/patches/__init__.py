"""Everything that is put into torch and Python while a body runs, and how it is taken out again.

`PATCHES` is the table of it: nothing that is in it is in place before a recording begins or after
it has ended, and the last that came is the first that goes. `STAYING` has what stays. Nothing that
is in neither can be put in place.

A body may do the same: it may replace ``time.time_ns``, or count who calls ``gc.disable``. What we
call while it runs is imported by its name.
"""

from __future__ import annotations

import ctypes
import gc
import pkgutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from functools import cache, reduce, update_wrapper
from types import CodeType, FunctionType
from typing import Any, Final
from weakref import WeakKeyDictionary

from pytest_torchmem.record.torch_api import (
    autograd,
    compiler,
    memory,
    modules,
)


class How(Enum):
    """The way in which a patch is put in place."""

    REPLACED = "replaced"
    ADDED = "added to"


@dataclass(frozen=True, slots=True)
class Patch:
    """A name of torch's or Python's that we put something into.

    Attributes:
        releases: The releases of torch that need it, or when it is needed, where not always.
    """

    name: str
    why: str
    how: How = How.REPLACED
    releases: str = ""


_REGISTERED: Final = "Tells which tensors are parameters and buffers, and of which module."
_STEP: Final = "Tells when an optimizer works, and what its state is."
_COMPILED: Final = "Tells what a graph that was just compiled stands for."
_NN: Final = "torch.nn.modules.module."
_OPTIM: Final = "torch.optim.optimizer."

PATCHES: Final = (
    Patch(f"{_NN}register_module_parameter_registration_hook", _REGISTERED, How.ADDED),
    Patch(f"{_NN}register_module_buffer_registration_hook", _REGISTERED, How.ADDED),
    Patch(f"{_NN}register_module_module_registration_hook", _REGISTERED, How.ADDED),
    Patch(f"{_OPTIM}register_optimizer_step_pre_hook", _STEP, How.ADDED),
    Patch(f"{_OPTIM}register_optimizer_step_post_hook", _STEP, How.ADDED),
    Patch("torch.nn.Module.__setstate__", "Tells what a copied or unpickled module holds."),
    Patch(modules.CONVERT, "Tells what a module holds that was moved, or has another type."),
    Patch(memory.RESIZE_STORAGE, "Tells that a storage on the CPU has left its place."),
    Patch(autograd.ENGINE, "Tells when a backward pass begins and ends, and what its graph keeps."),
    Patch(autograd.RUN_BACKWARD, "Does so where torch's own function runs the engine."),
    Patch(
        "torch.distributed.Work.wait",
        "Waits until gloo's threads have let go of what they worked on (on Linux).",
    ),
    Patch(
        "importlib._bootstrap._find_and_load",
        "Notices that the body imports torch's compiler, and collects the cycles that this leaves.",
        releases="until the compiler is imported",
    ),
    Patch(compiler.END_CALLBACK, _COMPILED, How.ADDED),
    Patch(compiler.CLEAR_CALLBACKS, "Keeps our callbacks when the compiler is reset in a body."),
    *(Patch(name, "Takes hooks out while dynamo looks at frames.") for name in compiler.SETTERS),
    Patch(
        compiler.RUN_GRAPH,
        "Tells what is given to fused kernels: no operator reads it.",
        releases="once inductor is imported",
    ),
)
STAYING: Final = (
    Patch(
        "torch.utils.weakref",
        "Hides our weak references to tensors: one that has any cannot be swapped.",
    ),
    Patch("gc.callbacks", "Tells what is about to become old: the next look is short.", How.ADDED),
)
"""These stay from the first measurement on."""

_LISTED: Final = frozenset(patch.name for patch in (*PATCHES, *STAYING))


class Installed:
    """Holds what is in place now. `remove` takes it out, the last first, also where one fails.

    As a context manager it does so at the end of the block.
    """

    def __init__(self) -> None:
        self._undo = ExitStack()
        self.names: list[str] = []

    def replace(self, name: str, make: Callable[[Any], object]) -> None:
        """Put what ``make`` returns for the original in the place of a name of the table.

        What the program puts there meanwhile stays. A function that the program took from there,
        to call it or to put it back later, ends as the original: nothing is recorded by it.
        """
        _require_listed(name)
        where, _, attribute = name.rpartition(".")
        owner = found(where)
        # As it stands there: what a class gives for it may be bound, or come from a base class.
        before = vars(owner).get(attribute, _MISSING)
        if _ended(before) is not before:
            _put(owner, attribute, before := _ended(before))
        original = getattr(owner, attribute)
        ours = make(original)
        if isinstance(ours, FunctionType):
            ours = self._forwarding(ours, original)
        # Wrappers that classes have are not referred to.
        if not isinstance(ours, (staticmethod, classmethod, property)):
            self.finally_do(lambda: _ENDED.__setitem__(ours, before))

        def restore() -> None:
            if vars(owner).get(attribute) is ours:
                _put(owner, attribute, _ended(before))

        self.note(name, restore)
        _put(owner, attribute, ours)

    def _forwarding(
        self, function: FunctionType, original: Callable[..., object]
    ) -> Callable[..., object]:
        """Return a function that calls another one, and the original once all is taken out."""
        now: Callable[..., object] = function

        def forward(*args: object, **options: object) -> object:
            # What raises here is the program or torch: pytest leaves this frame out.
            __tracebackhide__ = True
            return now(*args, **options)

        def end() -> None:
            nonlocal now
            now = original

        update_wrapper(forward, original)
        forward.__code__ = named(forward.__code__, function.__code__.co_filename)
        self.finally_do(end)
        return forward

    def hook(self, name: str, function: Callable[..., Any], **options: bool) -> None:
        """Register a function by a name of the table, which returns a handle."""
        _require_listed(name)
        self.note(name, found(name)(function, **options).remove)

    def note(self, name: str, undo: Callable[[], object]) -> None:
        """Say that what a name of the table stands for is put in place, and how to undo it."""
        _require_listed(name)
        self.finally_do(undo)
        self.names.append(name)

    def finally_do(self, last: Callable[[], object]) -> None:
        """Have something done once all that comes after it is taken out."""
        self._undo.callback(last)

    def remove(self) -> None:
        """Take everything out; does nothing where nothing is in place."""
        self.names.clear()
        self._undo.close()

    def __enter__(self) -> Installed:
        return self

    def __exit__(self, *raised: object) -> None:
        self.remove()


_MISSING: Final = object()
# What stood in the place of each thing of ours that is no longer in use, and that may be back.
_ENDED: Final[WeakKeyDictionary[object, object]] = WeakKeyDictionary()


def _ended(value: object) -> object:
    """Return what a thing of ours that is no longer in use stood for; others as they are."""
    # What compares in a way of its own is the program's.
    while type(value).__hash__ is object.__hash__ and value in _ENDED:
        value = _ENDED[value]
    return value


def _put(owner: object, attribute: str, value: object) -> None:
    if value is _MISSING:
        delattr(owner, attribute)
        return
    try:
        setattr(owner, attribute, value)
    except TypeError:
        # A type of C's. Python itself may change what such a type has, and then forgets what it
        # found there before.
        gc.get_referents(vars(owner))[0][attribute] = value
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(owner))


@cache
def named(code: CodeType, file: str) -> CodeType:
    """Return code that tracebacks leave out where they leave out a file's, and dynamo always."""
    renamed = code.replace(co_filename=file)
    compiler.never_trace(renamed)
    return renamed


def found(name: str) -> Any:
    """Return what a dotted name stands for; ``pkgutil`` would try to import each part of it."""
    root, *rest = name.split(".")
    try:
        return reduce(getattr, rest, sys.modules[root])
    except (KeyError, AttributeError):
        return pkgutil.resolve_name(name)


def _require_listed(name: str) -> None:
    if name not in _LISTED:
        raise ValueError(f"{name} is not in PATCHES")
