"""One regression: a program before and after an edit, and what a failure must say of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from textwrap import dedent, indent
from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB

_IMPORTS: Final = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n\n\n"

# One operation has several names, from what a user calls down to the kernel; all are right.
MATMUL: Final = "aten::matmul|aten::linear|aten::addmm|aten::mm|aten::bmm|aten::baddbmm"
SOFTMAX: Final = "aten::softmax|aten::_softmax"
CAST: Final = "aten::to|aten::_to_copy|aten::float|aten::type"
COPY: Final = "aten::contiguous|aten::clone"

ANY: Final = "any"
"""Stands for the operator where no single one is to blame; then no line needs to be named."""


@dataclass(frozen=True, slots=True)
class Blame:
    """One right answer.

    Attributes:
        category: What the new memory is for, as a sentence says it; ``|`` between alternatives.
        operators: The names of the operator that makes it, with ``|`` between; ``""`` for none.
        size_bytes: By how much it made the memory grow that the sentence is about.
    """

    category: str
    operators: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Regression:
    """A program, an edit of it, and what the first line of the failure must name.

    ``code`` is the module before and after in one text, whose lines begin like those of a diff:
    ``-`` is before the edit only, ``+`` after it only. ``*`` is in both and makes the memory: where
    the edit itself allocates nothing, that line is as right as the edited one. ``<`` and ``>`` are
    before and after an edit that changes no memory, of a line that the memory goes through.

    Attributes:
        name: The module's name.
        code: The module, marked as above.
        files: Other files of the project by name, marked alike. With such files a regression has a
            project of its own, in which nothing else is edited.
        body: The test's body.
        blames: The right answers: more than one where the edit makes several equal things.
        fixtures: What stands above the test.
        uses: The fixtures that the test takes.
        holder: Text that names who keeps the memory, for what is retained.
    """

    name: str
    code: str
    body: str
    blames: tuple[Blame, ...]
    fixtures: str = ""
    uses: str = ""
    holder: str = ""
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def module(self) -> str:
        return f"{self.name}.py"

    @property
    def before(self) -> dict[str, str]:
        """The texts of the files before the edit, by name."""
        return self._side("-<")

    @property
    def after(self) -> dict[str, str]:
        return self._side("+>")

    def _side(self, own: str) -> dict[str, str]:
        marked = {self.module: self.code, **self.files}
        return {file: _side_of(text, own, _head(file)) for file, text in marked.items()}

    @property
    def blamed_places(self) -> frozenset[tuple[str, int]]:
        """The file and number of each line that may be named, after the edit."""
        found = set()
        for file, text in {self.module: self.code, **self.files}.items():
            after = [line for line in _lines(text) if line[:1] not in ("-", "<")]
            first = _head(file).count("\n") + 1
            found |= {
                (file, n) for n, line in enumerate(after, first) if line[:1] in ("+", ">", "*")
            }
        return frozenset(found)

    @property
    def edited_places(self) -> frozenset[tuple[str, int]]:
        """The file and number of each line that was edited, or follows one that is gone."""
        edited = set()
        for file, text in {self.module: self.code, **self.files}.items():
            number = _head(file).count("\n") + 1
            for line in _lines(text):
                if line[:1] in ("+", "-"):
                    edited.add((file, number))
                number += line[:1] not in ("-", "<")
        return frozenset(edited)

    @property
    def test(self) -> str:
        """The test module."""
        imports = f"import pytest\nimport torch\nfrom torch import nn\n\nimport {self.name}\n"
        names = f"from {self.name} import *\n\n\n"
        fixtures = f"{dedent(self.fixtures).strip()}\n\n\n" if self.fixtures else ""
        test = f"@pytest.mark.memory_baseline\ndef test_{self.name}({self.uses}):\n"
        return imports + names + fixtures + test + indent(dedent(self.body).strip(), "    ") + "\n"


def _side_of(marked: str, own: str, head: str) -> str:
    lines = (line for line in _lines(marked) if line[:1] in ("", " ", "*", *own))
    return head + "".join(f"{line[2:]}\n" for line in lines)


def _lines(marked: str) -> list[str]:
    return dedent(marked).strip("\n").splitlines()


def _head(file: str) -> str:
    return _IMPORTS if file.endswith(".py") else ""


@dataclass(frozen=True, slots=True)
class Harmless:
    """An edit that moves or renames and changes no memory: no test may fail."""

    name: str
    before: str
    after: str
    test: str
