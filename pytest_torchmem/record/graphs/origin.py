"""The origin of an operator of a graph: its name, its module, the user's line."""

from __future__ import annotations

import functools
import re
import sysconfig
from pathlib import Path
from typing import Final

import torch

from pytest_torchmem.record.torch_api import dispatcher
from pytest_torchmem.values.contributors import Source

_FRAME: Final = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')
_NOT_THE_USERS: Final = tuple(
    {
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        str(Path(torch.__file__).parent),
        str(Path(__file__).parents[2]),
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
    frames = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    for frame in reversed(frames):
        if is_user_file(frame["file"]):
            return Source(frame["file"], int(frame["line"]), frame["function"])
    return None
