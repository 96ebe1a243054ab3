"""The errors a user can meet. Each has a slug, which docs/messages.md explains."""

from __future__ import annotations


def is_torchmem_error(info: object) -> bool:
    """Return whether pytest's ``ExceptionInfo`` is of an error raised on purpose.

    A module that has this as ``__tracebackhide__`` is left out of the report of such an error,
    which then ends at the user's line. Our own mistakes keep their traceback.
    """
    return isinstance(getattr(info, "value", None), TorchmemError)


class TorchmemError(Exception):
    """Base of every error raised on purpose; its text ends with the slug in brackets."""

    slug = "torchmem"

    def __str__(self) -> str:
        return f"{self.sentence} [{self.slug}]"

    @property
    def sentence(self) -> str:
        """The text without the slug, to be part of a longer one that ends with a slug itself."""
        return super().__str__()


class SizeError(TorchmemError):
    """A size or tolerance that cannot be read."""

    slug = "bad-size"


class MarkerError(TorchmemError):
    """A marker or fixture argument that does not mean anything."""

    slug = "bad-argument"


class DeviceError(TorchmemError):
    """A device that is missing or cannot be measured."""

    slug = "no-device"


class DeviceNameError(DeviceError):
    """A device name that means nothing on any machine."""

    slug = "bad-argument"


class SimulationError(TorchmemError):
    """A GPU that cannot be simulated."""

    slug = "not-simulated"


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


class LimitError(TorchmemError, AssertionError):
    """A measurement outside pytest that is not as it must be; `unittest` counts it as a failure.

    Attributes:
        sentences: Everything that is wrong, the first line included.
        slug: What is wrong first: ``over-limit``, or why a limit could not be judged.
    """

    #: Tracebacks name it as users import it.
    __module__ = "pytest_torchmem"

    slug = "over-limit"

    def __init__(self, sentence: str, sentences: tuple[str, ...] = (), slug: str = slug) -> None:
        super().__init__(sentence)
        self.sentences = sentences or (sentence,)
        self.slug = slug


class SnapshotError(TorchmemError):
    """A file that is no snapshot of torch's allocator."""

    slug = "bad-snapshot"


class RankError(TorchmemError):
    """Results that are not those of all ranks of one job."""

    slug = "bad-ranks"


class EstimateError(TorchmemError):
    """A program whose memory cannot be estimated without running it."""

    slug = "not-estimated"


class RequestError(TorchmemError):
    """A sequence of requests that no program could have made."""

    slug = "bad-requests"


class AllocatorSettingsError(TorchmemError):
    """Allocator settings that cannot be read, or that ask for something not simulated."""

    slug = "bad-allocator-settings"


class LongBodyError(TorchmemError):
    """A body whose recording has become large. It is said while the body runs, and not raised."""

    slug = "long-body"
