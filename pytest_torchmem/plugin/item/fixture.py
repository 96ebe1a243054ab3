"""The ``torchmem`` fixture: the measured body, seen from inside it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from pytest_torchmem.plugin.item.body import OFF, Body, State, WarmupOver
from pytest_torchmem.values.errors import MarkerError, RecordingError, is_torchmem_error
from pytest_torchmem.values.findings import read_allowance, require_steps
from pytest_torchmem.values.results import Result

if TYPE_CHECKING:
    from pytest_torchmem.measuring.body_measurement import Region
    from pytest_torchmem.record.graphs.fx_graphs import Graph

__tracebackhide__ = is_torchmem_error


class Torchmem:
    """Measures the test body and regions of it.

    Attributes:
        device: Where the body is measured, such as ``cpu`` or ``cuda:0``.
    """

    def __init__(self, body: Body) -> None:
        self._body = body

    @property
    def device(self) -> str:
        return self._body.device

    def measure(self, name: str) -> contextlib.AbstractContextManager[Region]:
        """Return a context manager that measures a region and yields its results.

        Read ``peak``, ``retained`` and the other results after the block. If the body cannot be
        measured, reading one raises `RecordingError`; in a warm-up run it ends that run, and under
        ``--torchmem=off`` it skips the test. Raises `MarkerError` for a name that cannot be used
        and outside of the test body.
        """
        if not isinstance(name, str) or not name.strip() or not name.isprintable():
            raise MarkerError(f"torchmem.measure needs the region's name, got {name!r}")
        state = self._state()
        if state is State.MEASURING:
            return self._body.measurement.region(name)
        return contextlib.nullcontext(_NoRegion(name, self._body))  # type: ignore[arg-type]

    def steps(self, n: int, *, warmup: int = 0) -> Iterator[int]:
        """Yield 0, 1, ... for ``warmup`` steps and ``n`` more; mark the end of each of the latter.

        What the marked steps leave behind gives the body's growth per step; of several loops, also
        of nested ones, the one that grows most counts. Raises `MarkerError` for numbers that make
        no steps and outside of the test body.
        """
        require_steps("torchmem.steps", n, warmup)
        if self._state() is not State.MEASURING:
            return iter(range(warmup + n))
        return self._marked_steps(n, warmup)

    def estimate(
        self, program: Callable[..., object] | Graph, *args: object, **kwargs: Any
    ) -> Result:
        """Return what a program takes on a GPU that is not there, or what a graph needs.

        It is `pytest_torchmem.estimate`, which has the arguments and the errors. The body's limits
        and baselines do not count it. Raises `MarkerError` outside of the test body, too.
        """
        from pytest_torchmem.measuring.estimate import estimate  # most tests need none

        self._state()
        if self._body.is_off:
            name = getattr(program, "__name__", type(program).__name__)
            return _NoRegion(name, self._body)  # type: ignore[return-value]
        with self._body.measurement.paused():
            return estimate(program, *args, **kwargs)

    def check(self, region: Region, *, tolerance: object = None, floor: object = None) -> None:
        """Compare a region with its own baseline entry when the body is over.

        ``tolerance`` and ``floor`` default to those of the test. Raises `MarkerError` for anything
        that was not measured in this body, and for a second one of the same name.
        """
        state = self._state()
        if isinstance(region, _NoRegion) or state is State.WARMING_UP or self._body.is_off:
            return
        allowance = read_allowance("torchmem.check", tolerance, floor, self._body.demands.allowance)
        self._body.check_region(region, allowance)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write what was recorded of the body so far to ``path``, for the ``torchmem`` command.

        A warm-up run and ``--torchmem=off`` write nothing. Raises `RecordingError` in a body that
        cannot be measured, `MarkerError` outside of the test body.
        """
        state = self._state()
        if self._body.is_off:
            return
        if state is State.UNMEASURED:
            raise RecordingError(f"there is no trace to save: {self._body.problem}")
        if state is State.MEASURING:
            self._body.measurement.save_trace(path)

    def _marked_steps(self, n: int, warmup: int) -> Iterator[int]:
        measurement = self._body.measurement
        yield from measurement.steps(n, warmup)
        if "growth" in self._body.demands.limits:
            measurement.note_holders()

    def _state(self) -> State:
        state = self._body.state
        if state in (State.BEFORE, State.AFTER):
            raise MarkerError(f"torchmem measures the test body only; this is {state.value}")
        return state


class _NoRegion:
    """Stands for a region or an estimate where nothing is measured; it has a name and no numbers.

    Code that only passes it on works. Where a number is read, there is none to compare with: a run
    that measures no test skips the rest of that one.
    """

    def __init__(self, name: str, body: Body) -> None:
        self.name = name
        self._body = body

    def __repr__(self) -> str:
        return f"<{self.name!r}: not measured>"

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        if self._body.state is State.WARMING_UP:
            raise WarmupOver
        if self._body.is_off:
            reason = f"not measured: {OFF}, and this one reads {attribute!r} of {self.name!r}"
            raise pytest.skip.Exception(reason, _use_item_location=True)
        raise RecordingError(f"the region {self.name!r} has no {attribute}: {self._body.problem}")
