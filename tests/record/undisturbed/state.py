"""Everything that a measurement might leave changed in a process, as values to compare."""

from __future__ import annotations

import contextvars
import decimal
import gc
import locale
import logging
import os
import pkgutil
import random
import signal
import sys
import threading
import types
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from pytest_torchmem.record.heap import frozen_count
from pytest_torchmem.record.patches import PATCHES, How
from pytest_torchmem.record.torch_api import compiler, profiler

#: Modules that a measurement may import, and packages of which it may import any.
IMPORTED_BY_US = ("pytest_torchmem", "faulthandler", "ctypes", "numpy")


def state() -> dict[str, object]:
    """Everything in Python and torch that is the same before a measurement and after it."""
    return {**_of_python(), **_of_the_process(), **_of_torch(), **_patched(), **_random_numbers()}


def _of_python() -> dict[str, object]:
    monitoring = getattr(sys, "monitoring", None)
    return {
        "profile and trace functions": (
            sys.getprofile(),
            sys.gettrace(),
            threading.getprofile(),
            threading.gettrace(),
        ),
        "calls are heard": hears_calls(),
        "monitoring": [monitoring.get_tool(n) for n in range(6)] if monitoring else None,
        # Not the few objects that Python 3.12 itself has frozen: a measurement thaws them.
        "collector": (gc.isenabled(), gc.get_threshold(), frozen_count(), gc.get_debug()),
        "collector's callbacks": tuple(map(id, gc.callbacks)),
        "hooks": (
            sys.excepthook,
            sys.unraisablehook,
            sys.displayhook,
            sys.breakpointhook,
            threading.excepthook,
            sys.getrecursionlimit(),
            sys.getswitchinterval(),
            sys.get_asyncgen_hooks(),
        ),
        "imports": (tuple(sys.path), tuple(sys.meta_path), tuple(sys.path_hooks)),
        "modules": _modules(),
        "warnings": (tuple(map(str, warnings.filters)), warnings.showwarning),
        "streams": (sys.stdin, sys.stdout, sys.stderr),
        # Settings of the compiler are made anew with each `torch._dynamo.config.patch`.
        "variables of contexts": {
            variable.name: repr(value)
            for variable, value in contextvars.copy_context().items()
            if not variable.name.startswith("torch._")
        },
        "decimals": repr(decimal.getcontext()),
        "logging": [
            (name, logger.level, tuple(logger.handlers), logger.disabled)
            for name, logger in sorted(_loggers().items())
        ],
    }


def hears_calls() -> bool:
    """Return whether a profile function is called: a pause that nobody ends would last for good."""
    heard: list[str] = []
    before = sys.getprofile()
    sys.setprofile(lambda _frame, event, _argument: heard.append(event))
    try:
        len(heard)
    finally:
        sys.setprofile(before)
    return bool(heard)


def _loggers() -> Mapping[str, logging.Logger]:
    found = {
        name: logger
        for name, logger in logging.root.manager.loggerDict.items()
        if isinstance(logger, logging.Logger)
    }
    return {"": logging.root, **found}


def _modules() -> frozenset[str]:
    return frozenset(n for n in sys.modules if n.partition(".")[0] not in IMPORTED_BY_US)


def _of_the_process() -> dict[str, object]:
    signals = [s for s in signal.valid_signals() if s not in (signal.SIGKILL, signal.SIGSTOP)]
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "file descriptors": _descriptors(),
        "signals": {int(s): signal.getsignal(s) for s in signals},
        "signals held back": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "timers": [signal.getitimer(n)[1] for n in (signal.ITIMER_REAL, signal.ITIMER_PROF)],
        "environment": dict(os.environ),
        "folder": Path.cwd(),
        "locale": locale.setlocale(locale.LC_ALL),
        "mask of files": _mask(),
    }


def _mask() -> int:
    mask = os.umask(0o22)
    os.umask(mask)
    return mask


def _descriptors() -> object:
    folder = Path("/proc/self/fd")
    if not folder.is_dir():
        return None
    links = (_link(folder / name) for name in os.listdir(folder))  # noqa: PTH208
    return sorted(link for link in links if "/proc/" not in link)


def _link(path: Path) -> str:
    try:
        return os.readlink(path)  # noqa: PTH115
    except OSError:  # the one of the listing itself
        return "/proc/"


def _of_torch() -> dict[str, object]:
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    handler = compiler.callbacks()
    return {
        "modes": (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_anomaly_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
            torch.get_default_dtype(),
            torch.empty(0).device,
            torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(),
            torch.get_num_threads(),
            torch.is_warn_always_enabled(),
            torch.__future__.get_swap_module_params_on_conversion(),
            torch._C._is_multithreading_enabled(),
        ),
        "hooks for saved tensors": top(True) if top else None,
        "stacks of modes": (
            len(_get_current_dispatch_mode_stack()),
            torch._C._len_torch_function_stack(),
            torch._C._functorch.maybe_current_level(),
        ),
        "profiler": profiler.profiler_is_active(),
        "compiler": handler
        and (tuple(map(id, handler.start_callbacks)), tuple(map(id, handler.end_callbacks))),
        "compiled": counts(),
    }


def counts() -> dict[str, object]:
    """Dynamo's counts of graphs and frames, and of how often it had to break off."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return {
        **{kind: dict(counters.get(kind, {})) for kind in ("stats", "frames")},
        # The reasons have numbers in them that go up with each hook of anybody's.
        **{kind: sum(counters.get(kind, {}).values()) for kind in ("graph_break", "recompiles")},
    }


def _patched() -> dict[str, object]:
    """What stands under each name of the table of patches, and in the tables of global hooks."""
    found: dict[str, object] = {}
    for patch in PATCHES:
        where, _, attribute = patch.name.rpartition(".")
        if patch.how is How.REPLACED and _is_there(where):
            found[patch.name] = id(vars(pkgutil.resolve_name(where)).get(attribute))
    for place in ("torch.nn.modules.module", "torch.optim.optimizer"):
        for name, value in vars(sys.modules[place]).items():
            if name.startswith("_global_") and isinstance(value, dict):
                found[f"{place}.{name}"] = tuple(map(id, value.values()))
    return found


def _is_there(where: str) -> bool:
    """Return whether a name can be looked up without an import."""
    return not {where, where.rpartition(".")[0]}.isdisjoint(sys.modules)


def _random_numbers() -> dict[str, object]:
    return {
        "random": random.getstate(),
        "numpy": frozen(np.random.get_state()),
        "torch": frozen(torch.get_rng_state()),
    }


def seed() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def frozen(value: Any) -> Any:
    """Return what a program returns as something that can be compared, bit for bit."""
    if isinstance(value, torch.Tensor):
        return _frozen_tensor(value)
    if isinstance(value, np.ndarray):
        return "array", str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, BaseException):
        return type(value), str(value)
    if isinstance(value, Mapping):
        return [(key, frozen(part)) for key, part in value.items()]
    if isinstance(value, (list, tuple, types.GeneratorType)):
        return [frozen(part) for part in value]
    if isinstance(value, float):
        return repr(value)
    return value


def _frozen_tensor(tensor: torch.Tensor) -> object:
    facts = (str(tensor.dtype), str(tensor.layout), tensor.requires_grad, tensor.is_leaf)
    if tensor.is_nested:
        return *facts, [frozen(part) for part in tensor.unbind()]
    if tensor.device.type == "meta":
        return *facts, tuple(tensor.shape)
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    strides = tuple(tensor.stride())
    return *facts, tuple(tensor.shape), strides, plain.view(-1).view(torch.uint8).tolist()


Program = Callable[[], object]
#: Makes each program by name, outside of what is measured.
PROGRAMS: dict[str, Callable[[], Program]] = {}
#: The names of those that take long.
NIGHTLY: set[str] = set()


def prepared(make: Callable[[], Program]) -> Callable[[], Program]:
    """Enter a function into `PROGRAMS` that returns a program, made before the body."""
    assert make.__name__ not in PROGRAMS
    PROGRAMS[make.__name__] = make
    return make


def program(function: Program) -> Program:
    """Enter a program into `PROGRAMS`."""

    def make() -> Program:
        return function

    make.__name__ = function.__name__
    prepared(make)
    return function


def nightly(function: Any) -> Any:
    NIGHTLY.add(function.__name__)
    return function


def ended(
    name: str,
    run: Callable[[Program], object],
    programs: Mapping[str, Callable[[], Program]] = PROGRAMS,
) -> tuple[object, dict[str, object]]:
    """Have ``run`` run a program; return what that returned or raised, and the state it left."""
    found: list[object] = []

    def body() -> None:
        try:
            found.append(frozen(made()))
        except Exception as error:
            found.append(frozen(error))

    if "compiled" in name:
        torch.compiler.reset()
        sys.modules["torch._dynamo.utils"].counters.clear()
    seed()
    made = programs[name]()
    seed()
    run(body)
    return found[0], state()
