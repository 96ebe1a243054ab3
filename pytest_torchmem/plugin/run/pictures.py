"""A report shows these of a measured body beside its numbers."""

from __future__ import annotations

import base64
import locale
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from pytest_torchmem.plugin.options.settings import Settings, Timelines
from pytest_torchmem.report.page.sparkline import timeline_lines
from pytest_torchmem.report.text.tables import ANY_WIDTH
from pytest_torchmem.store.baselines import portable_path
from pytest_torchmem.values.measured import MeasuredTest
from pytest_torchmem.values.picture import Picture

if TYPE_CHECKING:
    from pytest_torchmem.analysis.estimated.estimate import Estimate
    from pytest_torchmem.measuring.body import BodyMeasurement, Region

_PREFIX: Final = "torchmem_"
_WIDTH: Final = 60
_LOG_WIDTH: Final = 80
_WORTH_DRAWING: Final = 8
_TRACE_LIMIT_BYTES: Final = 32 * 1024 * 1024


def picture_of(
    source: BodyMeasurement | Region | Estimate, failed: bool, settings: Settings, rootdir: Path
) -> Picture | None:
    """Return the timeline of a window where the run's report, or its own failure, shows one."""
    if not failed and settings.timelines is not Timelines.ALL:
        return None
    return source.picture().with_files(lambda file: portable_path(file, rootdir))


def packed_trace(measurement: BodyMeasurement) -> str:
    """Return the recording as text, so that it travels with the test; ``""`` if it is too large."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        measurement.profile_so_far().tree.trace.save(path)
        data = path.read_bytes()
    return base64.b64encode(data).decode() if len(data) <= _TRACE_LIMIT_BYTES else ""


def room(config: pytest.Config) -> int:
    """Return how many columns the text of a failure has: as many as it likes in a log."""
    writer = config.get_terminal_writer()
    narrow = writer.fullwidth < _LOG_WIDTH  # somebody said so
    return writer.fullwidth if narrow or writer.hasmarkup else ANY_WIDTH


def drawn(picture: Picture | None, config: pytest.Config) -> Sequence[str]:
    """Return a timeline as lines for the text of a failure."""
    if picture is None or picture.change_count < _WORTH_DRAWING:
        return ()
    width = min(_WIDTH, config.get_terminal_writer().fullwidth - 2)
    # A worker cannot ask the terminal itself, but runs under the same locale.
    plain = "utf" not in locale.getpreferredencoding(False).lower()
    return timeline_lines(picture, max(20, width), plain)


def set_properties(item: pytest.Item, measured: MeasuredTest | None) -> None:
    """Replace the properties of a test in JUnit's XML; None takes them away.

    pytest keeps one list for all attempts of a test, so a rerun must not add to it.
    """
    kept = [pair for pair in item.user_properties if not str(pair[0]).startswith(_PREFIX)]
    item.user_properties[:] = [*kept, *(_properties(measured) if measured else ())]


def _properties(measured: MeasuredTest) -> list[tuple[str, object]]:
    properties: list[tuple[str, object]] = []
    for window in measured.windows:
        result = window.result
        start = _PREFIX + (f"{result.name}_" if result.name else "")
        properties.append((f"{start}device", result.device))
        properties.append((f"{start}peak_bytes", result.peak.total))
        properties += [
            (f"{start}peak_{category.value}_bytes", size)
            for category, size in result.peak.by_category.items()
            if size
        ]
        properties.append((f"{start}retained_bytes", result.retained.total))
        if result.growth is not None:
            properties.append((f"{start}growth_bytes", result.growth))
        if window.is_compared:
            properties.append((f"{start}baseline_bytes", window.baseline_bytes))
        if window.status:
            properties.append((f"{start}status", window.status))
        if result.estimated:
            properties.append((f"{start}estimated", "true"))
    if measured.raised:
        properties.append((f"{_PREFIX}raised", measured.raised))
    if measured.not_measured:
        properties.append((f"{_PREFIX}not_measured", measured.not_measured))
    return properties
