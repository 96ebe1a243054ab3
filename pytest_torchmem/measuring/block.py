"""Measuring outside a test: a ``with`` block or a function, in any process.

from pytest_torchmem import measure

with measure("train step", activation="1GiB") as step:
    model(batch).sum().backward()
print(step.peak.total)
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, ParamSpec, Protocol, TypeVar, overload

from pytest_torchmem.analysis.caching_allocator.requests import Requests
from pytest_torchmem.analysis.gpu_questions import with_counters
from pytest_torchmem.analysis.judge.counters import told_by_allocator
from pytest_torchmem.analysis.judge.holders import explain_retained
from pytest_torchmem.analysis.judge.verdict import judge_limits
from pytest_torchmem.contexts import Around, gc_paused
from pytest_torchmem.measuring.body_measurement import (
    BodyMeasurement,
    BodyRegion,
    Region,
    running,
)
from pytest_torchmem.measuring.saving import UNNAMED, write_windows
from pytest_torchmem.values.errors import LimitError, MarkerError, RecordingError, is_torchmem_error
from pytest_torchmem.values.findings import (
    Size,
    SizeByDevice,
    limits_on,
    read_limits,
    require_steps,
    sizes_now,
)
from pytest_torchmem.values.json_values import shown
from pytest_torchmem.values.measured import Window, sentences
from pytest_torchmem.values.picture import Picture
from pytest_torchmem.values.results import Result
from pytest_torchmem.values.units import (
    MOST_RUNS,
    Device,
    device_text,
    is_run_count,
    reads_as_size,
)

__tracebackhide__ = is_torchmem_error

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

OWNER: Final = "measure"
_OPEN: Final = "it is still open"


class Measured(Protocol[P, R_co]):
    """A decorated function. ``results`` has one result for each call that returned."""

    results: Sequence[Result]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


@dataclass(frozen=True, slots=True)
class _Expected:
    """The arguments of `measure`; ``""`` stands for the best device there is."""

    device: str = ""
    warmup: int = 0
    limits: Mapping[str, Size | SizeByDevice] = field(default_factory=dict)
    output: str | os.PathLike[str] | None = None


class Results(Sequence[Result]):
    """The results of the calls of a function, in order."""

    def __init__(self) -> None:
        self._windows: list[Measure | Result] = []

    def add(self, window: Measure | Result) -> None:
        """Take in a result, or a part of a measurement that goes on, to be asked later."""
        self._windows.append(window)

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: Any) -> Any:
        for place in range(len(self._windows))[index] if isinstance(index, slice) else [index]:
            window = self._windows[place]
            self._windows[place] = window if isinstance(window, Result) else window.result
        return self._windows[index]


class Measure(Region):
    """One measured block: `measure` makes it.

    Its numbers can be read as soon as the block is over; while it is open, and where its body
    raised, reading one raises `RecordingError`. Entered again, it measures anew.
    """

    def __init__(self, name: str, expected: _Expected, results: Results | None = None) -> None:
        self.name = name
        self._expected = expected
        self._results = results
        self._measurement: BodyMeasurement | None = None
        self._region: BodyRegion | None = None
        self._steps_of = ""
        self._stack = ExitStack()
        self._inner: list[BodyRegion] = []
        self._result: Result | None = None
        self._missing = "nothing has been measured yet"

    @property
    def device(self) -> str:
        """The device that it measures, such as ``cpu`` or ``cuda:0``. Raises `DeviceError`."""
        return (self._measurement or running() or self._new_measurement()).device

    def __enter__(self) -> Measure:
        if self._results is None and self._expected.warmup:
            raise MarkerError(
                "measure, warmup: a with block cannot be run twice; decorate a function with "
                "measure(warmup=1), or mark steps with `for _ in block.steps(n, warmup=1)`"
            )
        if self._missing == _OPEN:
            raise RecordingError(f"{self.shown_name!r} is measuring already")
        self._region, self._result, self._inner = None, None, []
        outer = running()
        if outer is None:
            self._measurement, self._steps_of = self._new_measurement(), ""
            self._measurement.start()
        else:
            if self._expected.device and (own := self._new_measurement().device) != outer.device:
                raise RecordingError(
                    f"{self.shown_name!r} cannot measure {own} within a measurement of "
                    f"{outer.device}; measure one after the other"
                )
            self._measurement, self._steps_of = outer, f"steps of region {len(outer.regions)}"
            self._region = self._stack.enter_context(outer.region(self.name, self._steps_of))
        self._missing = _OPEN
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is not None:
            self._missing = "its body raised"
            with suppress(Exception):  # the body's own exception counts
                self._stop(cancel=True)
            return
        self._missing = "it could not be recorded"
        try:
            with gc_paused():
                self._stop()
                self._missing = ""
                self._judge()
        except BaseException:  # a signal's handler may raise before the measurement has ended
            if self._region is None and self._recording().is_under_way:
                self._stop(cancel=True)
            raise

    def _judge(self) -> None:
        # A decorator loads no torch.
        from pytest_torchmem.record.environment import allocator_settings, device_names

        by_device = any(isinstance(size, Mapping) for size in self._expected.limits.values())
        names = device_names(self.result.device) if by_device else ()
        if limits := limits_on(OWNER, self._expected.limits, names):
            sizes = dict.fromkeys(limits, 0)
            self._result = with_counters(self.result, sizes, self, allocator_settings())
        if self._results is not None:
            self._results.add(self._result or self)
        if self._expected.output is not None:
            self.save(self._expected.output)
        if findings := judge_limits(self.result, sizes_now(OWNER, limits)) if limits else ():
            findings = told_by_allocator(findings, self.result, self._window)
            judged = explain_retained(Window(self.result, findings), self._window.find_holders)
            self._result = judged.result
            first = judged.findings[0]
            sentence = judged.where + first.sentence
            raise LimitError(sentence, sentences([judged]), first.kind.value)

    def _new_measurement(self) -> BodyMeasurement:
        return BodyMeasurement(self._expected.device or None)

    def _stop(self, cancel: bool = False) -> None:
        measurement = self._recording()
        if self._region is None:
            if cancel:
                measurement.cancel()
            else:
                self._result = replace(measurement.stop(), name=self.name)
        elif running() is measurement:
            self._stack.close()
        else:
            raise RecordingError(
                f"the measurement around {self.shown_name!r} ended before it; of two that overlap, "
                "one must be within the other"
            )

    def region(self, name: str) -> AbstractContextManager[Region]:
        """Measure a part of the block; its numbers can be read as soon as that part is over."""
        part = self._recording().region(name)

        def begin() -> BodyRegion:
            self._inner.append(part.__enter__())
            return self._inner[-1]

        return Around(begin, lambda _: part.__exit__())

    def steps(self, n: int, *, warmup: int = 0) -> Iterator[int]:
        """Yield 0, 1, ... for ``warmup`` steps and ``n`` more; mark the end of each of the latter.

        What the marked steps leave behind is the growth. Raises `MarkerError` for numbers that
        make no steps.
        """
        require_steps("steps", n, warmup)
        return self._recording().steps(n, warmup, self._steps_of)

    def _recording(self) -> BodyMeasurement:
        if self._measurement is None:
            raise RecordingError(f"{self.shown_name!r} measures its with block only")
        return self._measurement

    @property
    def shown_name(self) -> str:
        """The name, or a word in its place."""
        return self.name or UNNAMED

    @property
    def result(self) -> Result:
        """Everything that was measured."""
        window = self._window
        if self._result is None:
            assert isinstance(window, BodyRegion)
            self._result = window.result
        return self._result

    @property
    def allocator_requests(self) -> Requests:
        """Every allocation and free of the block, in order."""
        return self._window.allocator_requests

    def picture(self) -> Picture:
        """The block's timeline, sampled."""
        return self._window.picture()

    @property
    def _window(self) -> BodyMeasurement | BodyRegion:
        if self._missing or self._measurement is None:
            raise RecordingError(f"{self.shown_name!r} has no numbers: {self._missing}")
        return self._region or self._measurement

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the result, those of the regions and the timeline to a file; return its path.

        ``{rank}`` in the path stands for the rank of this process. Where there are several ranks
        and the path does not say it, the file's name gets it: ``mem-rank1.json``. Folders that are
        not there are made. `load` and the command ``torchmem`` read the file. Raises
        `ReportError`.
        """
        window = (replace(self.result, name=""), self.picture())
        inner = ((region.result, None) for region in self._inner)
        return write_windows(path, [(self.shown_name, [window, *inner])])

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write everything that was recorded to a file that `load` reads."""
        self._recording().save_trace(path)

    def __call__(self, function: Callable[P, R]) -> Measured[P, R]:
        """Return ``function`` measured at each call; the results are in its ``results``."""
        _require_function(function)
        name = self.name or function.__qualname__.rpartition("<locals>.")[2]
        results = Results()
        block = functools.partial(Measure, name, self._expected, results)
        decorated: Any = _around(function, block, self._expected.warmup)
        decorated.results = results
        measured: Measured[P, R] = decorated
        return measured


def _around(function: Callable[..., Any], block: Callable[[], Measure], warmup: int) -> Any:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(*args: object, **kwargs: object) -> object:
            for _ in range(warmup):
                await function(*args, **kwargs)
            with block():
                return await function(*args, **kwargs)

        return awaited

    @functools.wraps(function)
    def measured_call(*args: object, **kwargs: object) -> object:
        for _ in range(warmup):
            function(*args, **kwargs)
        with block():
            return function(*args, **kwargs)

    return measured_call


def _require_function(function: object) -> None:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise MarkerError(
            f"measure cannot decorate the generator {function.__name__!r}: its caller's code runs "
            "in between; measure the loop over it in a with block"
        )
    if not callable(function) or isinstance(function, type):
        raise MarkerError(f"measure decorates functions, got {function!r}")


@overload
def measure(name: Callable[P, R], /) -> Measured[P, R]: ...


@overload
def measure(
    name: str = "",
    total: Size | SizeByDevice | None = None,
    *,
    device: Device | None = None,
    warmup: int = 0,
    output: str | os.PathLike[str] | None = None,
    **limits: Size | SizeByDevice | None,
) -> Measure: ...


def measure(
    name: object = "",
    total: Size | SizeByDevice | None = None,
    *,
    device: Device | None = None,
    warmup: int = 0,
    output: str | os.PathLike[str] | None = None,
    **limits: Size | SizeByDevice | None,
) -> Any:
    """Measure a ``with`` block, or each call of the function that this decorates.

    Args:
        name: What it is called in messages and files; a function's own name by default.
        total: What the peak may be. Further limits are those of the marker ``memory_budget``:
            ``activation="1GiB"``, ``growth=0``.
        device: Where to measure; by default the first GPU that works, otherwise the CPU.
        warmup: How often each call runs the function before the run that is measured.
        output: A file to write after each measurement, whose folder is made; see `Measure.save`.

    Within another measurement, or in a test's body that the plugin measures, it is a region of that
    one. An exception of the body passes through. Raises `MarkerError` for an argument that cannot
    be used; at the end of the block `LimitError` when a limit is exceeded; at its beginning
    `DeviceError` and `RecordingError` when it cannot be measured.
    """
    if callable(name):
        return Measure("", _Expected())(name)
    if not isinstance(name, str) or not name.isprintable():
        raise MarkerError(f"measure needs a name, got {name!r}; a limit is measure(total=...)")
    if reads_as_size(name):
        raise MarkerError(
            f"measure takes a name first, and {name!r} reads as a size; to limit the peak, write "
            f"measure(total={name!r})"
        )
    if not is_run_count(warmup, 0):
        raise MarkerError(
            f"measure, warmup: {shown(warmup)} is not a number of runs, 0 to {MOST_RUNS:,}"
        )
    sizes = read_limits(OWNER, {"total": total, **limits})
    return Measure(name, _Expected(device_text(device) if device else "", warmup, sizes, output))
