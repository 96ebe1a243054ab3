"""Takes back what a program has put away while it ran on fake tensors.

A program keeps tensors where nobody gave them to it: a scaler its scale, a cache its masks, a log
its losses. After the run those are put back as they were, wherever a fake tensor or an unknown
number got into them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import types
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Final, TypeVar

from pytest_torchmem.record.fake.stand_ins.unknown import UnknownNumber
from pytest_torchmem.record.fake.substitution import global_names
from pytest_torchmem.record.heap import instances_of
from pytest_torchmem.record.torch_api import fake_tensors

_Key = TypeVar("_Key")
_CACHE: Final = type(functools.lru_cache(maxsize=1)(len))
# A container with more than that is data.
_MOST_LOOKED_AT: Final = 1000


@contextlib.contextmanager
def put_back(holders: Iterable[object], mode: fake_tensors.FakeTensorMode) -> Iterator[None]:
    """Leave the holders as they were, and no fake tensor of ``mode`` in any cache."""
    undo = [remembered for holder in holders for remembered in _remembered(holder)]
    try:
        yield
    finally:
        for restore in undo:
            restore(mode)
        if _alive(mode):
            gc.collect()
            _let_go(mode)


def _remembered(holder: object) -> Iterator[Callable[[fake_tensors.FakeTensorMode], None]]:
    """Yield for each container of a holder a function that restores it where fakes got into it."""
    if isinstance(holder, types.FunctionType):
        for cell in holder.__closure__ or ():
            with contextlib.suppress(ValueError):
                yield functools.partial(_restore_cell, cell, cell.cell_contents)
        before = {name: holder.__globals__[name] for name in global_names(holder)}
        yield functools.partial(_restore_names, holder.__globals__, before)
    elif isinstance(holder, list):
        yield functools.partial(_restore_list, holder, list(holder))
    elif isinstance(holder, set):
        yield functools.partial(_restore_set, holder, set(holder))
    elif isinstance(holder, MutableMapping):
        yield functools.partial(_restore_mapping, holder, dict(holder))
    elif not isinstance(holder, type | types.ModuleType) and isinstance(
        getattr(holder, "__dict__", None), dict
    ):
        yield functools.partial(_restore_mapping, holder.__dict__, dict(holder.__dict__))


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
