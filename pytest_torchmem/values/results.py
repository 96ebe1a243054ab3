"""The results of a measurement: plain values in bytes, small enough to send to a process.

Nothing here needs torch or numpy, so a controller, a report or a baseline can hold results without
importing either.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pytest_torchmem.values import json_values
from pytest_torchmem.values.contributors import CategoryBytes, Contributor
from pytest_torchmem.values.json_values import SIGNED, Json, JsonFields
from pytest_torchmem.values.units import between, printable


def meant(name: str, known: Sequence[str]) -> str:
    """Return what a reader who mistyped a name may have meant; ``""`` where nothing is near."""
    import difflib  # nobody else pays for it

    near = difflib.get_close_matches(name, known, 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


class _PerCategory:
    """Lets ``peak.activation`` stand for ``peak.by_category.activation``."""

    __slots__ = ()
    total: int
    by_category: CategoryBytes

    def __getattr__(self, name: str) -> int:
        __tracebackhide__ = True
        if name in CategoryBytes.__slots__:
            amount: int = getattr(self.by_category, name)
            return amount
        near = ""
        if not name.startswith("_"):  # as `__dict__`, which `dir` asks for
            near = meant(name, [*CategoryBytes.__slots__, *(o for o in dir(self) if o[0] != "_")])
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{near}")

    def __repr__(self) -> str:
        """The numbers that are not 0: a failed assert shows it in the middle of an expression."""
        amounts = [f", {category.value}={n}" for category, n in self.by_category.items() if n]
        return f"<{type(self).__name__} total={self.total}{''.join(amounts)}>"


@dataclass(frozen=True, slots=True, repr=False)
class Peak(_PerCategory, JsonFields):
    """The largest footprint over a window.

    Attributes:
        total: The largest footprint, in bytes.
        time_ns: When it was first reached, since the start of the recording.
        at_peak: Composition at that moment; sums to ``total``.
        by_category: Each category's own largest value over time; ``peak.activation`` reads it.
        live: What was live at the peak, largest first.
        live_by_category: What each category held at its own largest moment, largest first; the
            moments differ from one category to the next.
    """

    total: int
    time_ns: int = field(metadata=SIGNED)
    at_peak: CategoryBytes
    by_category: CategoryBytes
    live: tuple[Contributor, ...] = ()
    live_by_category: tuple[Contributor, ...] = ()


class Fate(enum.Enum):
    """The fate of something that a window made and left behind."""

    GARBAGE = "freed only by the garbage collector"
    HELD = "still held"
    NOT_LOOKED_FOR = "still held, its holder not looked for"
    FREED_LATER = "held at its end"

    def to_json(self) -> str:
        """Return its name: the value is a part of a sentence."""
        return self.name.lower()

    @classmethod
    def from_json(cls, name: Json) -> Fate:
        """Return the member that `to_json` gave. Raises `ValueError`."""
        return json_values.checked_member({fate.to_json(): fate for fate in cls}, name)


@dataclass(frozen=True, slots=True)
class Holder(JsonFields):
    """The holder of bytes that a window made.

    Attributes:
        size_bytes: The bytes of all storages with this answer.
        count: How many storages.
        fate: What becomes of them.
        by: The way to them (``models.CACHE['last']``); for garbage the class or function that
            closes the cycle and the way from there (``net.Model: losses[0]``); for what was freed
            later the way to them when the region or the last step ended. ``""`` where it could not
            be found or was not looked for.
    """

    size_bytes: int = field(metadata={"key": "bytes"})
    count: int
    fate: Fate
    by: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "by", printable(self.by))

    def __str__(self) -> str:
        fate = str(self.fate.value)
        if self.fate is Fate.GARBAGE:
            return fate + (f", in a cycle of {self.by}" if self.by else "")
        if self.fate is Fate.FREED_LATER:
            return f"{fate} by {self.by}, freed later" if self.by else "freed later"
        if self.fate is Fate.HELD:
            return f"{fate} by {self.by or 'something that no name leads to'}"
        return fate


@dataclass(frozen=True, slots=True, repr=False)
class Retained(_PerCategory, JsonFields):
    """Memory that a window made and left alive at its end; `Peak`'s shorthand works here too.

    ``holders`` says why, largest first. It is looked for only where a limit or a baseline of
    retained bytes or of growth is exceeded, because looking takes a while. ``freed`` are bytes that
    were there before and that the window freed.
    """

    total: int
    by_category: CategoryBytes
    live: tuple[Contributor, ...] = ()
    holders: tuple[Holder, ...] = ()
    freed: int = 0

    @property
    def net(self) -> int:
        """By how much more is alive at the end of the window than at its beginning."""
        return self.total - self.freed


class ReservedSegment(NamedTuple):
    """Memory that an allocator has taken from its device in one piece.

    ``is_private`` says that it serves a pool of its own only, such as that of a CUDA graph.
    """

    address: int
    size_bytes: int
    is_private: bool


@dataclass(frozen=True, slots=True)
class Counters(JsonFields):
    """The device allocator's own peaks over the window, in bytes.

    ``estimated`` says that no allocator counted them: a simulated one did. What ends in ``before``
    is the same counter when the window began. ``split`` is the most that was free in segments which
    were partly in use. ``repeatable`` says that each run counts the same: the GPU is simulated, and
    its allocator's cache was empty at the start.
    """

    requested: int
    allocated: int
    active: int
    reserved: int
    estimated: bool = False
    allocated_before: int = 0
    active_before: int = 0
    reserved_before: int = 0
    split: int = 0
    repeatable: bool = False

    @classmethod
    def of(cls, peaks: Mapping[str, int], before: Mapping[str, int]) -> Counters:
        """Return the counters of a window from its peaks and from what they were at its start."""
        held = ("allocated", "active", "reserved")
        requested, allocated, active, reserved = (peaks.get(k, 0) for k in ("requested", *held))
        is_estimated = bool(peaks.get("estimated"))
        allocated_before, active_before, reserved_before = (before.get(key, 0) for key in held)
        split = peaks.get("split", 0)
        return cls(
            requested,
            allocated,
            active,
            reserved,
            is_estimated,
            allocated_before,
            active_before,
            reserved_before,
            split,
        )

    def before(self, key: str) -> int:
        """Return what the counter called ``key`` said when the window began."""
        bytes_before: int = getattr(self, f"{key}_before")
        return bytes_before


@dataclass(frozen=True, slots=True)
class Result(JsonFields):
    """One measured window: a test body or a region of it.

    Attributes:
        name: The region's name; ``""`` for the body.
        device: ``cpu`` or ``cuda:0``.
        estimated: True for any number that was not measured.
        steps: Bytes made in the window and alive at the end of each step, warm-up excluded.
        each_step: What most steps add and keep, in bytes; 0 for nothing.
        grown: What each origin holds more at the end of the last step than at the end of the first.
        counters: The allocator's own numbers; None where the device keeps none (the CPU).
        has_backward: False when nothing in the window kept anything for a backward pass, so that
            no ACTIVATION can exist by definition.
        unexplained_bytes: Bytes by which the numbers differ from the allocator's own total, if it
            has one, or from what is alive at the end.
        blind_spots: Memory that the numbers lack, or may lack, in a sentence each.
        at_most: The most that the peak can be, in bytes, where it was estimated or a GPU simulated;
            ``peak.total`` is the least. Both are equal unless a kernel or a library takes memory
            for itself that depends on the processor or the GPU, and that could matter at the peak.
            None where nobody can bound it, and for what was measured on a device.
        notes: Sentences the reader of the numbers must know.
        failed_passes: A sentence for each category pass of a user that raised.
    """

    name: str
    device: str
    estimated: bool
    peak: Peak
    retained: Retained
    steps: tuple[int, ...] = field(default=(), metadata={"read": json_values.checked_numbers})
    each_step: int = 0
    grown: tuple[Contributor, ...] = ()
    counters: Counters | None = None
    has_backward: bool = True
    unexplained_bytes: int = field(default=0, metadata=SIGNED)
    blind_spots: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    failed_passes: tuple[str, ...] = ()
    at_most: int | None = None

    @property
    def interval(self) -> str:
        """The two ends of the peak in words; ``""`` where they are the same to a thousandth."""
        at_most = self.at_most or 0
        if at_most <= self.peak.total * 1.001:
            return ""
        peak = "estimated peak" if self.estimated else "peak"
        return between(peak, self.peak.total, at_most)

    @property
    def growth(self) -> int | None:
        """Retained bytes per step over the measured steps; None with fewer than two of them.

        It is the larger of two: the mean, and what most steps add and keep (`each_step`), which a
        release in one of them cannot hide. The mean is the rise from the first to the last measured
        step divided by the steps between, rounded up so that no growth is rounded away.
        """
        if len(self.steps) < 2:
            return None
        return max(self.mean_growth, self.each_step)

    @property
    def mean_growth(self) -> int:
        """The mean growth over the measured steps; 0 with fewer than two of them."""
        rise = self.steps[-1] - self.steps[0] if self.steps else 0
        return -(-rise // max(1, len(self.steps) - 1))
