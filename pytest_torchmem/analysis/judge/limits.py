"""Limits as they are typed: which keys there are, and what a size may be.

``owner`` is what the reader of a message typed them into: ``memory_budget``, ``measure``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from pytest_torchmem.values.errors import MarkerError, SizeError, TorchmemError, is_torchmem_error
from pytest_torchmem.values.findings import LIMIT_KEYS
from pytest_torchmem.values.units import parse_size

# A user's mistake is reported at the user's line.
__tracebackhide__ = is_torchmem_error

Size: TypeAlias = int | str | Callable[[], int | str]


def read_limits(owner: str, given: Mapping[str, object]) -> dict[str, Size]:
    """Return limits in the order in which they are reported; a None is left out.

    Raises `MarkerError` with a sentence about the first that cannot be used.
    """
    require_known(owner, given, LIMIT_KEYS)
    limits = {
        key: read_size(owner, key, value) for key, value in given.items() if value is not None
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
