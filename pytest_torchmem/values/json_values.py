"""Values that `json` reads and writes, and sentences for its errors."""

from __future__ import annotations

import json
from typing import Any, TypeAlias

#: A value of a JSON document. Nobody knows which kind it is until a reader has checked it.
Json: TypeAlias = Any


def told_damage(error: Exception) -> str:
    """Return what is wrong with a file in words, from what reading it raised."""
    if isinstance(error, json.JSONDecodeError):
        return f"it is no JSON: {error.msg} (line {error.lineno}, column {error.colno})"
    if isinstance(error, KeyError):
        return f"{error.args[0]!r} is missing"
    if isinstance(error, ValueError):
        return str(error)
    return "a part of it is of another kind than it must be"
