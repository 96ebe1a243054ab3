"""Takes back what a program has put away while it ran on fake tensors.

A program keeps tensors where nobody gave them to it: a scaler its scale, a cache its masks, a log
its losses, a buffer for replay its steps and their count. After the run those are put back as they
were: lists, queues and sets always, names and attributes where a fake tensor, a number or another
plain value got into them. What a program registers for good, a class or a function, stays.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import operator
import os
import random
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final, TypeVar

import numpy as np
import torch

from pytest_torchmem.contexts import gc_paused
from pytest_torchmem.record.fake.stand_ins.unknown import UnknownNumber
from pytest_torchmem.record.fake.substitution import global_names, refers_to, refill
from pytest_torchmem.record.owners.live_objects import collections_so_far, instances_since
from pytest_torchmem.record.torch_api import fake_tensors, switches
from pytest_torchmem.record.torch_api.modules import OWN_ATTRIBUTES

_Key = TypeVar("_Key")
_CACHE: Final = type(lru_cache(maxsize=1)(len))
# A container with more than that is data.
_MOST_LOOKED_AT: Final = 1000
_PLAIN: Final = (int, float, complex, str, bytes, np.generic, np.ndarray, torch.Tensor)
# A larger array of numpy is a set of data, which a program reads.
_MOST_COPIED_BYTES: Final = 1 << 26
# These can go back, as long as they have not come to their end.
_ITERATORS: Final[tuple[type, ...]] = (
    type(iter([])),
    type(iter(())),
    type(iter(range(0))),
    type(iter(range(1 << 64))),
    type(reversed([])),
)
# As deep as modules' own containers and the functions of their hooks may be nested.
_MAX_DEPTH: Final = 4
_Restore = Callable[[], object]


def held_by_modules(roots: Iterable[torch.nn.Module]) -> list[object]:
    """Return what modules hold beside tensors and children: lists, objects, hooks' functions."""
    of_all = {id(module): module for root in roots for module in root.modules()}
    waiting = [
        (value, 0)
        for module in of_all.values()
        for name, value in vars(module).items()
        if name not in OWN_ATTRIBUTES and value is not None
    ]
    found: dict[int, object] = {}
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, torch.nn.Module | torch.optim.Optimizer) or id(value) in found:
            continue
        found[id(value)] = value
        if depth < _MAX_DEPTH:
            waiting += [(inner, depth + 1) for _, inner in refers_to(value)]
    return list(found.values())


@contextlib.contextmanager
def put_back(holders: Iterable[object], mode: fake_tensors.FakeTensorMode) -> Iterator[None]:
    """Leave the holders and torch's switches as they were, and no fake of ``mode`` in any cache."""
    # Without collections, what was made is young, and to find it takes no look at everything.
    with gc_paused():
        seen = collections_so_far()
        undo = [*_switches(), *(put for holder in holders for put in _remembered(holder, mode))]
        try:
            yield
        finally:
            for restore in undo:
                restore()
            left = [weakref.ref(fake) for fake in _alive(mode, seen)]
            if left:
                # What the run made is young, and most of it is garbage.
                gc.collect(1)
            if any(reference() is not None for reference in left):
                gc.collect()
                _let_go(mode)


def _switches() -> list[_Restore]:
    """Return functions that set again what holds for all of a process, or of this thread."""
    device, kinds = switches.device_by_default(), ("cpu", "cuda")
    casts = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]
    deterministic = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    set_again: list[_Restore] = [
        *switches.set_again(),
        partial(torch.set_rng_state, torch.get_rng_state()),
        partial(random.setstate, random.getstate()),
        partial(np.random.set_state, np.random.get_state()),
        partial(switches.let_be_default, device),
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
        partial(_leave_casts, _nesting_of_casts()),
        # Around an estimate casts may be on, and their cache holds fake weights.
        torch.clear_autocast_cache,
        partial(_restore_plain, os.environ, dict(os.environ)),
        partial(_warn_again, list(warnings.filters), warnings.showwarning),
        partial(np.seterr, **np.geterr()),
        partial(sys.setrecursionlimit, sys.getrecursionlimit()),
        gc.enable if gc.isenabled() else gc.disable,
    ]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # as it is in torch
        states = torch.cuda.get_rng_state_all()
        set_again.append(partial(torch.cuda.set_rng_state_all, states))
    return set_again


def _warn_again(filters: list[Any], show: Any) -> None:
    if warnings.filters != filters:
        # Leaving the block tells Python that they have changed.
        with warnings.catch_warnings():
            pass
        warnings.filters[:] = filters  # type: ignore[index]  # it is a list
    warnings.showwarning = show


def _nesting_of_casts() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _leave_casts(nesting: int) -> None:
    while _nesting_of_casts() > nesting:
        torch.autocast_decrement_nesting()


def _remembered(holder: Any, mode: fake_tensors.FakeTensorMode) -> Iterator[_Restore]:
    """Yield for each container of a holder a function that restores it."""
    if isinstance(holder, types.FunctionType):
        for cell in holder.__closure__ or ():
            with contextlib.suppress(ValueError):
                yield partial(_restore_cell, cell, cell.cell_contents, mode)
        before = {name: holder.__globals__[name] for name in global_names(holder)}
        yield partial(_restore_names, holder.__globals__, before, mode)
    elif isinstance(holder, list):
        put = partial(operator.setitem, holder, slice(None))
        yield partial(_restore_ordered, holder, list(holder), put)
    elif isinstance(holder, set):
        yield partial(_restore_ordered, holder, list(holder), holder.update)
    elif isinstance(holder, collections.deque):
        yield partial(_restore_ordered, holder, list(holder), holder.extend)
    elif isinstance(holder, MutableMapping):
        yield partial(_restore_mapping, holder, dict(holder), mode)
    elif isinstance(holder, torch.Generator):
        yield partial(holder.set_state, holder.get_state())
    elif isinstance(holder, random.Random):
        yield partial(holder.setstate, holder.getstate())
    elif isinstance(holder, np.random.RandomState):
        yield partial(holder.set_state, holder.get_state())
    elif isinstance(holder, np.random.Generator):
        yield partial(setattr, holder.bit_generator, "state", holder.bit_generator.state)
    elif isinstance(holder, _ITERATORS):
        yield partial(operator.attrgetter("__setstate__")(holder), *holder.__reduce__()[2:] or [0])
    elif isinstance(holder, np.ndarray):
        if holder.flags.writeable and holder.nbytes <= _MOST_COPIED_BYTES:
            yield partial(operator.setitem, holder, ..., holder.copy())
    elif not isinstance(holder, type | types.ModuleType) and isinstance(
        getattr(holder, "__dict__", None), dict
    ):
        kept, before = holder.__dict__, dict(holder.__dict__)
        # What torch itself counts, as a learning rate's schedule, has not happened.
        always = type(holder).__module__.startswith("torch.")
        restore = partial(refill) if always else partial(_restore_mapping, mode=mode)
        yield partial(restore, kept, before)


def _comes_back(now: object, before: object, mode: fake_tensors.FakeTensorMode) -> bool:
    """Return whether a fake tensor or data has taken the place of a value."""
    return now is not before and (_is_ours(now, mode) or _is_plain(now))


def _is_ours(value: object, mode: fake_tensors.FakeTensorMode) -> bool:
    """Return whether a value, or one in it, was made by the run on fake tensors."""
    return any(
        isinstance(leaf, UnknownNumber)
        or (isinstance(leaf, fake_tensors.FakeTensor) and leaf.fake_mode is mode)
        for leaf in _parts(value)
    )


def _is_plain(value: object) -> bool:
    """Return whether a value is data: a program counts with it, and nobody registers it."""
    return all(leaf is None or isinstance(leaf, _PLAIN) for leaf in _parts(value))


def _parts(value: object) -> list[object]:
    small = isinstance(value, list | tuple | dict) and len(value) <= _MOST_LOOKED_AT
    return fake_tensors.leaves(value) if small else [value]


def _restore_cell(cell: types.CellType, before: object, mode: fake_tensors.FakeTensorMode) -> None:
    try:
        comes_back = _comes_back(cell.cell_contents, before, mode)
    except ValueError:  # it is empty
        comes_back = True
    if comes_back:
        cell.cell_contents = before


def _restore_names(
    names: dict[str, object], before: dict[str, object], mode: fake_tensors.FakeTensorMode
) -> None:
    for name, value in before.items():
        if _comes_back(names.get(name), value, mode):
            names[name] = value


def _restore_ordered(
    found: list[object] | set[object] | collections.deque[object],
    before: list[object],
    put: Callable[[list[object]], None],
) -> None:
    if len(found) != len(before) or not all(map(operator.is_, found, before)):
        found.clear()
        put(before)


def _restore_mapping(
    found: MutableMapping[_Key, Any], before: dict[_Key, Any], mode: fake_tensors.FakeTensorMode
) -> None:
    if any(_is_ours(value, mode) for value in found.values()):
        refill(found, before)
    else:
        _restore_plain(found, before)


def _restore_plain(found: MutableMapping[_Key, Any], before: dict[_Key, object]) -> None:
    """Put plain values back, and take those out that came."""
    for key, now in list(found.items()):
        if now is not before.get(key, found) and _is_plain(now):
            if key in before:
                found[key] = before[key]
            else:
                del found[key]
    for key in before.keys() - found.keys():
        found[key] = before[key]


def _alive(
    mode: fake_tensors.FakeTensorMode, seen: tuple[int, ...] = ()
) -> list[fake_tensors.FakeTensor]:
    """Return the fake tensors of a mode that somebody still holds, made since then or whenever."""
    fakes = instances_since(seen, fake_tensors.FakeTensor)
    return [fake for fake in fakes if fake.fake_mode is mode]


def _let_go(mode: fake_tensors.FakeTensorMode) -> None:
    """Empty the caches that hold fake tensors, and take them out of containers nobody reached."""
    found = _alive(mode)
    # To ask who refers to some things is a look at everything.
    holders = gc.get_referrers(*found) if found else []
    tuples = [holder for holder in holders if isinstance(holder, tuple)]
    outer = gc.get_referrers(*tuples) if tuples else []
    for holder in holders:
        if holder is not found:
            _drop(holder, found)
    for holder in outer:
        if holder is not tuples and holder is not holders:
            _drop(holder, tuples)


def _drop(holder: object, values: Sequence[object]) -> None:
    dropped = set(map(id, values))
    if isinstance(holder, _CACHE):
        holder.cache_clear()
    elif isinstance(holder, dict):
        # A class of the program's may refuse, as outputs of models do.
        with contextlib.suppress(Exception):
            for key in [key for key, held in holder.items() if id(held) in dropped]:
                del holder[key]
    elif isinstance(holder, list):
        holder[:] = [held for held in holder if id(held) not in dropped]
