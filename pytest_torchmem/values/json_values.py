"""JSON of our values: written, parsed, checked value by value, and told where it is damaged.

A file of results or of baselines may come from a stranger's pull request. So nothing in it is
taken for what it should be, and no number in it decides how much memory is allocated.
"""

from __future__ import annotations

import enum
import errno
import functools
import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import (
    Any,
    BinaryIO,
    Final,
    NoReturn,
    TypeAlias,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

#: A value of a JSON document. Nobody knows which kind it is until a reader has checked it.
Json: TypeAlias = Any

WRONG: Final = (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError)
"""The exceptions that reading a value of another shape raises."""

MOST_BYTES: Final = 1 << 30
"""The largest text that is read: a hundred times a run of ten thousand tests with baselines."""

_PART_BYTES: Final = 1 << 20

LARGEST: Final = 1 << 62
"""No machine has so many bytes; a file with a larger number is damaged."""


class _Short(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        """Return a number; Python refuses to write down one of some thousand digits."""
        return (
            super().repr_int(x, level)
            if abs(x) <= LARGEST
            else f"a number of {x.bit_length()} bits"
        )


_SHORT: Final = _Short()
_SHORT.maxstring = _SHORT.maxother = 100
_INTEGERS: Final = frozenset({int})

Member = TypeVar("Member")
Value = TypeVar("Value")


def open_file(path: Path) -> BinaryIO:
    """Open a file to be read. Raises `OSError`, also for a pipe: nobody may ever write into it."""
    if path.is_fifo():
        raise OSError(errno.ESPIPE, "it is a pipe, and no file")
    return path.open("rb")


def read_text(path: Path) -> str:
    """Return the text of a file. Raises `OSError`, and `ValueError` for what is no text.

    A device has no size. So no more is read than any of our files holds.
    """
    content = bytearray()
    with open_file(path) as file:
        while part := file.read(_PART_BYTES):
            content += part
            if len(content) > MOST_BYTES:
                raise ValueError(f"it is larger than {MOST_BYTES} bytes")
    return content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def parse_json(text: str) -> Json:
    """Return the document in a text.

    Raises `ValueError` for another text, and for what JSON leaves open or allows: a number that is
    not whole, NaN, a key that is there twice, more levels than Python reads.
    """
    if text.startswith("\ufeff"):
        raise ValueError("it begins with a byte order mark (BOM), which JSON does not allow")
    try:
        return _decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def told_damage(error: Exception) -> str:
    """Return what is wrong with a file in words, from what reading it raised."""
    if isinstance(error, json.JSONDecodeError):
        return f"it is no JSON: {error.msg} (line {error.lineno}, column {error.colno})"
    if isinstance(error, UnicodeDecodeError):
        return f"it is no text in UTF-8 (byte {error.start})"
    if isinstance(error, KeyError):
        return f"{shown(error.args[0])} is missing"
    if isinstance(error, ValueError):
        return str(error)
    return "a part of it has the wrong type"


def whole_number(value: object) -> int:
    """Return a number of bytes or storages that a file holds. Raises `ValueError` for others."""
    if type(value) is not int or not 0 <= value <= LARGEST:
        text = "a larger one" if type(value) is int and value > 0 else shown(value)
        raise ValueError(f"expected a whole number of bytes, found {text}")
    return value


def checked_number(value: object) -> int:
    """Return a whole number that may be below zero. Raises `ValueError` for others."""
    if type(value) is not int or not -LARGEST <= value <= LARGEST:
        raise ValueError(f"expected a whole number, found {shown(value)}")
    return value


def whole_numbers(values: object) -> tuple[int, ...]:
    """Return a list of numbers of bytes. Raises `ValueError` for others."""
    numbers = checked_numbers(values)
    if numbers and min(numbers) < 0:
        raise ValueError(f"expected whole numbers of bytes, found {min(numbers)}")
    return numbers


def checked_numbers(values: object) -> tuple[int, ...]:
    """Return a list of whole numbers. Raises `ValueError` for others."""
    numbers = checked_list(values)
    if not _INTEGERS.issuperset(map(type, numbers)):
        raise ValueError(f"expected whole numbers, found {shown(values)}")
    if numbers and not (min(numbers) >= -LARGEST and max(numbers) <= LARGEST):
        raise ValueError("expected whole numbers, found one that is too large")
    return tuple(numbers)


def _checker(words: str, *kinds: type) -> Callable[[object], Json]:
    """Return a function that returns a value of some kinds, and raises `ValueError` for others."""

    def checked(value: object) -> object:
        if type(value) not in kinds:
            raise ValueError(f"expected {words}, found {shown(value)}")
        return value

    return checked


checked_text: Final[Callable[[object], str]] = _checker("text", str)
checked_truth: Final[Callable[[object], bool]] = _checker("true or false", bool)
checked_list: Final[Callable[[object], Sequence[Json]]] = _checker("a list", list, tuple)
checked_object: Final[Callable[[object], Mapping[str, Json]]] = _checker("an object", dict)


def checked_texts(values: object) -> tuple[str, ...]:
    """Return a list of texts. Raises `ValueError` for others."""
    return tuple(map(checked_text, checked_list(values)))


def checked_member(known: Mapping[str, Member], name: object) -> Member:
    """Return what has a name. Raises `ValueError` for others."""
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"{shown(name)} is not one of {', '.join(known)}")
    return known[name]


def shown(value: object) -> str:
    """Return a value in a few words, however large or deep it is."""
    return _SHORT.repr(value)


def _no_float(text: str) -> NoReturn:
    raise ValueError(f"{text[: _SHORT.maxlong]} is not a whole number")


# Python reads no more than 4300 digits at once; a process may have set fewer, at least 640.
_MOST_DIGITS: Final = 640


def whole(text: str) -> int:
    """Return the number that a document spells. Raises `ValueError` for one of too many digits."""
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"it has a number of {len(text)} digits")
    return int(text)


def _unique(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    data = dict(pairs)
    if len(data) < len(pairs):
        names = set()
        twice = next(name for name, _ in pairs if name in names or names.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{shown(twice)} occurs twice")
    return data


_decode: Final = json.JSONDecoder(
    object_pairs_hook=_unique, parse_float=_no_float, parse_int=whole, parse_constant=_no_float
).decode


# A dataclass is written as an object of its fields, and read back by their types. A type with a
# spelling of its own has `to_json` and `from_json`. Metadata of a field say what its type does not:

OTHER_VERSION: Final = "was written by another version: record it again"
"""What is said of a file whose format this version does not write."""

RARE: Final = {"rare": True}
"""The field is written only where it is not empty."""

OTHERWISE: Final = {"written": False}
"""The field is not written, or the class writes it in another way."""

SIGNED: Final = {"read": checked_number}
"""The number may be below zero."""

_PLAIN: Final = frozenset({str, int, bool, type(None)})


class JsonFields:
    """A dataclass that is written as an object of its fields."""

    __slots__ = ()

    def to_json(self) -> dict[str, Json]:
        """Return plain builtins; `from_json` gives the same value back."""
        document = {}
        for name, key, _, write, rare in _PLANS[type(self)]:
            value = getattr(self, name)
            if value or not rare:
                document[key] = value if type(value) in _PLAIN else write(value)
        return document

    @classmethod
    def from_json(cls: type[Value], data: Mapping[str, Json]) -> Value:
        """Return the value that `to_json` gave. Raises one of `WRONG` for data of another shape."""
        return read_fields(cls, data)


class JsonRow:
    """A dataclass that is written as a row of its fields, without their names."""

    __slots__ = ()

    def to_json(self) -> list[Json]:
        """Return plain builtins; `from_json` gives the same value back."""
        return [plain(getattr(self, name)) for name, *_ in _PLANS[type(self)]]

    @classmethod
    def from_json(cls: type[Value], row: Json) -> Value:
        """Return the value that `to_json` gave. Raises one of `WRONG` for data of another shape."""
        keys = [key for _, key, *_ in _PLANS[cls]]
        if len(checked_list(row)) != len(keys):
            raise ValueError(f"expected {', '.join(keys)}, found {shown(row)}")
        return read_fields(cls, dict(zip(keys, row, strict=True)))


def read_fields(kind: type[Value], data: Mapping[str, Json]) -> Value:
    """Return the dataclass whose fields are in an object. Raises one of `WRONG`."""
    fields_read = {}
    for name, key, read, _, rare in _PLANS[kind]:
        if not rare or key in data:
            fields_read[name] = read(data[key])
    return kind(**fields_read)


def plain(value: Json) -> Json:
    """Return a value as plain builtins."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, tuple):
        return [part if type(part) is int else plain(part) for part in value]
    if hasattr(value, "to_json"):
        return value.to_json()
    if isinstance(value, enum.Enum):
        return value._value_
    if isinstance(value, Mapping):
        return {name: plain(part) for name, part in value.items()}
    return [plain(part) for part in value]


_Read: TypeAlias = Callable[[Json], Json]
_Plan: TypeAlias = Sequence[tuple[str, str, _Read, _Read, bool]]
"""Name, key, reader, writer, and whether it is rare: of each written field."""


class _Plans(dict[type, _Plan]):
    """The plan of each dataclass, made when somebody first asks for it."""

    def __missing__(self, kind: type) -> _Plan:
        hints = get_type_hints(kind)
        self[kind] = [
            (
                f.name,
                f.metadata.get("key", f.name),
                f.metadata.get("read") or _reader(hints[f.name]),
                f.metadata.get("write", plain),
                f.metadata.get("rare", False),
            )
            for f in fields(kind)
            if f.metadata.get("written", True)
        ]
        return self[kind]


_PLANS: Final = _Plans()


def _reader(hint: Json) -> _Read:
    """Return what checks and reads a value of a type."""
    if hint in _READERS:
        return _READERS[hint]
    kind: object = get_origin(hint)
    arguments = get_args(hint)
    if hasattr(hint, "from_json"):
        own: _Read = hint.from_json
        return own
    if kind is None:
        return functools.partial(checked_member, {member.value: member for member in hint})
    read = _reader(arguments[0])
    if type(None) in arguments:
        return lambda value: None if value is None else read(value)
    if kind is Mapping:
        read = _reader(arguments[1])
        return lambda values: {n: read(value) for n, value in checked_object(values).items()}
    return lambda values: tuple(map(read, checked_list(values)))


_READERS: Final[Mapping[object, _Read]] = {
    str: checked_text,
    int: whole_number,
    bool: checked_truth,
    tuple[int, ...]: whole_numbers,
}
