"""Limits as they are typed: which keys there are, and what a size may be.

``owner`` is what the reader of a message typed them into: ``memory_budget``, ``measure``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from pytest_torchmem.values.errors import MarkerError, SizeError, TorchmemError, is_torchmem_error
from pytest_torchmem.values.findings import LIMIT_KEYS
from pytest_torchmem.values.json_values import shown
from pytest_torchmem.values.units import parse_size

# A user's mistake is reported at the user's line.
__tracebackhide__ = is_torchmem_error

Size: TypeAlias = int | str | Callable[[], int | str]
SizeByDevice: TypeAlias = Mapping[str, Size | None]
"""A size for each model or kind of device: ``{"NVIDIA H200": "40GiB", "cpu": None}``."""


def read_limits(owner: str, given: Mapping[str, object]) -> dict[str, Size | SizeByDevice]:
    """Return limits in the order in which they are reported; a None is left out.

    Raises `MarkerError` with a sentence about the first that cannot be used.
    """
    require_known(owner, given, LIMIT_KEYS)
    limits = {
        key: _read_limit(owner, key, value) for key, value in given.items() if value is not None
    }
    return {key: limits[key] for key in LIMIT_KEYS if key in limits}


def require_known(owner: str, given: Iterable[str], keys: tuple[str, ...]) -> None:
    """Raise `MarkerError` for the first name among ``given`` that is none of ``keys``."""
    for key in given:
        if key not in keys:
            import difflib  # only a user who mistyped pays for it

            near = difflib.get_close_matches(key, keys, 1)
            meant = f" (did you mean {near[0]!r}?)" if near else ""
            raise MarkerError(f"{owner} has no argument {key!r}{meant}; it takes {', '.join(keys)}")


def limits_on(
    owner: str, limits: Mapping[str, Size | SizeByDevice], names: Sequence[str]
) -> dict[str, Size]:
    """Return the limits of a device; those that it has not are left out.

    ``names`` are what the device is called, the closest first: its model, its kind. Raises
    `MarkerError` where limits are given by device and none of the keys is a name of this one.
    """
    found = {}
    for key, size in limits.items():
        chosen = _on_device(owner, key, size, names) if isinstance(size, Mapping) else size
        if chosen is not None:
            found[key] = chosen
    return found


def _on_device(owner: str, key: str, sizes: SizeByDevice, names: Sequence[str]) -> Size | None:
    for name in names:
        if name in sizes:
            return sizes[name]
    if not names:
        raise MarkerError(f"{owner}, {key}: a limit for each device is of no use here; give a size")
    raise MarkerError(
        f"{owner}, {key}: there is no limit for {' or '.join(map(repr, dict.fromkeys(names)))}, "
        f"only for {', '.join(map(repr, sizes))}; add one, or None for no limit there"
    )


def _read_limit(owner: str, key: str, value: object) -> Size | SizeByDevice:
    if not isinstance(value, Mapping):
        return read_size(owner, key, value)
    if not value or not all(isinstance(name, str) and name for name in value):
        raise MarkerError(
            f"{owner}, {key}: a limit for each device is a dictionary from the device's model or "
            f"kind to a size, such as {{'NVIDIA H200': '40GiB', 'cpu': '2GiB'}}; got {shown(value)}"
        )
    sizes = value.items()
    return {n: None if s is None else read_size(owner, f"{key}[{n!r}]", s) for n, s in sizes}


def read_size(owner: str, key: str, value: object) -> Size:
    """Return a limit, read unless it is computed later. Raises `MarkerError`."""
    if callable(value):
        return value
    try:
        return parse_size(value)
    except SizeError as error:
        raise MarkerError(f"{owner}, {key}: {error.sentence}") from None


def sizes_now(owner: str, limits: Mapping[str, Size]) -> dict[str, int]:
    """Return limits in bytes; callables are called. Raises `MarkerError` if one fails."""
    return {key: _size_now(owner, key, size) for key, size in limits.items()}


def _size_now(owner: str, key: str, size: Size) -> int:
    try:
        return parse_size(size() if callable(size) else size)
    except Exception as error:
        reason = error.sentence if isinstance(error, TorchmemError) else error
        raise MarkerError(
            f"{owner}, {key}: the limit could not be computed: {type(error).__name__}: {reason}"
        ) from error
