"""Takes back what a program has put away while it ran on fake tensors.

A program keeps tensors where nobody gave them to it: a scaler its scale, a cache its masks, a log
its losses. After the run those are put back as they were, wherever a fake tensor or an unknown
number got into them.
"""

from __future__ import annotations

import contextlib
import gc
import random
import types
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from functools import lru_cache, partial
from typing import Final, TypeVar

import numpy as np
import torch

from pytest_torchmem.record.fake.stand_ins.unknown import UnknownNumber
from pytest_torchmem.record.fake.substitution import global_names
from pytest_torchmem.record.heap import instances_of
from pytest_torchmem.record.torch_api import fake_tensors

_Key = TypeVar("_Key")
_CACHE: Final = type(lru_cache(maxsize=1)(len))
# A container with more than that is data.
_MOST_LOOKED_AT: Final = 1000


@contextlib.contextmanager
def put_back(holders: Iterable[object], mode: fake_tensors.FakeTensorMode) -> Iterator[None]:
    """Leave the holders as they were, and no fake tensor of ``mode`` in any cache."""
    undo = [remembered for holder in holders for remembered in _remembered(holder)]
    switches = _switches()
    try:
        yield
    finally:
        for set_again in switches:
            set_again()
        for restore in undo:
            restore(mode)
        if _alive(mode):
            gc.collect()
            _let_go(mode)


def _switches() -> list[Callable[[], object]]:
    """Return functions that set again what holds for all of a process, or of this thread."""
    device, kinds = torch.get_default_device(), ("cpu", "cuda")
    casts = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]
    deterministic = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    set_again: list[Callable[[], object]] = [
        partial(torch.set_rng_state, torch.get_rng_state()),
        partial(random.setstate, random.getstate()),
        partial(np.random.set_state, np.random.get_state()),
        partial(_set_default_device, device),
        partial(torch.set_default_dtype, torch.get_default_dtype()),
        partial(torch.set_grad_enabled, torch.is_grad_enabled()),
        partial(torch.use_deterministic_algorithms, deterministic, warn_only=warns),
        partial(
            torch.set_anomaly_enabled,
            torch.is_anomaly_enabled(),
            torch.is_anomaly_check_nan_enabled(),
        ),
        *(partial(torch.set_autocast_enabled, kind, on) for kind, on, _ in casts),
        *(partial(torch.set_autocast_dtype, kind, dtype) for kind, _, dtype in casts),
        # Around an estimate casts may be on, and their cache holds fake weights.
        torch.clear_autocast_cache,
    ]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # as it is in torch
        states = torch.cuda.get_rng_state_all()
        set_again.append(partial(torch.cuda.set_rng_state_all, states))
    return set_again


def _set_default_device(device: torch.device) -> None:
    """Set it where it is another one now; None is the CPU, without a function mode."""
    if torch.get_default_device() != device:
        torch.set_default_device(None if device == torch.device("cpu") else device)


def _remembered(holder: object) -> Iterator[Callable[[fake_tensors.FakeTensorMode], None]]:
    """Yield for each container of a holder a function that restores it where fakes got into it."""
    if isinstance(holder, types.FunctionType):
        for cell in holder.__closure__ or ():
            with contextlib.suppress(ValueError):
                yield partial(_restore_cell, cell, cell.cell_contents)
        before = {name: holder.__globals__[name] for name in global_names(holder)}
        yield partial(_restore_names, holder.__globals__, before)
    elif isinstance(holder, list):
        yield partial(_restore_list, holder, list(holder))
    elif isinstance(holder, set):
        yield partial(_restore_set, holder, set(holder))
    elif isinstance(holder, MutableMapping):
        yield partial(_restore_mapping, holder, dict(holder))
    elif not isinstance(holder, type | types.ModuleType) and isinstance(
        getattr(holder, "__dict__", None), dict
    ):
        # What torch itself counts, as a learning rate's schedule, has not happened.
        always = type(holder).__module__.startswith("torch.")
        restore = _set_mapping if always else _restore_mapping
        yield partial(restore, holder.__dict__, dict(holder.__dict__))


def _is_ours(value: object, mode: fake_tensors.FakeTensorMode) -> bool:
    """Return whether a value, or one in it, was made by the run on fake tensors."""
    inner = [value]
    if isinstance(value, list | tuple | dict) and len(value) <= _MOST_LOOKED_AT:
        inner = fake_tensors.leaves(value)
    return any(
        isinstance(leaf, UnknownNumber)
        or (isinstance(leaf, fake_tensors.FakeTensor) and leaf.fake_mode is mode)
        for leaf in inner
    )


def _restore_cell(cell: types.CellType, before: object, mode: fake_tensors.FakeTensorMode) -> None:
    if cell.cell_contents is not before and _is_ours(cell.cell_contents, mode):
        cell.cell_contents = before


def _restore_names(
    names: dict[str, object], before: dict[str, object], mode: fake_tensors.FakeTensorMode
) -> None:
    for name, value in before.items():
        if names.get(name) is not value and _is_ours(names.get(name), mode):
            names[name] = value


def _restore_list(
    found: list[object], before: list[object], mode: fake_tensors.FakeTensorMode
) -> None:
    if any(_is_ours(value, mode) for value in found):
        found[:] = before


def _restore_set(
    found: set[object], before: set[object], mode: fake_tensors.FakeTensorMode
) -> None:
    if any(_is_ours(value, mode) for value in found):
        found.clear()
        found.update(before)


def _restore_mapping(
    found: MutableMapping[_Key, object],
    before: dict[_Key, object],
    mode: fake_tensors.FakeTensorMode,
) -> None:
    if any(_is_ours(value, mode) for value in found.values()):
        _set_mapping(found, before, mode)


def _set_mapping(
    found: MutableMapping[_Key, object],
    before: dict[_Key, object],
    _: fake_tensors.FakeTensorMode,
) -> None:
    found.clear()
    found.update(before)


def _alive(mode: fake_tensors.FakeTensorMode) -> list[fake_tensors.FakeTensor]:
    """Return the fake tensors of a mode that somebody still holds."""
    return [fake for fake in instances_of([fake_tensors.FakeTensor]) if fake.fake_mode is mode]


def _let_go(mode: fake_tensors.FakeTensorMode) -> None:
    """Empty the caches that hold fake tensors, and take them out of containers nobody reached."""
    found = _alive(mode)
    for fake in found:
        for holder in gc.get_referrers(fake):
            if holder is found:
                continue
            _drop(holder, fake)
            if isinstance(holder, tuple):
                for outer in gc.get_referrers(holder):
                    _drop(outer, holder)


def _drop(holder: object, value: object) -> None:
    if isinstance(holder, _CACHE):
        holder.cache_clear()
    elif isinstance(holder, dict):
        for key in [key for key, held in holder.items() if held is value]:
            del holder[key]
    elif isinstance(holder, list):
        holder[:] = [held for held in holder if held is not value]
