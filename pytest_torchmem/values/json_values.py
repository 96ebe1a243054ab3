"""The type of what `json` reads and writes."""

from __future__ import annotations

from typing import Any, TypeAlias

#: A value of a JSON document. Nobody knows which kind it is until a reader has checked it.
Json: TypeAlias = Any
