"""The errors a user can meet. Each has a slug, which docs/messages.md explains."""

from __future__ import annotations

import signal


def is_torchmem_error(info: object) -> bool:
    """Return whether pytest's ``ExceptionInfo`` is of an error raised on purpose.

    A module that has this as ``__tracebackhide__`` is left out of the report of such an error,
    which then ends at the user's line. Our own mistakes keep their traceback.
    """
    return isinstance(getattr(info, "value", None), TorchmemError)


class TorchmemError(Exception):
    """Base of every error raised on purpose; its text ends with the slug in brackets."""

    slug = "torchmem"

    def __init_subclass__(cls, slug: str = "") -> None:
        cls.slug = slug or cls.slug

    def __str__(self) -> str:
        return f"{self.sentence} [{self.slug}]"

    @property
    def sentence(self) -> str:
        """The text without the slug, to be part of a longer one that ends with a slug itself."""
        return super().__str__()

    @property
    def sentences(self) -> tuple[str, ...]:
        """Everything that is wrong, the first line first."""
        return (self.sentence,)


class SizeError(TorchmemError, slug="bad-size"):
    """A size or tolerance that cannot be read."""


class MarkerError(TorchmemError, slug="bad-argument"):
    """A marker or fixture argument that does not mean anything."""


class DeviceError(TorchmemError, slug="no-device"):
    """A device that is missing or cannot be measured."""


class DeviceNameError(DeviceError, slug="bad-argument"):
    """A device name that means nothing on any machine."""


class SimulationError(TorchmemError, slug="not-simulated"):
    """A GPU that cannot be simulated."""


class NotComputedError(TorchmemError, slug="not-computed"):
    """A body whose memory rests on values that a simulated GPU did not compute."""


class TraceError(TorchmemError, slug="bad-trace"):
    """A stored trace that cannot be read."""


class BaselineError(TorchmemError, slug="bad-baseline"):
    """A baseline file that cannot be read or written."""


class RecordingError(TorchmemError, slug="not-measured"):
    """A measurement that could not be taken."""


class ReportError(TorchmemError, slug="bad-report"):
    """A results file that cannot be read, or a report that cannot be written."""


class LimitError(TorchmemError, AssertionError, slug="over-limit"):
    """A measurement outside pytest that is not as it must be; `unittest` counts it as a failure.

    Its ``slug`` is what is wrong first: ``over-limit``, or why a limit could not be judged.
    """

    #: Tracebacks name it as users import it.
    __module__ = "pytest_torchmem.types"

    def __init__(
        self, sentence: str, sentences: tuple[str, ...] = (), slug: str = "over-limit"
    ) -> None:
        super().__init__(sentence)
        self._sentences = sentences
        self.slug = slug

    @property
    def sentences(self) -> tuple[str, ...]:
        return self._sentences or super().sentences


class SnapshotError(TorchmemError, slug="bad-snapshot"):
    """A file that is no snapshot of torch's allocator."""


class RankError(TorchmemError, slug="bad-ranks"):
    """Results that are not those of all ranks of one job."""


class EstimateError(TorchmemError, slug="not-estimated"):
    """A program whose memory cannot be estimated without running it."""


class RequestError(TorchmemError, slug="bad-requests"):
    """A sequence of requests that no program could have made."""


class AllocatorSettingsError(TorchmemError, slug="bad-allocator-settings"):
    """Allocator settings that cannot be read, or that ask for something not simulated."""


def is_of_a_signal(error: BaseException) -> bool:
    """Return whether a signal's handler raised an error: then it is the program's, whatever ran."""
    codes = {
        getattr(handler, "__code__", None)
        for handler in map(signal.getsignal, signal.valid_signals())
    }
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code not in codes:
        traceback = traceback.tb_next
    return traceback is not None
