"""The stored side of a comparison: an entry, its environment, and when a number has changed."""

from __future__ import annotations

import enum
import hashlib
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, TypeAlias

from pytest_torchmem.values.contributors import Category, CategoryBytes, Contributor
from pytest_torchmem.values.json_values import JsonFields
from pytest_torchmem.values.results import Result
from pytest_torchmem.values.units import MiB, format_apart, format_change, format_share, format_size

TOTAL: Final = "total"
RESERVED: Final = "reserved"
_SEGMENT_BYTES: Final = 20 * MiB
"""What CUDA's allocator reserves for a request of 1 to 10 MiB."""

KEPT_CONTRIBUTORS: Final = 64
"""How many of the largest contributors are stored: as many as a result has."""


class Change(enum.Enum):
    """The difference between an entry and the measurement.

    The words are the same in options, report headings and documentation. An entry is unused when a
    run has no test for it, and gone when the second of two files does not have it.
    """

    NOT_COMPARED = "not compared"
    SAME = "same"
    WITHIN = "within tolerance"
    NEW = "new"
    GROWN = "grown"
    SHRUNK = "shrunk"
    UNUSED = "unused"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Allowance:
    """The distance that a number may keep from its baseline: a share, or a few bytes if small.

    Attributes:
        tolerance: A share of the number.
        floor_bytes: What a number may differ by at least, however small it is.
        floor_share: The share of the test's peak that the floor cannot exceed.
        aside_bytes: What of a number the share is not taken of: the workspaces in a total.
    """

    tolerance: float
    floor_bytes: int
    floor_share: float = math.inf
    aside_bytes: int = 0

    def at(self, peak_bytes: int) -> Allowance:
        """Return the allowance for a test with this peak: in a small test the floor is small."""
        # A floor that was given holds for all tests, also for one that used nothing.
        if self.floor_share == math.inf or self.floor_share * peak_bytes >= self.floor_bytes:
            return self
        return replace(self, floor_bytes=int(self.floor_share * peak_bytes))

    def bytes_for(self, baseline_bytes: int) -> int:
        return max(self._share_of(baseline_bytes), self.floor_bytes)

    def text_for(self, baseline_bytes: int) -> str:
        """Return the part that decides at this size: ``tolerance 2 %`` or ``floor 1.0 MiB``."""
        if self._share_of(baseline_bytes) >= self.floor_bytes:
            of_rest = " of all but workspaces" if self.aside_bytes else ""
            return f"tolerance {self.tolerance * 100:g} %{of_rest}"
        return f"floor {format_size(self.floor_bytes)}"

    def _share_of(self, baseline_bytes: int) -> int:
        return int((baseline_bytes - self.aside_bytes) * self.tolerance)

    def compare(self, measured_bytes: int, baseline_bytes: int) -> Change:
        allowed = self.bytes_for(baseline_bytes)
        if measured_bytes > baseline_bytes + allowed:
            return Change.GROWN
        if measured_bytes < baseline_bytes - allowed:
            return Change.SHRUNK
        return Change.SAME if measured_bytes == baseline_bytes else Change.WITHIN


def overall(changes: Collection[Change]) -> Change:
    """Return how a test differs from its baseline, from how each of its numbers does."""
    order = (Change.GROWN, Change.SHRUNK, Change.WITHIN)
    return next((change for change in order if change in changes), Change.SAME)


@dataclass(frozen=True, slots=True)
class Reserved(JsonFields):
    """The most that an allocator reserved for a body, and what it had free before, in bytes.

    Both are 0 where another run may count otherwise: on a GPU that is no simulated one.
    """

    added: int = 0
    free_before: int = 0

    @classmethod
    def measured(cls, result: Result) -> Reserved:
        counters = result.counters
        if counters is None or not counters.repeatable:
            return cls()
        added = counters.reserved - counters.reserved_before
        return cls(added, counters.reserved_before - counters.active_before)


@dataclass(frozen=True, slots=True)
class BaselineEntry(JsonFields):
    """One stored measurement.

    Attributes:
        total: The peak footprint in bytes.
        at_peak: Its composition at that moment.
        peaks: Each category's own peak.
        live: The largest contributors, each at its category's own peak, largest first.
        retained: What was still alive at the end, by category.
        retained_live: The largest contributors to it, largest first.
        at_peak_live: The largest contributors at the moment of the total's peak, largest first.
        reserved: What the allocator of a simulated GPU reserved.
    """

    total: int
    at_peak: CategoryBytes
    peaks: CategoryBytes
    live: Sequence[Contributor] = ()
    retained: CategoryBytes = field(default_factory=CategoryBytes)
    retained_live: Sequence[Contributor] = ()
    at_peak_live: Sequence[Contributor] = ()
    reserved: Reserved = Reserved()

    @property
    def is_composed(self) -> bool:
        """False where only each category's own peak is known: the origins were lost."""
        return self.at_peak.unknown <= self.peaks.unknown

    @classmethod
    def of(cls, result: Result) -> BaselineEntry:
        """Return the entry that a result is stored as."""
        entry = cls.whole(result)
        sides = map(_largest, (entry.live, entry.retained_live, entry.at_peak_live))
        live, retained_live, at_peak_live = sides
        return replace(entry, live=live, retained_live=retained_live, at_peak_live=at_peak_live)

    @classmethod
    def whole(cls, result: Result) -> BaselineEntry:
        """Return the same with every contributor that the result names."""
        peak, retained = result.peak, result.retained
        return cls(
            total=peak.total,
            at_peak=peak.at_peak,
            peaks=peak.by_category,
            live=peak.live_by_category or peak.live,
            retained=retained.by_category,
            retained_live=retained.live,
            at_peak_live=peak.live,
            reserved=Reserved.measured(result),
        )


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of an entry that are compared: the peak, that of each category, the retained.

    What is reserved depends on the room that the body finds. It tells no two entries apart.
    """

    total: int
    peaks: CategoryBytes
    retained: int
    reserved: Reserved = field(default=Reserved(), compare=False)

    @classmethod
    def of(cls, entry: BaselineEntry) -> Numbers:
        return cls(entry.total, entry.peaks, entry.retained.total, entry.reserved)

    @classmethod
    def measured(cls, result: Result) -> Numbers:
        peak, retained = result.peak, result.retained.total
        return cls(peak.total, peak.by_category, retained, Reserved.measured(result))

    @property
    def by_key(self) -> dict[str, int]:
        """The total, each category's own peak, and what is retained, in this order.

        What is reserved is the last, where it is known.
        """
        peaks = ((category._value_, amount) for category, amount in self.peaks.items())
        reserved = {} if self.reserved == Reserved() else {RESERVED: self.reserved.added}
        return {TOTAL: self.total, **dict(peaks), "retained": self.retained, **reserved}

    def allowance(self, key: str, allowance: Allowance) -> Allowance:
        """Return how far a number of a test like this may be from its baseline.

        Libraries take as much for themselves in a small test as in a large one. So their workspaces
        widen the allowance of no number but their own. A segment more or less is reserved for a
        small reason, and none for what had room in those that were there.
        """
        if key == RESERVED:
            floor_bytes = max(_SEGMENT_BYTES, allowance.floor_bytes) + self.reserved.free_before
            return replace(allowance, floor_bytes=floor_bytes, floor_share=math.inf)
        if key == Category.WORKSPACE._value_:
            return allowance.at(self.total)
        workspaces = min(self.peaks.workspace, self.total)
        aside_bytes = workspaces if key == TOTAL else 0
        return replace(allowance.at(self.total - workspaces), aside_bytes=aside_bytes)

    def by_workspaces(self, key: str, after: Numbers) -> int:
        """Return by how much a number differs only because workspaces do: they have their own."""
        whole, own = after.total - self.total, after.peaks.workspace - self.peaks.workspace
        least, most = sorted((0, whole))
        return min(max(own, least), most) if key == TOTAL else 0

    def changes(self, after: Numbers) -> list[ChangedNumber]:
        """Return each number beside the one of a later entry, as far as they can be compared."""
        later = after.by_key
        return [
            ChangedNumber(key, before, later[key])
            for key, before in self.by_key.items()
            if key in later
        ]


@dataclass(frozen=True, slots=True)
class ChangedNumber(JsonFields):
    """The number that a change of an entry is told by.

    Attributes:
        key: ``total`` for the peak, a category for its own peak, or ``retained``.
    """

    key: str
    before_bytes: int
    after_bytes: int

    @property
    def by_bytes(self) -> int:
        return self.after_bytes - self.before_bytes

    @property
    def name(self) -> str:
        return "peak" if self.key == TOTAL else self.key.replace("_", " ")

    @property
    def sizes(self) -> str:
        """Both sizes: ``14 MiB -> 24 MiB``, of another than the peak ``retained 0 B -> 4 B``."""
        before, after = format_apart(self.before_bytes, self.after_bytes)
        return self._named(f"{before} -> {after}")

    @property
    def by(self) -> str:
        """The change: ``+33.0 MiB (+30 %)``, of another than the peak ``retained +4.0 MiB``."""
        if not self.by_bytes:
            return f"{self.name} as before"
        share = format_share(self.by_bytes, self.before_bytes)
        return self._named(format_change(self.by_bytes) + (f" ({share})" if share else ""))

    @property
    def sentence(self) -> str:
        """Both sizes and the change: ``retained 2.0 MiB -> 3.0 MiB, +1.0 MiB (+50 %)``."""
        return f"{self.sizes}, {replace(self, key=TOTAL).by}"

    def _named(self, text: str) -> str:
        return text if self.key == TOTAL else f"{self.name} {text}"


def told_change(
    before: Numbers, after: Numbers, allowance: Allowance
) -> tuple[Change, ChangedNumber]:
    """Return how an entry changed, and the number to tell that by.

    It is the total where that changed as the whole entry did, else what changed most so.
    """
    numbers = before.changes(after)
    changes = [
        before.allowance(n.key, allowance).compare(
            n.after_bytes - before.by_workspaces(n.key, after), n.before_bytes
        )
        for n in numbers
    ]
    change = overall(changes)
    if changes[0] is change:
        return change, numbers[0]
    so = [n for n, its in zip(numbers, changes, strict=True) if its is change]
    return change, max(so, key=lambda n: abs(n.by_bytes))


@dataclass(frozen=True)
class Reference:
    """The stored entry that a measurement is compared with.

    Most measurements are compared by their numbers alone. So the rest of the entry, which is in a
    file of its own, is read when somebody asks for it.

    Attributes:
        numbers: The stored numbers.
        read_entry: Returns the whole entry.
        environment: The name of the environment that a user told us to compare with instead of
            the one being run; ``""`` where it is that of the run.
    """

    numbers: Numbers
    read_entry: Callable[[], BaselineEntry]
    environment: str = ""

    @classmethod
    def of(cls, entry: BaselineEntry, environment: str = "") -> Reference:
        return cls(Numbers.of(entry), lambda: entry, environment)

    @cached_property
    def entry(self) -> BaselineEntry:
        return self.read_entry()


def _largest(live: Iterable[Contributor]) -> tuple[Contributor, ...]:
    # Ties are broken by identity so that two equal runs write equal files. There are few.
    ranked = sorted(live, key=lambda c: -c.size_bytes)
    if len({c.size_bytes for c in ranked}) < len(ranked):
        ranked.sort(key=lambda c: (-c.size_bytes, c.identity, c.source.line if c.source else 0))
    return tuple(ranked[:KEPT_CONTRIBUTORS])


# An environment is what can differ between two runs of one commit. What the code itself chooses
# (the default dtype, deterministic algorithms, cuDNN's benchmark mode) is not part of it: a
# change of that is a change of the code, and shows as grown or shrunk.

Environment: TypeAlias = Mapping[str, str]

KEYS: Final = ("device", "capability", "torch", "runtime", "allocator", "libraries")
"""The parts of an environment, the one that changes most bytes first; ``""`` stands for the usual.

``device`` is the model, ``capability`` the GPU's architecture or a CPU's that is not x86-64,
``torch`` its minor version, ``runtime`` CUDA or ROCm with its major version, ``allocator`` and
``libraries`` are settings that are not the default. One process of several that run as one job has
a ``rank`` as well: ``"1 of 2"``.
"""


def complete(environment: Environment) -> dict[str, str]:
    """Return an environment with all parts; a hook of a project may leave some out."""
    return {key: environment.get(key, "") for key in sorted({*KEYS, *environment})}


def device_shown(environment: Environment) -> str:
    """Return the device; a simulated GPU with the cuDNN that plans for it."""
    cudnn = environment.get("cudnn", "")
    return environment.get("device", "") + (f" with cuDNN {cudnn}" if cudnn else "")


def told_differences(stored: Environment, present: Environment) -> str:
    """Return where two complete environments differ: ``torch 1, and this run has torch 2``."""
    names = sorted(n for n in {**present, **stored} if stored.get(n, "") != present.get(n, ""))
    sides = ([f"{n} {side.get(n) or 'as usual'}" for n in names] for side in (stored, present))
    return ", and this run has ".join(map(", ".join, sides))


def environment_name(environment: Environment) -> str:
    """Return a folder name for an environment: ``cpu-torch2.13``, ``nvidia-h200-sm90-torch2.13``.

    Two environments may share a name when their device models differ in punctuation only; the file
    holds the environment in full, so they are told apart when it is read.
    """
    parts = [_slug(environment["device"])]
    if capability := environment.get("capability"):
        # A capability in numbers, as torch gives it: (9, 0) is sm90.
        parts.append(f"sm{capability.replace('.', '')}" if "." in capability else _slug(capability))
    if runtime := environment.get("runtime"):
        parts.append(_slug(runtime))
    parts.append("torch" + re.sub(r"[^a-z0-9.]+", "-", environment["torch"].lower()))
    for key, prefix in (("allocator", "alloc"), ("libraries", "libs")):
        if settings := environment.get(key):
            parts.append(prefix + hashlib.sha256(settings.encode()).hexdigest()[:8])
    if rank := environment.get("rank"):
        parts.append("rank" + rank.replace(" ", ""))
    return "-".join(parts)


def nearest(wanted: Environment, others: Iterable[Environment]) -> Environment | None:
    """Return the environment whose numbers are most likely the same; None when all are too far.

    The order is that of `KEYS`: the same device comes before the same capability, that before the
    closest version of torch, and so on. The CPU and a GPU are never near each other.
    """
    near = [other for other in others if same_kind(wanted, other)]
    ranked = sorted(near, key=lambda other: (_distance(wanted, other), environment_name(other)))
    return next((other for other in ranked if complete(other) != complete(wanted)), None)


def same_kind(one: Environment, other: Environment) -> bool:
    """True for two CPUs and for two GPUs: all else may be compared where a user says so."""
    return (one.get("device") == "cpu") == (other.get("device") == "cpu")


def _distance(wanted: Environment, other: Environment) -> tuple[int, ...]:
    distances: list[int] = []
    for key in KEYS:
        distances.append(int(wanted.get(key, "") != other.get(key, "")))
        if key == "torch":  # major and minor versions, and at equal distance the older one first
            here, there = _version(wanted.get(key, "")), _version(other.get(key, ""))
            distances[-1:] = abs(here[0] - there[0]), abs(here[1] - there[1]), int(there > here)
    return tuple(distances)


def _version(text: str) -> tuple[int, int]:
    major, minor, *_ = [*(int(number) for number in re.findall(r"\d{1,9}", text)), 0, 0]
    return major, minor


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
