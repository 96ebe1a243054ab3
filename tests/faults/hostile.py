"""Damage, made from files that are whole: the same for the same seed."""

from __future__ import annotations

import copy
import json
import random
import string
from collections.abc import Iterator
from typing import Any

HOSTILE_TEXTS = (
    "",
    "\x1b[31m\x1b]0;title\x07",
    "\n::error::boo",
    "\r\x9b2J\u202e\u2028",
    "\udcff",
    "<script>alert(1)</script>",
    "../../../etc/passwd",
    "a" * 3000,
    "::",
    "[" * 50,
    "at::_ops::a" + "_A" * 200,
    "'\"`|\\",
)

HOSTILE_VALUES = (
    *HOSTILE_TEXTS,
    None,
    True,
    False,
    0,
    -1,
    1,
    1.5,
    float("nan"),
    float("inf"),
    2**31,
    2**62,
    2**63,
    -(2**63),
    10**30,
    10**400,
    [],
    {},
    [[]],
    [0] * 50,
    [-1, -1],
    [10**12, 5],
    [None],
    {"a": 1},
)


def places_in(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every container and key in a document, from the outside."""
    if isinstance(data, dict | list):
        keys = list(data) if isinstance(data, dict) else range(len(data))
        for key in keys:
            yield data, key
            yield from places_in(data[key])


def damaged_value(
    data: Any, chance: random.Random, values: tuple[Any, ...] = HOSTILE_VALUES
) -> Any:
    """A document with one to three values replaced, left out, moved or doubled."""
    data = copy.deepcopy(data)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        places = list(places_in(data))
        if not places:
            break
        holder, key = chance.choice(places)
        match chance.randrange(8):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, list):
                holder.insert(key, copy.deepcopy(holder[key]))
            case 2:
                other, there = chance.choice(places)
                holder[key] = copy.deepcopy(other[there])
            case 3 if isinstance(holder[key], int):
                holder[key] += chance.choice((-1, 1, 1000, -1000, 2**40))
            case 4 if isinstance(holder, dict):
                holder[chance.choice(("", "x", "format", "\x1b"))] = holder.pop(key)
            case _:
                holder[key] = copy.deepcopy(chance.choice(values))
    return data


def damaged_bytes(content: bytes, chance: random.Random) -> bytes:
    """Bytes with a few of them flipped, cut out, doubled, put elsewhere, or the end missing."""
    data = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 5))):
        if not data:
            break
        start = chance.randrange(len(data))
        length = min(chance.choice((1, 1, 2, 8, 100)), len(data) - start)
        match chance.randrange(6):
            case 0:
                del data[start:]
            case 1:
                del data[start : start + length]
            case 2:
                data[start:start] = data[start : start + length] * chance.choice((1, 2, 50))
            case 3:
                data[start : start + length] = chance.randbytes(length)
            case 4:
                data[start] ^= 1 << chance.randrange(8)
            case _:
                data[start:start] = chance.choice(_PIECES)
    return bytes(data)


_PIECES = (
    b"\x00",
    b"\xef\xbb\xbf",
    b"\xff\xfe",
    b"\r\n",
    b"<<<<<<< HEAD\n",
    b"NaN",
    b"1e400",
    b"9" * 5000,
    b"[" * 3000,
    b'{"a":' * 2000,
    b'"format": 1, ',
    b"\\ud800",
    b"\x1b[2J",
)


def damaged_json(data: Any, chance: random.Random) -> bytes:
    """The text of a document with other values in it, or with damage to its bytes."""
    if chance.random() < 0.75:
        return json.dumps(damaged_value(data, chance)).encode()
    return damaged_bytes(json.dumps(data).encode(), chance)


def damaged_text(text: str, chance: random.Random) -> str:
    """A typed text with some characters more, fewer or others."""
    letters = list(text)
    for _ in range(chance.choice((1, 1, 2, 4))):
        place = chance.randrange(len(letters) + 1)
        match chance.randrange(4):
            case 0:
                del letters[place : place + 1]
            case 1:
                letters[place:place] = chance.choice(_TYPED) * chance.choice((1, 1, 2, 400, 5000))
            case 2:
                letters[place:place] = chance.choice(string.printable)
            case _:
                letters[place : place + 1] = chance.choice(_TYPED)
    return "".join(letters)


_TYPED = (
    "9",
    "0",
    ".",
    "%",
    " ",
    "-",
    "_",
    "e",
    "iB",
    "Ki",
    "²",
    "٣",
    "\x00",
    "\udcff",
    "[",
    ":",
    ",",
    "=",
)
