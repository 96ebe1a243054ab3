"""The origin of an operator: its name, its module, the user's line, the phase that it is in."""

from __future__ import annotations

import functools
import re
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Final, NamedTuple

import torch

from pytest_torchmem.record.torch_api import autograd, dispatcher
from pytest_torchmem.values.contributors import Phase, Source

_FRAME: Final = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')
_OURS: Final = str(Path(__file__).parents[2])
_TORCH: Final = Path(torch.__file__).parent
_CHECKPOINT: Final = str(_TORCH / "utils" / "checkpoint.py")
_ENGINE: Final = str(_TORCH / "autograd" / "graph.py")
_BACKWARD_CALL: Final = str(_TORCH / "autograd" / "__init__.py")
_FUNCTIONAL: Final = str(_TORCH / "nn" / "functional.py")
_DISTRIBUTION: Final = str(_TORCH / "distributions" / "distribution.py")
# What may stand between an operator's caller and a dispatch mode.
_DISPATCH: Final = frozenset(
    str(_TORCH / name)
    for name in ("_compile.py", "_dynamo/eval_frame.py", "utils/_python_dispatch.py")
)
_NOT_THE_USERS: Final = tuple(
    {
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        str(_TORCH),
        _OURS,
    }
)


@functools.lru_cache(maxsize=4096)
def is_user_file(file: str) -> bool:
    """Return whether a file is the user's: neither Python's, nor installed, nor ours."""
    return not file.startswith((*_NOT_THE_USERS, "<")) and "site-packages" not in file


def operator_name(node: torch.fx.Node) -> str:
    """The name of what an FX node calls, in the profiler's style: ``aten::mm``."""
    target = node.target
    schema = dispatcher.schema_of(target)
    if schema is not None:
        return str(schema.name)
    if isinstance(target, str):
        return target
    return str(getattr(target, "__name__", target))


def module_path(node: torch.fx.Node) -> str:
    """The path of the innermost module a node was traced in, or ``""``."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    innermost = list(stack.values())[-1]
    path = str(innermost[0] if isinstance(innermost, tuple) else innermost)
    # dynamo writes how the module is reached: L['self'].layers[0]._modules['norm'].
    path = re.sub(r"^L\[['\"]self['\"]\]\.?", "", path)
    path = re.sub(r"(?:\._modules)?\[['\"]?(\w+)['\"]?\]", r".\1", path)
    return path.lstrip(".")


def source_line(node: torch.fx.Node) -> Source | None:
    """The user's line a node was traced from: the innermost one outside torch and site-packages."""
    found = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    for frame in reversed(found):
        if is_user_file(frame["file"]):
            return Source(frame["file"], int(frame["line"]), frame["function"])
    return None


def user_line(frame: FrameType | None) -> Source | None:
    """The innermost of the user's lines at or outside a frame."""
    while frame is not None:
        code = frame.f_code
        if is_user_file(code.co_filename):
            return Source(code.co_filename, frame.f_lineno, code.co_name)
        frame = frame.f_back
    return None


def starts_backward(frame: FrameType | None) -> bool:
    """Return whether ``backward()`` itself called a frame, which makes the first gradient before
    the engine runs."""
    return _calls(frame, _BACKWARD_CALL)


def passing_answer(frame: FrameType | None) -> bool | None:
    """Return the answer with which a check of torch passes; None where something else asks.

    A distribution asks whether what it was given is valid, a loss whether a variance is negative.
    """
    if _calls(frame, _DISTRIBUTION):
        return True
    return False if _calls(frame, _FUNCTIONAL, "gaussian_nll_loss") else None


def _calls(frame: FrameType | None, file: str, function: str = "") -> bool:
    while frame is not None and frame.f_code.co_filename in _DISPATCH:
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename != file:
        return False
    return function in ("", frame.f_code.co_name)


def recomputes(frame: FrameType | None) -> bool:
    """Return whether a frame inside the autograd engine belongs to activation checkpointing.

    The engine may be entered again from within a recomputation (reentrant checkpointing), so the
    first of the two that is met on the way out decides.
    """
    while frame is not None:
        if frame.f_code.co_filename == _CHECKPOINT:
            return True
        if frame.f_code.co_filename == _ENGINE:
            return False
        frame = frame.f_back
    return False


def names_of(modules: Iterable[tuple[str, torch.nn.Module]]) -> dict[int, str]:
    """The path of every module below the given ones, from the class of its root: ``GPT.layers.3``.

    By ``id``, and with the paths of their parameters and buffers.
    """
    names: dict[int, str] = {}
    for _, root in modules:
        top = type(root).__name__
        for name, module in root.named_modules():
            names.setdefault(id(module), f"{top}.{name}".rstrip("."))
        for named in (root.named_parameters(), root.named_buffers()):
            for name, tensor in named:
                names.setdefault(id(tensor), f"{top}.{name}")
    return names


class CallSite(NamedTuple):
    """The phase, the module and the line of a call."""

    phase: Phase
    module: str
    source: Source | None


@dataclass(slots=True)
class CallSites:
    """The modules and optimizers that a program is in.

    ``module_names`` has the paths of modules by ``id``; ``optimizers`` counts the steps that are
    under way.
    """

    module_names: dict[int, str]
    optimizers: int = 0
    _modules: list[torch.nn.Module] = field(default_factory=list)
    # The forward operators, by the number of the node that autograd made for each.
    _forward: dict[int, CallSite] = field(default_factory=dict)

    def enter(self, module: torch.nn.Module) -> bool:
        """Return whether the module had a name before."""
        self._modules.append(module)
        known = id(module) in self.module_names
        self.module_names.setdefault(id(module), type(module).__name__)
        return known

    def leave(self, module: torch.nn.Module) -> None:
        # An exception may have skipped a module on its way out.
        while self._modules and self._modules.pop() is not module:
            pass

    def of(self, frame: FrameType | None) -> CallSite:
        """The site of a frame; an operator of the backward is where its forward operator was."""
        phase = self._phase(frame)
        if phase is Phase.BACKWARD:
            _, number = autograd.running_node()
            if number in self._forward:
                _, module, source = self._forward[number]
                return CallSite(phase, module, source)
        module = self.module_names.get(id(self._modules[-1]), "") if self._modules else ""
        site = CallSite(phase, module, user_line(frame))
        if phase is not Phase.BACKWARD:
            self._forward.setdefault(autograd.next_sequence_number() - 1, site)
        return site

    def _phase(self, frame: FrameType | None) -> Phase:
        if autograd.in_backward():
            return Phase.RECOMPUTE if recomputes(frame) else Phase.BACKWARD
        if starts_backward(frame):
            return Phase.BACKWARD
        return Phase.OPTIMIZER if self.optimizers else Phase.FORWARD
