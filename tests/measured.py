"""Measure a function on the CPU, as a test's body is measured."""

from __future__ import annotations

from collections.abc import Callable

from pytest_torchmem.measuring.body import BodyMeasurement
from pytest_torchmem.values.results import Result


def measured(body: Callable[[], object]) -> Result:
    """Return what was measured; an exception of the body's own ends the measurement, too."""
    measurement = BodyMeasurement("cpu")
    measurement.start()
    try:
        body()
    except BaseException:
        measurement.cancel()
        raise
    return measurement.stop()
