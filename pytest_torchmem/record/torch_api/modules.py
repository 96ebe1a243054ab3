"""Modules and optimizers: what a module holds, and the hooks that every one of them calls."""

from __future__ import annotations

from collections.abc import Mapping
from types import CodeType
from typing import Any, Final

import torch

from pytest_torchmem.record.torch_api import ALL_RELEASES, Checked
from pytest_torchmem.values.errors import is_of_a_signal

CHECKED: Final[Checked] = {
    "torch.nn.Module._apply": ALL_RELEASES,
    "torch.nn.Module._buffers": ALL_RELEASES,
    "torch.nn.Module._modules": ALL_RELEASES,
    "torch.nn.Module._parameters": ALL_RELEASES,
    "torch.nn.Module._wrapped_call_impl": ALL_RELEASES,
}

#: Gives each tensor of a module's its place on another device, or another type.
CONVERT: Final = "torch.nn.Module._apply"


_module: Any = torch.nn.Module
#: The code that each call of a module runs; its first local variable is the module.
CALL_CODE: Final[CodeType] = _module._wrapped_call_impl.__code__


def parameters_of(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """The module's own dict of parameters, by name; None stands for one that is left out.

    A module whose ``__init__`` has not called torch's has none.
    """
    parameters: dict[str, torch.nn.Parameter | None] = _attribute(module, "_parameters", {})
    return parameters


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """The module's own dict of buffers, by name; None stands for one that is left out."""
    buffers: dict[str, torch.Tensor | None] = _attribute(module, "_buffers", {})
    return buffers


def submodules_of(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """The module's own dict of modules, by name; None stands for one that is left out."""
    children: dict[str, torch.nn.Module | None] = _attribute(module, "_modules", {})
    return children


def groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """An optimizer's groups of parameters; none where it has not called torch's ``__init__``."""
    groups: list[dict[str, Any]] = _attribute(optimizer, "param_groups", [])
    return groups


def state_of(optimizer: torch.optim.Optimizer) -> Mapping[object, object]:
    """An optimizer's state by parameter."""
    state = _attribute(optimizer, "state", {})
    return state if isinstance(state, Mapping) else {}


_OF_TORCH: Final = frozenset({"defaults", "param_groups", "state"})


def own_values_of(optimizer: torch.optim.Optimizer) -> list[object]:
    """The values of an optimizer's own attributes, beside those that torch gives each."""
    return [value for name, value in vars(optimizer).items() if name not in _OF_TORCH]


def main_gradient_of(tensor: torch.Tensor) -> object:
    """The buffer in which Megatron and others sum a parameter's gradients up; None without one."""
    return getattr(tensor, "__dict__", {}).get("main_grad")


def _attribute(owner: object, name: str, otherwise: Any) -> Any:
    """An attribute of torch's, which a class of the user's may have made a property, or lack."""
    try:
        return getattr(owner, name)
    except Exception as error:
        if is_of_a_signal(error):
            raise
        return otherwise
