"""The results of a measurement: plain values in bytes, small enough to send to a process.

Nothing here needs torch or numpy, so a controller, a report or a baseline can hold results without
importing either.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from pytest_torchmem.values.contributors import (
    CategoryBytes,
    Contributor,
    contributor_from_json,
    contributor_to_json,
)
from pytest_torchmem.values.json_values import (
    Json,
    checked_list,
    checked_member,
    checked_number,
    checked_numbers,
    checked_object,
    checked_text,
    checked_texts,
    checked_truth,
    whole_number,
)


class Level(enum.Enum):
    """The detail with which a body is recorded.

    COUNTERS are the allocator's own: its peaks, and nothing of what they are made of. Then the
    footprint is at most what they say, because they also hold what others left behind. EVENTS are
    each allocation and free beside them, without who made it: what is retained is exact then.
    """

    COUNTERS = "counters"
    EVENTS = "events"
    FULL = "full"


def _meant(name: str, others: Iterable[str]) -> str:
    import difflib  # only a user who mistyped pays for it

    known = [*CategoryBytes.__slots__, *(o for o in others if not o.startswith("_"))]
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
        meant = "" if name.startswith("_") else _meant(name, dir(self))
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{meant}")

    def __repr__(self) -> str:
        """The numbers that are not 0: a failed assert shows it in the middle of an expression."""
        amounts = [f", {category.value}={n}" for category, n in self.by_category.items() if n]
        return f"<{type(self).__name__} total={self.total}{''.join(amounts)}>"


@dataclass(frozen=True, slots=True, repr=False)
class Peak(_PerCategory):
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
    time_ns: int
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


@dataclass(frozen=True, slots=True)
class Holder:
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

    size_bytes: int
    count: int
    fate: Fate
    by: str

    def __str__(self) -> str:
        if self.fate is Fate.GARBAGE:
            return f"{self.fate.value}" + (f", in a cycle of {self.by}" if self.by else "")
        if self.fate is Fate.FREED_LATER:
            return f"{self.fate.value} by {self.by}, freed later" if self.by else "freed later"
        if self.fate is Fate.NOT_LOOKED_FOR:
            return f"{self.fate.value}"
        return f"{self.fate.value} by {self.by or 'something that no name leads to'}"


@dataclass(frozen=True, slots=True, repr=False)
class Retained(_PerCategory):
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


@dataclass(frozen=True, slots=True)
class Counters:
    """The device allocator's own peaks over the window, in bytes.

    ``estimated`` says that no allocator counted them: a simulated one did.
    """

    requested: int
    allocated: int
    active: int
    reserved: int
    estimated: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """One measured window: a test body or a region of it.

    Attributes:
        name: The region's name; ``""`` for the body.
        device: ``cpu`` or ``cuda:0``.
        estimated: True for any number that was not measured.
        peak: See `Peak`.
        retained: See `Retained`.
        steps: Bytes made in the window and alive at the end of each step, warm-up excluded.
        grown: What each origin holds more at the end of the last step than at the end of the first.
        counters: The allocator's own numbers; None where the device keeps none (the CPU).
        has_backward: False when nothing in the window kept anything for a backward pass, so that
            no ACTIVATION can exist by definition.
        unexplained_bytes: What does not reconcile with the allocator's own total, where there is
            one, or with what is alive at the end.
        blind_spots: What the figures do not contain, or may not, in a sentence each.
        level: How closely the window was looked at.
        notes: Sentences the reader of the numbers must know.
        failed_passes: A sentence for each category pass of a user that raised.
    """

    name: str
    device: str
    estimated: bool
    peak: Peak
    retained: Retained
    steps: tuple[int, ...] = ()
    grown: tuple[Contributor, ...] = ()
    counters: Counters | None = None
    has_backward: bool = True
    unexplained_bytes: int = 0
    blind_spots: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    level: Level = Level.FULL
    failed_passes: tuple[str, ...] = ()

    @property
    def growth(self) -> int | None:
        """Retained bytes per step over the measured steps; None with fewer than two of them.

        The rate is the rise from the first to the last measured step divided by the steps between,
        rounded up so that no growth is rounded away.
        """
        if len(self.steps) < 2:
            return None
        rise = self.steps[-1] - self.steps[0]
        return -(-rise // (len(self.steps) - 1))

    def to_json(self) -> dict[str, Json]:
        """Return plain builtins; `from_json` gives the same value back."""
        return {
            "name": self.name,
            "device": self.device,
            "estimated": self.estimated,
            "peak": {
                "total": self.peak.total,
                "time_ns": self.peak.time_ns,
                "at_peak": self.peak.at_peak.to_json(),
                "by_category": self.peak.by_category.to_json(),
                "live": [contributor_to_json(c) for c in self.peak.live],
                "live_by_category": [contributor_to_json(c) for c in self.peak.live_by_category],
            },
            "retained": {
                "total": self.retained.total,
                "by_category": self.retained.by_category.to_json(),
                "live": [contributor_to_json(c) for c in self.retained.live],
                "holders": [_holder_to_json(holder) for holder in self.retained.holders],
                "freed": self.retained.freed,
            },
            "steps": list(self.steps),
            "grown": [contributor_to_json(c) for c in self.grown],
            "counters": None
            if self.counters is None
            else {f.name: getattr(self.counters, f.name) for f in fields(self.counters)},
            "has_backward": self.has_backward,
            "unexplained_bytes": self.unexplained_bytes,
            "blind_spots": list(self.blind_spots),
            "notes": list(self.notes),
            "level": self.level.value,
            "failed_passes": list(self.failed_passes),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> Result:
        """Return the value that `to_json` gave. Raises one of `WRONG` for data of another shape."""
        counters = data["counters"]
        return cls(
            name=checked_text(data["name"]),
            device=checked_text(data["device"]),
            estimated=checked_truth(data["estimated"]),
            peak=_peak_from_json(data["peak"]),
            retained=_retained_from_json(data["retained"]),
            steps=checked_numbers(data["steps"]),
            grown=_contributors(data.get("grown", ())),
            counters=None if counters is None else _counters_from_json(counters),
            has_backward=checked_truth(data["has_backward"]),
            unexplained_bytes=checked_number(data["unexplained_bytes"]),
            blind_spots=checked_texts(data.get("blind_spots", ())),
            notes=checked_texts(data["notes"]),
            level=checked_member(_LEVELS, data.get("level", Level.FULL.value)),
            failed_passes=checked_texts(data.get("failed_passes", ())),
        )


_LEVELS = {level.value: level for level in Level}
_FATES = {fate.name.lower(): fate for fate in Fate}


def _peak_from_json(data: Mapping[str, Json]) -> Peak:
    return Peak(
        total=whole_number(data["total"]),
        time_ns=checked_number(data["time_ns"]),
        at_peak=CategoryBytes.from_json(data["at_peak"]),
        by_category=CategoryBytes.from_json(data["by_category"]),
        live=_contributors(data["live"]),
        live_by_category=_contributors(data["live_by_category"]),
    )


def _retained_from_json(data: Mapping[str, Json]) -> Retained:
    return Retained(
        total=whole_number(data["total"]),
        by_category=CategoryBytes.from_json(data["by_category"]),
        live=_contributors(data["live"]),
        holders=tuple(map(_holder_from_json, checked_list(data.get("holders", ())))),
        freed=whole_number(data.get("freed", 0)),
    )


def _contributors(data: Json) -> tuple[Contributor, ...]:
    return tuple(map(contributor_from_json, checked_list(data)))


def _counters_from_json(data: Mapping[str, Json]) -> Counters:
    estimated = checked_truth(data.get("estimated", False))
    amounts = {k: whole_number(v) for k, v in checked_object(data).items() if k != "estimated"}
    return Counters(**amounts, estimated=estimated)


def _holder_to_json(holder: Holder) -> dict[str, Json]:
    return {
        "bytes": holder.size_bytes,
        "count": holder.count,
        "fate": holder.fate.name.lower(),
        "by": holder.by,
    }


def _holder_from_json(data: Mapping[str, Json]) -> Holder:
    return Holder(
        whole_number(data["bytes"]),
        whole_number(data["count"]),
        checked_member(_FATES, data["fate"]),
        checked_text(data["by"]),
    )
