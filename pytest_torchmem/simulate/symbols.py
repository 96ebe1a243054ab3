"""Read from an ELF file the libraries that it links with and the symbols that it leaves open.

Only what the dynamic linker reads is read: no tool of a compiler has to be installed for it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

_SECTION: Final = struct.Struct("<IIQQQQIIQQ")
_SYMBOL: Final = struct.Struct("<IBBHQQ")
_READ: Final = (2, 6, 11, 0x6FFFFFFE, 0x6FFFFFFF)
_SYMTAB, _DYNAMIC, _DYNSYM, _VERNEED, _VERSYM = _READ
_NEEDED: Final = 1
_GLOBAL_FUNCTION: Final = 0x12


@dataclass(frozen=True, slots=True)
class _Section:
    kind: int
    data: bytes
    strings: bytes
    count: int


class ElfFile:
    """A library or an object file of 64 bits, little-endian."""

    def __init__(self, path: Path) -> None:
        whole = path.read_bytes()
        (start,) = struct.unpack_from("<Q", whole, 40)
        size, count = struct.unpack_from("<HH", whole, 58)
        headers = [_SECTION.unpack_from(whole, start + place * size) for place in range(count)]

        @cache
        def data(place: int) -> bytes:
            _, _, _, _, offset, length, _, _, _, _ = headers[place]
            return whole[offset : offset + length]

        self._sections = [
            _Section(kind, data(place), data(link), info)
            for place, (_, kind, _, _, _, _, link, info, _, _) in enumerate(headers)
            if kind in _READ
        ]

    def linked_with(self) -> Iterator[str]:
        """Yield the names of the libraries that this one needs."""
        for section in self._of(_DYNAMIC):
            for tag, value in struct.iter_unpack("<QQ", section.data):
                if tag == _NEEDED:
                    yield self._text(section, value)

    def left_open(self) -> Iterator[tuple[str, str]]:
        """Yield each symbol that another library must define, and the version asked for."""
        versions = self._versions()
        for section in self._of(_DYNSYM):
            asked = next(iter(self._of(_VERSYM)), None)
            numbers = struct.unpack(f"<{len(asked.data) // 2}H", asked.data) if asked else ()
            for place, symbol in enumerate(_SYMBOL.iter_unpack(section.data)):
                name, _, _, defined_in, _, _ = symbol
                if name and not defined_in:
                    number = numbers[place] & 0x7FFF if numbers else 0
                    yield self._text(section, name), versions.get(number, "")

    def functions(self) -> Iterator[str]:
        """Yield the global functions that an object file defines."""
        for section in self._of(_SYMTAB):
            for name, info, _, defined_in, _, _ in _SYMBOL.iter_unpack(section.data):
                if info == _GLOBAL_FUNCTION and defined_in:
                    yield self._text(section, name)

    def _versions(self) -> dict[int, str]:
        """Return the versions that this library asks of others: their names, by their numbers."""
        found = {}
        for section in self._of(_VERNEED):
            place = 0
            for _ in range(section.count):
                _, count, _, start, following = struct.unpack_from("<HHIII", section.data, place)
                at = place + start
                for _ in range(count):
                    _, _, number, name, step = struct.unpack_from("<IHHII", section.data, at)
                    found[number & 0x7FFF] = self._text(section, name)
                    at += step
                place += following
        return found

    def _of(self, kind: int) -> list[_Section]:
        return [section for section in self._sections if section.kind == kind]

    def _text(self, section: _Section, start: int) -> str:
        return section.strings[start : section.strings.index(b"\0", start)].decode()
