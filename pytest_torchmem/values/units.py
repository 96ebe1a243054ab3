"""Bytes and devices as users write them. The only module that knows what a KiB is."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Final, Protocol, TypeAlias

from pytest_torchmem.values.errors import (
    DeviceError,
    MarkerError,
    SizeError,
    is_torchmem_error,
)
from pytest_torchmem.values.json_values import LARGEST, shown

__tracebackhide__ = is_torchmem_error

KiB: Final = 1024
MiB: Final = 1024 * KiB
GiB: Final = 1024 * MiB

_FACTORS: Final = {
    "b": 1,
    "kib": KiB,
    "mib": MiB,
    "gib": GiB,
    "tib": 1024 * GiB,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
MOST_RUNS: Final = 1_000_000
_MOST_DIGITS: Final = 32
_LARGEST_FRACTION: Final = 1000.0

_TOO_MANY_TIMES: Final = 1000
_ONE_DIGIT: Final = 0.0095

# The CPU has one memory, whatever number torch gives it.
_CPU: Final = re.compile(r"cpu(:\d+)?")
_SIZE = re.compile(r"\s*(\d+(?:_\d+)*(?:\.\d+)?)\s*((?:[kmgt]i?)?b)\s*", re.IGNORECASE)
_PERCENT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")
_FLOOR = re.compile(r"\s*(\S+\s*%)\s+up\s+to\s+(.*)", re.IGNORECASE)
_FRACTION = re.compile(r"\s*(0|0?\.\d+)\s*")


def is_run_count(value: object, least: int) -> bool:
    """Return whether a value is a number of runs or steps, from ``least`` to `MOST_RUNS`."""
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    return least <= value <= MOST_RUNS


def parse_size(value: object) -> int:
    """Return ``value`` as a whole number of bytes.

    ``value`` is an ``int`` in bytes, or text with a unit: ``"2GiB"`` counts in 1024s, ``"2GB"`` in
    1000s. A fraction of a byte is dropped. Raises `SizeError` for anything else, a bare number in
    text and a negative one included.
    """
    # Numpy's integers are such numbers, too.
    if isinstance(value, Integral) and not isinstance(value, bool):
        if value < 0:
            raise SizeError(f"a size cannot be negative, got {shown(value)}")
        return _possible(int(value), value)
    if isinstance(value, str) and (match := _SIZE.fullmatch(value)):
        number, unit = match.groups()
        if len(number) > _MOST_DIGITS:
            raise SizeError(f"a number of {len(number)} digits is more than any machine has")
        if unit.endswith("b") and unit[0].isupper():
            prefix = unit[0]
            raise SizeError(
                f"{shown(value)} reads as bits; did you mean '{number}{prefix}iB', which counts in "
                f"1024s, or '{number}{prefix}B' in 1000s?"
            )
        factor = _FACTORS[unit.lower()]
        if "." not in number:
            return _possible(int(number) * factor, value)
        size_bytes = _possible(int(float(number) * factor), value)
        if not size_bytes and float(number):
            raise SizeError(f"{shown(value)} is less than a byte")
        return size_bytes
    raise SizeError(
        f"cannot read {shown(value)} as a size; give an int in bytes or text such as '64MiB' or "
        "'2GB'"
    )


def _possible(size_bytes: int, value: object) -> int:
    """Return a size that a machine can have. Raises `SizeError` for a larger one."""
    if size_bytes > LARGEST:
        raise SizeError(f"{shown(value)} is more than any machine has; for no limit, give None")
    return size_bytes


def reads_as_size(text: str) -> bool:
    """Return whether a text is a size: ``"64MiB"`` is, ``"64"`` and ``"forward"`` are not."""
    return _SIZE.fullmatch(text) is not None


def parse_fraction(value: object) -> float:
    """Return a tolerance as a fraction: ``"2%"``, ``"0.02"`` and ``0.02`` are all 0.02.

    Raises `SizeError` for a negative number and for anything that is neither.
    """
    if isinstance(value, str) and (match := _PERCENT.fullmatch(value)):
        fraction = float(match.group(1)) / 100
        if not fraction < _LARGEST_FRACTION:
            raise SizeError(f"a tolerance is less than {_LARGEST_FRACTION:.0%}")
        return fraction
    if isinstance(value, str) and (match := _FRACTION.fullmatch(value)):
        return float(match.group(1))
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1:
        return float(value)
    text = value.strip() if isinstance(value, str) else shown(value)
    if _PERCENT.fullmatch(f"{text}%"):
        raise SizeError(
            f"cannot read {shown(value)} as a tolerance; percent need the sign: '{text}%', and a "
            "fraction such as 0.02 is less than 1"
        )
    raise SizeError(
        f"cannot read {shown(value)} as a tolerance; give text such as '2%' or a fraction such as "
        "0.02"
    )


def parse_floor(value: object) -> tuple[int, float]:
    """Return a floor as bytes, and the share of a test's peak that it cannot exceed.

    ``"1MiB"`` holds for every test; ``"5% up to 1MiB"`` is less for those with a peak under 20 MiB.
    Raises `SizeError`.
    """
    if isinstance(value, str) and (match := _FLOOR.fullmatch(value)):
        return parse_size(match.group(2)), parse_fraction(match.group(1))
    if isinstance(value, str) and "%" in value:
        raise SizeError(
            f"cannot read {shown(value)} as a floor; give a size such as '1MiB', or a share with "
            "one: '5% up to 1MiB'"
        )
    return parse_size(value), math.inf


# Each unit with the smallest size that is told in it: 1023.96 KiB would round to "1024.0 KiB",
# which reads as a larger unit.
_SHOWN_IN: Final = tuple(
    (name, factor, -(-factor * 102395 // 102400))
    for name, factor in (("TiB", 1024 * GiB), ("GiB", GiB), ("MiB", MiB), ("KiB", KiB))
)


def format_size(size_bytes: int) -> str:
    """Return a size for people: ``214.1 MiB``; below one KiB the exact ``17 B``."""
    magnitude = abs(size_bytes)
    for name, factor, smallest in _SHOWN_IN:
        if magnitude >= smallest:
            return f"{size_bytes / factor:.1f} {name}"
    return f"{size_bytes} B"


def format_time(time_ns: float) -> str:
    """Return a time for people: ``12.345 ms``."""
    for name, factor in (("s", 1e9), ("ms", 1e6)):
        if abs(time_ns) >= factor:
            return f"{time_ns / factor:.3f} {name}"
    return f"{time_ns / 1e3:.3f} us"


def format_apart(*sizes: int) -> tuple[str, ...]:
    """Return sizes for people so that no two different ones read the same.

    1024 MiB and 1036 MiB both round to ``1.0 GiB``; they come back as ``1024.0 MiB`` and
    ``1036.0 MiB``, and sizes one byte apart as exact bytes.
    """
    texts = tuple(format_size(size) for size in sizes)
    for name, factor in (("MiB", MiB), ("KiB", KiB), ("B", 1)):
        if len(set(texts)) == len(set(sizes)):
            return texts
        digits = 1 if factor > 1 else 0
        texts = tuple(f"{size / factor:.{digits}f} {name}" for size in sizes)
    return texts


def between(what: str, least_bytes: int, most_bytes: int) -> str:
    """Return an interval as a sentence has it: ``the peak is between 1.0 MiB and 9.0 MiB``."""
    least, most = format_apart(least_bytes, most_bytes)
    return f"the {what} is between {least} and {most}"


def listed(names: Sequence[str]) -> str:
    """Return names as a sentence has them: ``cuDNN, cuFFT and cuSOLVER``."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def format_change(size_bytes: int) -> str:
    """Return a size with its sign: ``+32.0 MiB``, ``-4 B``, ``+0 B``."""
    return ("+" if size_bytes >= 0 else "") + format_size(size_bytes)


def format_parts(parts: Mapping[str, int], whole_bytes: int) -> str:
    """Return the parts of a size in its unit: ``temporary 8.0, activation 2.0`` of 10.0 MiB.

    A part that would read as 0.0 has its own unit.
    """
    name, factor = next(((n, f) for n, f, least in _SHOWN_IN if abs(whole_bytes) >= least), ("", 1))
    digits = 1 if name else 0
    told = (
        f"{part} {size / factor:.{digits}f}"
        if abs(size) * 20 >= factor
        else f"{part} {format_size(size)}"
        for part, size in parts.items()
    )
    return ", ".join(told)


def format_share(change_bytes: int, whole_bytes: int) -> str:
    """Return a change as a share of what it changes: ``+30 %``.

    A share of next to nothing, or next to no share, is not worth a word: ``""``.
    """
    if not whole_bytes or change_bytes > _TOO_MANY_TIMES * whole_bytes:
        return ""
    share = change_bytes / whole_bytes
    text = f"{share:+,.{0 if abs(share) >= _ONE_DIGIT else 1}%}"
    return "" if text[1:] == "0.0%" else text.replace("%", " %")


def counted(number: int, what: str) -> str:
    """Return ``1 entry``, ``3 entries``."""
    many = f"{what[:-1]}ies" if what.endswith("y") else f"{what}s"
    return f"{number} {what if number == 1 else many}"


class TorchDevice(Protocol):
    """The part of a ``torch.device`` that says which one it is."""

    @property
    def type(self) -> str: ...


#: A device as users name it.
Device: TypeAlias = str | TorchDevice


def device_text(device: object) -> str:
    """Return the name of a device as this package writes it: ``cpu``, ``cuda``, ``cuda:1``.

    ``device`` is text, in capitals or not, or a ``torch.device``. Raises `MarkerError` for anything
    else. Whether there is such a device is another question.
    """
    if not isinstance(device, str) and type(device).__module__ != "torch":
        raise MarkerError(f"device: {shown(device)} is not a device; give text such as 'cuda:1'")
    name = str(device).strip().lower()
    return "cpu" if _CPU.fullmatch(name) else name


def resolve_device(device: object, there: Sequence[str], place: str) -> str:
    """Return which of the devices that are ``there`` a name means.

    A kind without a number means the one device of that kind. Raises `DeviceError` where it means
    none or several, and says which there are; ``place`` is where: ``the trace``.
    """
    name = device_text(device)
    matches = [one for one in there if name in (one, one.partition(":")[0])]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise DeviceError(f"{place} has {len(matches)} devices called {name}: {', '.join(matches)}")
    present = ", ".join(there) or "none"
    raise DeviceError(f"{place} has no memory on {name!r}; it has: {present}")


_CONTROL: Final = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Characters that tell a terminal to do something, or turn the order of others around, and halves
of characters, which it cannot show."""


def printable(name: str) -> str:
    """Return a name of a program in which control characters are their escapes."""
    if name.isprintable():
        return name
    return _CONTROL.sub(lambda found: repr(found.group())[1:-1], name)


def one_line(text: str) -> str:
    """Return text on one line; control characters become their escapes."""
    return text if text.isprintable() else printable(" ".join(text.splitlines()))
