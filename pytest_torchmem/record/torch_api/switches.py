"""Torch's switches: what holds for all of a process or a thread, read and set again.

A switch that a release or a build lacks is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any, Final

import torch
from torch.nn.modules import module as _module
from torch.optim import optimizer as _optimizer
from torch.utils import _python_dispatch

from pytest_torchmem.record.torch_api import Checked

CHECKED: Final[Checked] = {
    "torch._C._autograd._pop_saved_tensors_default_hooks": ("2.6.0", "2.13.0"),
    "torch._C._autograd._top_saved_tensors_default_hooks": ("2.11.0", "2.15.0"),
    "torch._C._get_sdp_priority_order": ("2.7.0", "2.13.0"),
    "torch._C._is_multithreading_enabled": ("2.6.0", "2.13.0"),
    "torch._C._is_view_replay_enabled": ("2.6.0", "2.13.0"),
    "torch._C._len_torch_dispatch_stack": ("2.6.0", "2.13.0"),
    "torch._C._set_multithreading_enabled": ("2.6.0", "2.13.0"),
    "torch._C._set_sdp_priority_order": ("2.7.0", "2.13.0"),
    "torch._C._set_view_replay_enabled": ("2.6.0", "2.13.0"),
    "torch._GLOBAL_DEVICE_CONTEXT": ("2.6.0", "2.15.0"),
    "torch._dynamo.config": ("2.6.0", "2.13.0"),
    "torch._functorch.config": ("2.6.0", "2.13.0"),
    "torch._inductor.config": ("2.6.0", "2.13.0"),
    "torch.distributions.Distribution._validate_args": ("2.6.0", "2.13.0"),
    "torch.nn.modules.module._global_is_full_backward_hook": ("2.6.0", "2.13.0"),
    "torch.overrides._get_current_function_mode_stack": ("2.6.0", "2.13.0"),
    "torch.overrides._pop_mode": ("2.6.0", "2.13.0"),
    "torch.overrides._push_mode": ("2.6.0", "2.13.0"),
    "torch.utils._python_dispatch._pop_mode": ("2.6.0", "2.13.0"),
}

# Those of torch's old names come before the precisions, which they change, too.
_FUNCTIONS: Final = (
    ("get_num_threads", "set_num_threads"),
    ("is_warn_always_enabled", "set_warn_always"),
    ("is_autocast_cache_enabled", "set_autocast_cache_enabled"),
    ("get_float32_matmul_precision", "set_float32_matmul_precision"),
    ("_C._is_multithreading_enabled", "_C._set_multithreading_enabled"),
    ("_C._is_view_replay_enabled", "_C._set_view_replay_enabled"),
    ("_C._get_sdp_priority_order", "_C._set_sdp_priority_order"),
    ("backends.mha.get_fastpath_enabled", "backends.mha.set_fastpath_enabled"),
    ("backends.cuda.flash_sdp_enabled", "backends.cuda.enable_flash_sdp"),
    ("backends.cuda.mem_efficient_sdp_enabled", "backends.cuda.enable_mem_efficient_sdp"),
    ("backends.cuda.math_sdp_enabled", "backends.cuda.enable_math_sdp"),
    ("backends.cuda.cudnn_sdp_enabled", "backends.cuda.enable_cudnn_sdp"),
    (
        "backends.cuda.fp16_bf16_reduction_math_sdp_allowed",
        "backends.cuda.allow_fp16_bf16_reduction_math_sdp",
    ),
    ("backends.cuda.preferred_linalg_library", "backends.cuda.preferred_linalg_library"),
    ("backends.cuda.preferred_blas_library", "backends.cuda.preferred_blas_library"),
    (
        "__future__.get_overwrite_module_params_on_conversion",
        "__future__.set_overwrite_module_params_on_conversion",
    ),
    (
        "__future__.get_swap_module_params_on_conversion",
        "__future__.set_swap_module_params_on_conversion",
    ),
)
_ATTRIBUTES: Final = (
    # While it is False, the others cannot be set.
    "backends.__allow_nonbracketed_mutation_flag",
    "backends.cudnn.enabled",
    "backends.cudnn.benchmark",
    "backends.cudnn.deterministic",
    "backends.cudnn.allow_tf32",
    "backends.cuda.matmul.allow_tf32",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_fp16_accumulation",
    "backends.mkldnn.enabled",
    "backends.mkldnn.deterministic",
    "backends.mkldnn.allow_tf32",
    "backends.opt_einsum.enabled",
    "backends.opt_einsum.strategy",
    "backends.quantized.engine",
    "backends.fp32_precision",
    "backends.cuda.matmul.fp32_precision",
    "backends.cudnn.fp32_precision",
    "backends.cudnn.conv.fp32_precision",
    "backends.cudnn.rnn.fp32_precision",
    "backends.mkldnn.fp32_precision",
    "backends.mkldnn.conv.fp32_precision",
    "backends.mkldnn.matmul.fp32_precision",
    "backends.mkldnn.rnn.fp32_precision",
    "utils.deterministic.fill_uninitialized_memory",
    "distributions.Distribution._validate_args",
    "nn.modules.module._global_is_full_backward_hook",
)
_CONFIGS: Final = ("torch._dynamo.config", "torch._inductor.config", "torch._functorch.config")

_Read = Callable[[], object]
_Write = Callable[[Any], object]


def set_again() -> list[Callable[[], None]]:
    """Return functions that set what now holds again, where it holds no longer."""
    found: list[Callable[[], None]] = [_saving_hooks()]
    for read, write in _switches():
        # What its older and newer names say may not agree, which torch does not like.
        with suppress(Exception):
            found.append(partial(_set_again, read, write, read()))
    # Importing the compiler only to leave its options alone would take seconds.
    configs = (sys.modules[name] for name in _CONFIGS if name in sys.modules)
    with suppress(AttributeError):
        found += [partial(_configure_again, config, _options(config)) for config in configs]
    return [*found, *(partial(_fill_again, table, dict(table)) for table in _hook_tables())]


def modes_to_leave() -> Callable[[], None]:
    """Return what leaves the modes that were entered, and not left, since now.

    They could take whatever is called before that.
    """
    overriding: Any = torch.overrides
    stack = overriding._get_current_function_mode_stack()
    depth = torch._C._len_torch_dispatch_stack()

    def leave() -> None:
        while torch._C._len_torch_dispatch_stack() > depth:
            _python_dispatch._pop_mode()
        entered = [overriding._pop_mode() for _ in overriding._get_current_function_mode_stack()]
        for mode in reversed(entered):
            # The default device is a mode, too, and has a switch of its own.
            if mode in stack or type(mode).__name__ == "DeviceContext":
                overriding._push_mode(mode)

    return leave


def _switches() -> Iterator[tuple[_Read, _Write]]:
    for reads, writes in _FUNCTIONS:
        with suppress(AttributeError):
            yield attrgetter(reads)(torch), attrgetter(writes)(torch)
    for path in _ATTRIBUTES:
        owner, _, name = path.rpartition(".")
        with suppress(AttributeError):
            part = attrgetter(owner)(torch)
            yield partial(getattr, part, name), partial(setattr, part, name)


def _set_again(read: _Read, write: _Write, before: object) -> None:
    try:
        same = read() == before
    except Exception:
        same = False
    if not same:
        with suppress(Exception):
            write(before)


def _options(config: Any) -> dict[str, object]:
    found: dict[str, object] = config.get_config_copy()
    return found


def _configure_again(config: object, before: dict[str, object]) -> None:
    for name, now in _options(config).items():
        if now != before.get(name, now):
            setattr(config, name, before[name])


def _hook_tables() -> list[MutableMapping[Any, Any]]:
    """The hooks that torch calls for each module and each optimizer."""
    owners = (_module, _optimizer)
    inside = [value for o in owners for k, value in vars(o).items() if "global" in k]
    return [table for table in inside if isinstance(table, MutableMapping)]


def _fill_again(table: MutableMapping[Any, Any], before: dict[Any, object]) -> None:
    if dict(table) != before:
        table.clear()
        table.update(before)


def device_by_default() -> torch.device:
    """Return torch's own; torch 2.6 cannot tell once it was set to None, which is the CPU."""
    try:
        return torch.get_default_device()
    except AttributeError:
        return torch.device("cpu")


def let_be_default(device: torch.device) -> None:
    """Set it where it is another one now; the CPU is none, without a function mode."""
    if device_by_default() != device:
        is_cpu = device == torch.device("cpu")
        torch.set_default_device(None if is_cpu else device)
        if is_cpu:
            vars(getattr(torch, "_GLOBAL_DEVICE_CONTEXT")).clear()  # noqa: B009  # it has no stub


def _saving_hooks() -> Callable[[], None]:
    """Return what leaves the hooks on saved tensors that were entered, and not left, since now."""
    engine: Any = getattr(torch._C, "_autograd")  # noqa: B009  # for it has no stub
    ask = getattr(engine, "_top_saved_tensors_default_hooks", None)
    if ask is None:
        return lambda: None
    top = partial(ask, False)
    before = top()

    def leave() -> None:
        while (now := top()) is not None and now != before:
            engine._pop_saved_tensors_default_hooks()

    return leave
