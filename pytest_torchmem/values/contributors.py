"""The parts of memory: categories, and the storages of one origin.

Nothing here needs torch or numpy.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from operator import attrgetter
from typing import Final

from pytest_torchmem.values import json_values
from pytest_torchmem.values.json_values import OTHERWISE, RARE, Json, JsonFields


class Category(enum.Enum):
    """The purpose of a storage. The order is the column order of every timeline."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer_state"
    INPUT = "input"
    AUTOGRAD_DETAIL = "autograd_detail"
    ACTIVATION = "activation"
    TEMPORARY = "temporary"
    BUFFER = "buffer"
    WORKSPACE = "workspace"
    UNKNOWN = "unknown"

    @property
    def column(self) -> int:
        """The category's column in a timeline of shape (T, C)."""
        return _COLUMNS[self]


_COLUMNS = {category: column for column, category in enumerate(Category)}
# Iterating over an enum, or asking a member for its value, costs more than the sums made of them.
_CATEGORIES = tuple(Category)
_AMOUNTS = attrgetter(*(category.value for category in Category))
CATEGORIES_BY_NAME = {category.value: category for category in Category}


class Phase(enum.Enum):
    """The part of a training step in which an allocation was made."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    OPTIMIZER = "optimizer"
    PREEXISTING = "preexisting"


@dataclass(frozen=True, slots=True)
class CategoryBytes:
    """Bytes per category."""

    parameter: int = 0
    gradient: int = 0
    optimizer_state: int = 0
    input: int = 0
    autograd_detail: int = 0
    activation: int = 0
    temporary: int = 0
    buffer: int = 0
    workspace: int = 0
    unknown: int = 0

    @classmethod
    def of(cls, amounts: Mapping[Category, int]) -> CategoryBytes:
        return cls(**{category.value: int(amount) for category, amount in amounts.items()})

    def __getitem__(self, category: Category | str) -> int:
        """Bytes of one category, given as a member or its value. Raises `ValueError` for others."""
        name = category._value_ if isinstance(category, Category) else Category(category).value
        amount: int = getattr(self, name)
        return amount

    def __iter__(self) -> Iterator[Category]:
        return iter(_CATEGORIES)

    def items(self) -> Iterator[tuple[Category, int]]:
        return zip(_CATEGORIES, _AMOUNTS(self), strict=True)

    def to_json(self) -> dict[str, int]:
        """Return plain builtins, without the categories of zero bytes."""
        return {category._value_: amount for category, amount in self.items() if amount}

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> CategoryBytes:
        """Return the value that `to_json` gave. Raises one of `WRONG`."""
        for name, amount in json_values.checked_object(data).items():
            json_values.checked_member(CATEGORIES_BY_NAME, name)
            json_values.whole_number(amount)
        return cls(**data)

    @property
    def total(self) -> int:
        amounts: tuple[int, ...] = _AMOUNTS(self)
        return sum(amounts)


@dataclass(frozen=True, slots=True)
class Source:
    """A line of the user's code. ``line`` 0 means that only the function is known."""

    file: str
    line: int
    function: str

    @property
    def file_name(self) -> str:
        """The end of the file's path, as a reader is told it."""
        return self.file.replace("\\", "/").rpartition("/")[2]

    def with_file(self, renamed: Callable[[str], str]) -> Source:
        return replace(self, file=renamed(self.file))

    def to_json(self) -> list[Json]:
        """Return plain builtins; `from_json` gives the same value back."""
        return [self.file, self.line, self.function]

    @staticmethod
    def from_json(place: Json) -> Source:
        """Return the value that `to_json` gave. Raises one of `WRONG`."""
        if len(json_values.checked_list(place)) != len(Source.__slots__):
            raise ValueError("expected a file, a line and a function")
        return _source(*place)

    def __str__(self) -> str:
        if self.line:
            return f"{self.file_name}:{self.line}"
        return f"{self.function} in {self.file_name}"


# A file of origins leaves out what is empty.
_UNSAID: Final = {"count": 1, "operator": "", "module": "", "source": None, "labels": ()}


@dataclass(frozen=True, slots=True)
class Contributor(JsonFields):
    """Storages of one origin that were live together: who made them, and how much they hold.

    Attributes:
        category: What the storages are for.
        size_bytes: Their bytes together.
        count: How many storages.
        operator: The outermost operator that allocated them (``aten::_to_copy``), or ``""``.
        module: Path of the innermost module with repeated layers folded
            (``model.layers.*.norm``), or ``""``.
        source: The user's line that called the operator; None when no user frame was seen.
        phase: Where in the step they were made.
        labels: Enclosing ``record_function`` labels, outermost first.
        order: When the first of them was made, as a number that later ones exceed; 0 for what was
            there before, and where nobody knows. Two that differ in nothing else are equal.
        claimed: The reason of a user's category pass that decided on their category, or ``""``.
    """

    category: Category
    size_bytes: int = field(metadata={"key": "bytes"})
    count: int
    operator: str
    module: str
    source: Source | None
    phase: Phase
    labels: tuple[str, ...] = ()
    order: int = field(default=0, compare=False, metadata=OTHERWISE)
    claimed: str = field(default="", metadata=RARE)

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> Contributor:
        """Return the value that `to_json` gave. Raises one of `WRONG` for data of another shape."""
        return json_values.read_fields(cls, {**_UNSAID, **data})

    def holding(self, size_bytes: int, count: int, order: int = 0) -> Contributor:
        """Return the same origin with other numbers."""
        same = (self.operator, self.module, self.source, self.phase, self.labels)
        return Contributor(self.category, size_bytes, count, *same, order, self.claimed)

    def with_file(self, renamed: Callable[[str], str]) -> Contributor:
        """Return the same with another name for its source's file."""
        source = self.source
        return replace(self, source=source.with_file(renamed)) if source else self

    @property
    def identity(self) -> tuple[str, ...]:
        """The part that stays when a line is inserted above the code: it has no line number."""
        where = (self.source.file, self.source.function) if self.source else ("", "")
        return (self.category._value_, self.operator, self.module, *where, self.phase._value_)

    @property
    def told_as(self) -> tuple[object, ...]:
        """The name by which a reader knows it: a sentence names a source by the end of its path."""
        where = (self.source.file_name, self.source.line) if self.source else ()
        return (self.category, self.operator, self.module, self.phase, where)

    @property
    def told_line(self) -> tuple[object, ...]:
        """The line that made it, as a reader knows it; without one, all but its label."""
        return self.told_as[4:] if self.source else self.told_as[1:]


def common_module(modules: Iterable[str]) -> str:
    """Return what the paths of modules have in common: ``net.blocks`` of two of its children."""
    levels = zip(*(module.split(".") for module in modules), strict=False)
    return ".".join(level[0] for level in takewhile(lambda level: len({*level}) == 1, levels))


@functools.lru_cache(maxsize=4096)
def _source(file: object, line: object, function: object) -> Source:
    """One value stands for all contributors of a line: there are many."""
    return Source(
        json_values.checked_text(file),
        json_values.whole_number(line),
        json_values.checked_text(function),
    )
