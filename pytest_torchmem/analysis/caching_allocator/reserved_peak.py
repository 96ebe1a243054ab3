"""Why more was reserved than was in use: what was free when the most was reserved."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_torchmem.values.units import format_size


@dataclass(frozen=True, slots=True)
class ReservedPeak:
    """The first moment at which the most was reserved, and what was free then. All estimated.

    At that moment a request had just been turned down by every free block, so what was free served
    no purpose: that is fragmentation. Later moments may have as much reserved and more of it free,
    up to all of it when the program is done; that is a cache, and would have served a request.

    torch's own words for it: what its out-of-memory error calls "reserved by PyTorch but
    unallocated" is `free_bytes`, and with it freed blocks that other streams still use, for which
    fragmentation is not to blame. ``inactive_split_bytes`` of ``torch.cuda.memory_stats()``, its
    "inactive, non-releasable memory", is the part of `free_bytes` that could not be given back to
    the device either, because the rest of its segment was in use.

    Attributes:
        row: The request that more was reserved for; 0 where no later moment was fuller than the
            start.
        requested_bytes: What it asked for.
        grown_bytes: How much more was reserved for it: a segment, or pages of an expandable one. 0
            where a run began with the most reserved, and the moment is the fullest one.
        reserved_bytes: What was reserved then.
        active_bytes: How much of that was in use.
        inactive_split_bytes: Free parts of segments that were partly in use, the rest of a new one
            included; those of expandable segments are not counted, as by torch.
    """

    row: int = 0
    requested_bytes: int = 0
    grown_bytes: int = 0
    reserved_bytes: int = 0
    active_bytes: int = 0
    inactive_split_bytes: int = 0

    @property
    def free_bytes(self) -> int:
        """The bytes that were reserved and not in use."""
        return self.reserved_bytes - self.active_bytes

    @property
    def fragmentation(self) -> float:
        """The share of the reserved bytes that was free; 0.0 where nothing was reserved."""
        return self.free_bytes / self.reserved_bytes if self.reserved_bytes else 0.0

    def __str__(self) -> str:
        """The share, and where it comes from: ``fragmentation 62% (estimated): of 40.0 MiB, ...``.

        At 0% there is no more to say.
        """
        share = f"fragmentation {self.fragmentation:.0%} (estimated)"
        if share.startswith("fragmentation 0%"):
            return share
        reserved, free = format_size(self.reserved_bytes), format_size(self.free_bytes)
        if not self.grown_bytes:
            return f"{share}: of {reserved}, {free} were free at the fullest moment{self._kept}"
        return (
            f"{share}: of {reserved}, {free} were free when the last "
            f"{format_size(self.grown_bytes)} were reserved for an allocation of "
            f"{format_size(self.requested_bytes)}{self._kept}"
        )

    @property
    def _kept(self) -> str:
        if not self.inactive_split_bytes:
            return ""
        if self.inactive_split_bytes == self.free_bytes:
            return "; none of that could be given back (inactive split)"
        kept = format_size(self.inactive_split_bytes)
        return f"; {kept} of that could not be given back (inactive split)"
