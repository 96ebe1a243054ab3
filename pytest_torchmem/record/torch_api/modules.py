"""Modules and optimizers: what a module holds, and the hooks that every one of them calls."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, Final

import torch
from torch.optim import optimizer as _optimizer

from pytest_torchmem.record.torch_api import Checked

CHECKED: Final[Checked] = {
    "torch.nn.Module._apply": ("2.10.0", "2.15.0"),
    "torch.nn.Module._buffers": ("2.10.0", "2.15.0"),
    "torch.nn.Module._modules": ("2.10.0", "2.15.0"),
    "torch.nn.Module._parameters": ("2.10.0", "2.15.0"),
    "torch.optim.optimizer._foreach_supported_types": ("2.10.0", "2.15.0"),
    "torch.optim.optimizer._get_foreach_kernels_supported_devices": ("2.10.0", "2.15.0"),
    "torch.optim.swa_utils._get_foreach_kernels_supported_devices": ("2.10.0", "2.15.0"),
}

#: Gives each tensor of a module's its place on another device, or another type.
CONVERT: Final = "torch.nn.Module._apply"

#: The attributes in which a module keeps what it holds.
OWN_ATTRIBUTES: Final = ("_parameters", "_buffers", "_modules")

#: The attributes in which an optimizer keeps what it updates and what it knows of it.
OPTIMIZERS_OWN: Final = ("param_groups", "state", "defaults")


def parameters_of(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """The module's own dict of parameters, by name; None stands for one that is left out.

    A module whose ``__init__`` has not called torch's has none.
    """
    found: dict[str, torch.nn.Parameter | None] = _attribute(module, "_parameters", {})
    return found


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """The module's own dict of buffers, by name; None stands for one that is left out."""
    found: dict[str, torch.Tensor | None] = _attribute(module, "_buffers", {})
    return found


def submodules_of(module: torch.nn.Module) -> dict[str, torch.nn.Module | None]:
    """The module's own dict of modules, by name; None stands for one that is left out."""
    found: dict[str, torch.nn.Module | None] = _attribute(module, "_modules", {})
    return found


def dicts_of(module: torch.nn.Module) -> list[MutableMapping[Any, Any]]:
    """A module's own dicts: its parameters, buffers and children, and its hooks of all kinds."""
    names = (*OWN_ATTRIBUTES, *(name for name in module.__dict__ if name.endswith("hooks")))
    found = (_attribute(module, name, None) for name in names)
    return [kept for kept in found if isinstance(kept, MutableMapping)]


def groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """An optimizer's groups of parameters; none where it has not called torch's ``__init__``."""
    found: list[dict[str, Any]] = _attribute(optimizer, "param_groups", [])
    return found


def state_of(optimizer: torch.optim.Optimizer) -> Mapping[object, object]:
    """An optimizer's state by parameter."""
    found = _attribute(optimizer, "state", {})
    return found if isinstance(found, Mapping) else {}


def _attribute(owner: object, name: str, otherwise: Any) -> Any:
    """An attribute of torch's, which a class of the user's may have made a property, or lack."""
    try:
        return getattr(owner, name)
    except Exception:
        return otherwise


#: A list of the types that optimizers update many at a time.
FOREACH_TYPES: Final = "torch.optim.optimizer._foreach_supported_types"
#: Returns the kinds of devices on which they do.
FOREACH_DEVICES: Final = "torch.optim.optimizer._get_foreach_kernels_supported_devices"
#: The same, asked by averages of weights.
AVERAGING_DEVICES: Final = "torch.optim.swa_utils._get_foreach_kernels_supported_devices"


def foreach_types() -> list[Any]:
    """The list behind `FOREACH_TYPES`, to be changed in place."""
    return _optimizer._foreach_supported_types
