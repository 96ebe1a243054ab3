"""Limits and findings: what may be asked of a result, and what is not as it was asked.

``owner`` is what the reader of a message typed a limit into: ``memory_budget``, ``measure``.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from pytest_torchmem.values.baseline import Allowance
from pytest_torchmem.values.contributors import Category, Contributor
from pytest_torchmem.values.errors import MarkerError, SizeError, TorchmemError, is_torchmem_error
from pytest_torchmem.values.json_values import OTHERWISE, RARE, SIGNED, JsonFields, JsonRow, shown
from pytest_torchmem.values.results import Result, meant
from pytest_torchmem.values.units import (
    KiB,
    is_run_count,
    parse_floor,
    parse_fraction,
    parse_size,
)

__tracebackhide__ = is_torchmem_error

COUNTERS: Final = ("allocated", "active", "reserved")
RETAINED: Final = ("retained", "net_retained", "growth")
"""The limits that what is left behind may exceed."""

LIMIT_KEYS: Final = ("total", *(c.value for c in Category), *RETAINED, *COUNTERS)
"""What a limit can be set on, in the order in which reports name them."""


Size: TypeAlias = int | str | Callable[[], int | str]
SizeByDevice: TypeAlias = Mapping[str, Size | None]
"""A size for each model or kind of device: ``{"NVIDIA H200": "40GiB", "cpu": None}``."""


def read_limits(owner: str, given: Mapping[str, object]) -> dict[str, Size | SizeByDevice]:
    """Return limits in the order in which they are reported; a None is left out.

    Raises `MarkerError` with a sentence about the first that cannot be used.
    """
    require_known(owner, given, LIMIT_KEYS)
    given_sizes = {key: value for key, value in given.items() if value is not None}
    limits = {key: _read_limit(owner, key, value) for key, value in given_sizes.items()}
    return {key: limits[key] for key in LIMIT_KEYS if key in limits}


_OTHER_WORDS: Final = {"peak": "total", "footprint": "total", "leaked": "retained"}
"""What users may call a limit, and its key."""


def require_known(owner: str, given: Iterable[str], keys: tuple[str, ...]) -> None:
    """Raise `MarkerError` for the first name among ``given`` that is none of ``keys``."""
    for key in given:
        if key not in keys:
            near = meant(_OTHER_WORDS.get(key, key), keys)
            raise MarkerError(f"{owner} has no argument {key!r}{near}; it takes {', '.join(keys)}")


def require_steps(owner: str, n: object, warmup: object) -> None:
    """Raise `MarkerError` for numbers that make no steps."""
    if not is_run_count(n, 1) or not is_run_count(warmup, 0):
        raise MarkerError(f"{owner} cannot make {shown(n)} steps after {shown(warmup)} for warm-up")


def read_allowance(
    owner: str, tolerance: object, floor: object, defaults: Allowance | None = None
) -> Allowance:
    """Return how far from a baseline a number may be; None stands for the default.

    Raises `MarkerError`, which begins with ``owner``.
    """
    try:
        if defaults is not None and tolerance is None:
            share = defaults.tolerance
        else:
            share = parse_fraction(tolerance)
        if defaults is not None and floor is None:
            return replace(defaults, tolerance=share)
        return Allowance(share, *parse_floor(floor))
    except SizeError as error:
        raise MarkerError(f"{owner}: {error.sentence}") from None


def limits_on(
    owner: str, limits: Mapping[str, Size | SizeByDevice], names: Sequence[str]
) -> dict[str, Size]:
    """Return the limits of a device; those that it has not are left out.

    ``names`` are what the device is called, the closest first: its model, its kind. Raises
    `MarkerError` where limits are given by device and none of the keys is a name of this one.
    """
    chosen = {
        key: _on_device(owner, key, size, names) if isinstance(size, Mapping) else size
        for key, size in limits.items()
    }
    return {key: size for key, size in chosen.items() if size is not None}


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
    """Return a limit, read unless it is computed later.

    Raises `MarkerError` for what is no size, and for a bare number that few would mean as bytes.
    """
    if callable(value):
        return value
    try:
        size_bytes = parse_size(value)
    except SizeError as error:
        raise MarkerError(f"{owner}, {key}: {error.sentence}") from None
    if not isinstance(value, str) and 0 < size_bytes < KiB:
        raise MarkerError(
            f"{owner}, {key}: {value} alone is so many bytes; did you mean '{value}GiB' or "
            f"'{value}MiB'? If not, write '{value}B'"
        )
    return size_bytes


def sizes_now(owner: str, limits: Mapping[str, Size]) -> dict[str, int]:
    """Return limits in bytes; callables are called. Raises `MarkerError` if one fails."""
    sizes, key = dict[str, int](), ""
    try:
        for key, size in limits.items():
            value = size() if callable(size) else size
            if value is None:
                raise MarkerError(
                    "it returned None; it has to return an int in bytes or text such as '64MiB'. "
                    "For no limit, give None instead of the callable"
                )
            sizes[key] = parse_size(value)
    except Exception as error:
        reason = error.sentence if isinstance(error, TorchmemError) else error
        raise MarkerError(
            f"{owner}, {key}: the limit could not be computed: {type(error).__name__}: {reason}"
        ) from error
    return sizes


class FindingKind(enum.Enum):
    """Why a number is not as it must be. The value is the slug, which docs/messages.md explains."""

    NO_READING = "no-reading"
    NO_ACTIVATION = "no-activation"
    NO_COUNTER = "no-counter"
    NO_STEPS = "no-steps"
    OVER_LIMIT = "over-limit"
    GROWN = "grown"
    UNSTABLE = "unstable"
    UNSEEN = "unseen"
    SHRUNK = "shrunk"
    NO_BASELINE = "no-baseline"
    OUT_OF_MEMORY = "out-of-memory"

    @property
    def is_unread(self) -> bool:
        """True where a limit has no number to be held against."""
        return self in _UNREAD

    @property
    def is_too_large(self) -> bool:
        """True where the number itself is larger than it may be."""
        return self in (FindingKind.OVER_LIMIT, FindingKind.GROWN)

    @property
    def has_excess(self) -> bool:
        """True where a number is too large, and it is known by how much."""
        return self.is_too_large or self is FindingKind.UNSTABLE

    def ends(self, sentence: str) -> str:
        """Return a sentence as it is shown: with the slug, unless its words say as much."""
        says_as_much = self.is_too_large or self is FindingKind.OUT_OF_MEMORY
        return sentence if says_as_much else f"{sentence} [{self.value}]"


_UNREAD: Final = (
    FindingKind.NO_READING,
    FindingKind.NO_ACTIVATION,
    FindingKind.NO_COUNTER,
    FindingKind.NO_STEPS,
)


class DifferenceKind(enum.Enum):
    """The difference between a contributor and the other side.

    NEW and GROWN were made by the body. LONGER is as large as before, and was gone by the moment
    that is compared. READ was there before the body, which touches more of it. RELABELLED was of
    another category.
    """

    NEW = "new"
    GROWN = "grown"
    LONGER = "lives longer"
    READ = "read"
    RELABELLED = "relabelled"
    GONE = "gone"
    SHRUNK = "shrunk"


@dataclass(frozen=True, slots=True)
class Difference(JsonFields):
    """One contributor that holds more than on the other side, or less.

    Attributes:
        contributor: The one that grew, as it is now; or the one that shrank, as it was.
        size_bytes: By how much: above zero for growth, below for shrinking.
        kind: How it differs.
        was: The category that relabelled bytes had.
    """

    contributor: Contributor
    size_bytes: int = field(metadata={"key": "bytes", **SIGNED})
    kind: DifferenceKind
    was: Category | None = None

    @property
    def is_larger_now(self) -> bool:
        """True for what the other side read, too, such as a fixture's model that is wider now."""
        return self.kind is DifferenceKind.READ and self.contributor.size_bytes > self.size_bytes


@dataclass(frozen=True, slots=True)
class CodeLines(JsonRow):
    """Lines of a file, from the first to the last; both are 0 where only the file is known.

    Where lines are gone, the last is the one before the first, which followed them.
    """

    file: str
    first: int
    last: int

    def __str__(self) -> str:
        """The place as a sentence has it: the end of the file's path, ``net.py:60-63``."""
        name = self.text.replace("\\", "/").rpartition("/")[2]
        return f"{name} (lines before it are gone)" if self.last < self.first else name

    def has(self, place: CodeLines) -> bool:
        """True where another place begins in these lines."""
        return self.file == place.file and self.first <= place.first <= self.last

    @property
    def text(self) -> str:
        """The place with the whole path of its file."""
        if not self.first:
            return self.file
        return f"{self.file}:{self.first}" + (f"-{self.last}" if self.last > self.first else "")


@dataclass(frozen=True, slots=True)
class LineDifference(JsonFields):
    """The difference that one line makes: it holds more than before in all, or less.

    Lines that were changed together count as one. What no line made stands alone.

    Attributes:
        parts: The contributors of the line that differ, those first that changed as the line did,
            the largest change first; never empty.
        changed: The lines that were changed together; None where the line is as it was.
    """

    parts: tuple[Difference, ...]
    changed: CodeLines | None = None

    @property
    def size_bytes(self) -> int:
        """By how much more or less all parts hold."""
        return sum(part.size_bytes for part in self.parts)

    @property
    def contributors(self) -> tuple[Contributor, ...]:
        return tuple(part.contributor for part in self.parts)

    @property
    def operators(self) -> tuple[str, ...]:
        """The operators of the line, the one that made most of its change first."""
        sign, amounts = (1 if self.size_bytes > 0 else -1), Counter[str]()
        for part in self.parts:
            amounts[part.contributor.operator] += max(0, sign * part.size_bytes)
        return tuple(operator for operator, _ in amounts.most_common())

    @property
    def place(self) -> CodeLines | None:
        """Its file and lines; None for what no line made."""
        source = self.parts[0].contributor.source
        if self.changed or source is None:
            return self.changed
        return CodeLines(source.file, source.line, source.line)


@dataclass(frozen=True, slots=True)
class Finding(JsonFields):
    """One number that is not as it must be.

    Attributes:
        kind: Why it is not.
        key: One of `LIMIT_KEYS`.
        numbers: Both numbers, in a sentence without a cause; or why there is no number.
        excess_bytes: By how much; 0 when the number could not be judged.
        lines: What differs from the baseline by line, the cause first; their bytes and what is too
            small to be listed are `excess_bytes`. Empty without a baseline.
        cause: The cause in words, ``""`` for none.
        causes: The contributors that these words are about; empty for none.
        others: What else came and went, in words that follow; ``""`` for nothing.
        place: The lines that made it, or the one changed place that leads to them; None where no
            line is known.
        changed_since: Where code has changed since the baseline, as far as the words name it.
        allowed: What the baseline allows: ``tolerance 2 %``; ``""`` without one.
    """

    kind: FindingKind
    key: str
    numbers: str
    excess_bytes: int = 0
    lines: tuple[LineDifference, ...] = field(default=(), metadata=OTHERWISE)
    cause: str = field(default="", metadata=RARE)
    causes: tuple[Contributor, ...] = field(default=(), metadata=RARE)
    others: str = field(default="", metadata=RARE)
    place: CodeLines | None = field(default=None, metadata=RARE)
    changed_since: tuple[CodeLines, ...] = field(default=(), metadata=RARE)
    allowed: str = field(default="", metadata=RARE)

    @property
    def is_at_change(self) -> bool:
        """True where the line that the words name has changed itself."""
        return any(line.changed == self.place for line in self.lines[:1] if line.changed)

    @property
    def sentence(self) -> str:
        """Both numbers and the largest cause, on one line."""
        return f"{self.numbers}: {self.cause}{self.others}" if self.cause else self.numbers

    @property
    def shown(self) -> str:
        """The sentence, with the slug of its kind where it needs one."""
        return self.kind.ends(self.sentence)


def is_estimated(result: Result, key: str) -> bool:
    """Return whether the number that ``key`` stands for was not measured."""
    simulated = key in COUNTERS and result.counters is not None and result.counters.estimated
    return result.estimated or simulated


def words(key: str) -> str:
    """Return a limit's key as the subject of a sentence."""
    if key == "total":
        return "memory"
    return f"{key} memory" if key in COUNTERS else key.replace("_", " ")
