"""The errors a user can meet. Each has a slug, which docs/messages.md explains."""

from __future__ import annotations

from typing import ClassVar


class TorchmemError(Exception):
    """Base of every error raised on purpose; its text ends with the slug in brackets."""

    slug: ClassVar[str] = "torchmem"

    def __str__(self) -> str:
        return f"{super().__str__()} [{self.slug}]"


class SizeError(TorchmemError):
    """A size or tolerance that cannot be read."""

    slug = "bad-size"


class MarkerError(TorchmemError):
    """A marker or fixture argument that does not mean anything."""

    slug = "bad-argument"


class DeviceError(TorchmemError):
    """A device that is missing or cannot be measured."""

    slug = "no-device"


class TraceError(TorchmemError):
    """A stored trace that cannot be read."""

    slug = "bad-trace"


class BaselineError(TorchmemError):
    """A baseline file that cannot be read or written."""

    slug = "bad-baseline"


class RecordingError(TorchmemError):
    """A measurement that could not be taken."""

    slug = "not-measured"


class ReportError(TorchmemError):
    """A results file that cannot be read, or a report that cannot be written."""

    slug = "bad-report"
