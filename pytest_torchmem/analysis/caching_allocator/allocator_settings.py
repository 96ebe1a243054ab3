"""The allocator's settings, and the sizes that follow from them alone.

Names, defaults and limits are those of torch's ``c10/core/AllocatorConfig.{h,cpp}`` and
``c10/cuda/CUDAAllocatorConfig.{h,cpp}`` (2.13, where every option below exists).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

from pytest_torchmem.values.errors import AllocatorSettingsError
from pytest_torchmem.values.units import MiB

BLOCK_UNIT_BYTES: Final = 512
SMALL_LIMIT_BYTES: Final = 1 * MiB
SMALL_SEGMENT_BYTES: Final = 2 * MiB
SEGMENT_UNIT_BYTES: Final = 2 * MiB
OWN_SEGMENT_BYTES: Final = 10 * MiB
UNLIMITED_BYTES: Final = 2**63 - 1

#: The release of torch whose rules hold where none is named.
NEWEST: Final = (2, 13)

_DIVISION_SLOTS: Final = 16
# Options of the pinned host allocator, and of locks: no byte on the device depends on them.
_WITHOUT_EFFECT: Final = frozenset(
    {
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "pinned_use_hip_host_register",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_free_catch_all",
        "pinned_max_round_threshold_mb",
        "pinned_max_cached_size_mb",
        "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc",
    }
)
_MOST_DIGITS = 19
_OPTION = re.compile(r"([^,:\[\]]+):(\[[^\]]*\]|[^,\[\]]*)(,|$)")


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """The options of torch's native CUDA caching allocator that decide where bytes go.

    Attributes:
        large_segment_bytes: Segment size for requests above 1 MiB and below 10 MiB, and the page
            size of large expandable segments.
        max_split_bytes: Blocks of this size or more are not split. `UNLIMITED_BYTES` by default.
        max_non_split_rounding_bytes: How much larger than such a request a cached block may be.
        power2_divisions: 16 numbers; slot i rules requests of 2**i to 2**(i+1) MiB, the first and
            the last slot also everything below and above. 0 and 1 mean no rounding.
        garbage_collection_threshold: Share of the allowed bytes above which cached segments are
            given back before new ones are made; 0 is off. It does nothing while
            ``per_process_memory_fraction`` is 1.
        per_process_memory_fraction: Share of the capacity that the process may reserve, as set by
            the option or by ``torch.cuda.set_per_process_memory_fraction``.
        expandable_segments: Map pages into growing segments instead of calling cudaMalloc.
        throw_on_cudamalloc_oom: Refuse a request above the allowed bytes at once, without giving
            cached memory back first.
    """

    large_segment_bytes: int = 20 * MiB
    max_split_bytes: int = UNLIMITED_BYTES
    max_non_split_rounding_bytes: int = 20 * MiB
    power2_divisions: tuple[int, ...] = (0,) * _DIVISION_SLOTS
    garbage_collection_threshold: float = 0.0
    per_process_memory_fraction: float = 1.0
    expandable_segments: bool = False
    throw_on_cudamalloc_oom: bool = False

    @classmethod
    def parse(cls, text: str, release: tuple[int, int] = NEWEST) -> AllocatorSettings:
        """Return the settings that ``PYTORCH_CUDA_ALLOC_CONF`` or ``PYTORCH_ALLOC_CONF`` hold.

        ``release`` is the release of torch that reads them, such as ``(2, 9)``.
        Options of the pinned host allocator are accepted and change nothing. Raises
        `AllocatorSettingsError` for an unknown option, for a value that torch refuses, and for
        ``backend:cudaMallocAsync`` and ``graph_capture_record_stream_reuse:True``, which are not
        simulated.
        """
        options = list(_options(text))
        # The large segment's size is the lower limit and the default of other options, so it is
        # read before them wherever it stands.
        options.sort(key=lambda option: option[0] != "large_segment_size_mb")
        settings = cls()
        for name, value in options:
            settings = _with_option(settings, name, value, release)
        return settings

    @property
    def limits_process(self) -> bool:
        """Return whether the process may reserve less than the device has."""
        return self.per_process_memory_fraction < 1.0

    @property
    def collects_garbage(self) -> bool:
        """Return whether cached segments are given back before the device is full."""
        return self.limits_process and self.garbage_collection_threshold > 0.0

    def block_bytes(self, request_bytes: int) -> int:
        """The size of the block that a request needs, before any splitting."""
        if request_bytes < BLOCK_UNIT_BYTES:
            return BLOCK_UNIT_BYTES
        slot = (request_bytes // MiB).bit_length() - 1
        divisions = self.power2_divisions[min(max(slot, 0), _DIVISION_SLOTS - 1)]
        if divisions > 1 and request_bytes > BLOCK_UNIT_BYTES * divisions:
            step = (1 << (request_bytes.bit_length() - 1)) // divisions
        else:
            step = BLOCK_UNIT_BYTES
        return -(-request_bytes // step) * step

    def segment_bytes(self, block_bytes: int) -> int:
        """Return how much cudaMalloc gets asked for when no cached block serves this size."""
        if block_bytes <= SMALL_LIMIT_BYTES:
            return SMALL_SEGMENT_BYTES
        if block_bytes < OWN_SEGMENT_BYTES:
            return self.large_segment_bytes
        return -(-block_bytes // SEGMENT_UNIT_BYTES) * SEGMENT_UNIT_BYTES


def _options(text: str) -> list[tuple[str, str]]:
    """Split ``name:value,name:[key:value,...]``; white space means nothing, as in torch."""
    packed = "".join(text.split()).rstrip(",")
    items, position = [], 0
    while position < len(packed):
        match = _OPTION.match(packed, position)
        if match is None:
            raise AllocatorSettingsError(
                f"cannot read allocator settings {text!r} at {packed[position:]!r}; "
                "options are written name:value and separated by commas"
            )
        items.append((match.group(1), match.group(2)))
        position = match.end()
    return items


def _with_option(
    settings: AllocatorSettings, name: str, value: str, release: tuple[int, int]
) -> AllocatorSettings:
    least_mb = settings.large_segment_bytes // MiB
    match name:
        case "large_segment_size_mb":
            size = _megabytes(name, value, OWN_SEGMENT_BYTES // MiB + 1)
            return replace(settings, large_segment_bytes=size, max_non_split_rounding_bytes=size)
        case "max_split_size_mb":
            return replace(settings, max_split_bytes=_megabytes(name, value, least_mb))
        case "max_non_split_rounding_mb":
            return replace(settings, max_non_split_rounding_bytes=_megabytes(name, value, least_mb))
        case "roundup_power2_divisions":
            return replace(settings, power2_divisions=_divisions(value, release))
        case "garbage_collection_threshold":
            share = _share(name, value, with_one=False)
            return replace(settings, garbage_collection_threshold=share)
        case "per_process_memory_fraction":
            share = _share(name, value, with_one=True)
            return replace(settings, per_process_memory_fraction=share)
        case "expandable_segments":
            return replace(settings, expandable_segments=_truth(name, value))
        case "throw_on_cudamalloc_oom":
            return replace(settings, throw_on_cudamalloc_oom=_truth(name, value))
    _refuse_unless_without_effect(name, value)
    return settings


def _refuse_unless_without_effect(name: str, value: str) -> None:
    if name in _WITHOUT_EFFECT or (name == "backend" and value == "native"):
        return
    if name == "graph_capture_record_stream_reuse" and not _truth(name, value):
        return
    if name in ("backend", "graph_capture_record_stream_reuse"):
        raise AllocatorSettingsError(
            f"{name}:{value} cannot be simulated: only torch's native caching allocator, "
            "without reuse inside graph captures, is; leave the option out"
        )
    raise AllocatorSettingsError(f"unknown allocator option {name!r} in the settings")


def _whole(name: str, value: str) -> int:
    if not value.isascii() or not value.isdigit():
        raise AllocatorSettingsError(f"{name} needs a whole number, got {value!r}")
    if len(value) > _MOST_DIGITS:
        raise AllocatorSettingsError(f"{name} has {len(value)} digits, more than torch reads")
    return int(value)


def _megabytes(name: str, value: str, least_mb: int) -> int:
    size_mb = _whole(name, value)
    if size_mb < least_mb:
        raise AllocatorSettingsError(f"{name} must be at least {least_mb}, got {size_mb}")
    return min(size_mb * MiB, UNLIMITED_BYTES)


def _share(name: str, value: str, *, with_one: bool) -> float:
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    if not (0.0 < share < 1.0 or (with_one and share in (0.0, 1.0))):
        raise AllocatorSettingsError(f"{name} must lie between 0 and 1, got {value!r}")
    return share


def _truth(name: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise AllocatorSettingsError(f"{name} must be True or False, got {value!r}")
    return value == "True"


def _power_of_two(name: str, value: str, *, or_zero: bool) -> int:
    number = _whole(name, value)
    if number.bit_count() != 1 and not (or_zero and number == 0):
        raise AllocatorSettingsError(f"{name} needs powers of two, got {value!r}")
    return number


def _divisions(value: str, release: tuple[int, int]) -> tuple[int, ...]:
    """Read one number for all sizes, or a list such as ``[256:1,512:2,>:4]`` of sizes in MiB.

    As in torch, the first entry also rules all smaller sizes, ``>`` all larger ones, and a size
    between two entries that has none of its own is not rounded. Before torch 2.10, ``>`` also
    replaces the entry before it.
    """
    rest = 0 if release < (2, 10) else 1
    name = "roundup_power2_divisions"
    if not value.startswith("["):
        return (_power_of_two(name, value, or_zero=False),) * _DIVISION_SLOTS
    slots = [0] * _DIVISION_SLOTS
    last = 0
    for position, entry in enumerate(value.strip("[]").split(",")):
        boundary, _, count = entry.partition(":")
        divisions = _power_of_two(name, count, or_zero=True)
        if boundary == ">":
            slots[last + rest :] = [divisions] * (_DIVISION_SLOTS - last - rest)
            continue
        size_mb = _power_of_two(name, boundary, or_zero=False)
        last = min(size_mb.bit_length() - 1, _DIVISION_SLOTS - 1)
        if position == 0:
            slots[:last] = [divisions] * last
        slots[last] = divisions
    return tuple(slots)
