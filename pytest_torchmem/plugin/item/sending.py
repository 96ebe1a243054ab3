"""Sending what a test measured: a record for reports and baselines, and the text of a failure."""

from __future__ import annotations

import base64
import locale
import os
import shlex
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from pytest_torchmem.analysis.judge.causes import origin
from pytest_torchmem.plugin.item.judging import Judgement
from pytest_torchmem.plugin.options.option_table import typed_nodeid
from pytest_torchmem.plugin.options.settings import Run, Settings, Timelines
from pytest_torchmem.plugin.run.workers import (
    PAYLOAD,
    TRACE,
    attach,
    baseline_nodeid,
    plain_nodeid,
)
from pytest_torchmem.plugin.stash import BAD_ARGUMENT, RUN
from pytest_torchmem.report.text.tables import ANY_WIDTH, live_table, timeline_lines
from pytest_torchmem.report.text.terminal import failure_text
from pytest_torchmem.store.baselines import portable, portable_live, portable_path
from pytest_torchmem.values.baseline import TOTAL
from pytest_torchmem.values.contributors import Contributor
from pytest_torchmem.values.findings import Finding, FindingKind
from pytest_torchmem.values.measured import MeasuredTest, Window
from pytest_torchmem.values.picture import Picture
from pytest_torchmem.values.results import Result
from pytest_torchmem.values.units import format_size

# A body that ended with an exception of its own is held against nothing. Its measurements are worth
# having where a report is asked for, and where memory itself ran out.
_TEXT_LENGTH: Final = 200
_NAMED: Final = 5
# torch's exception for a GPU, and what its allocator for the CPU says; neither needs an import.
_OUT_OF_MEMORY: Final = ("OutOfMemoryError", "MemoryError")
_CPU_TEXT: Final = "DefaultCPUAllocator"

#: Said of the numbers of a body that did not come to its end.
UNTIL_THEN: Final = (
    "the body did not come to its end: the numbers go up to its exception, which keeps the "
    "variables of its frames alive"
)


def is_failure(error: BaseException) -> bool:
    """Return whether a test that ends with ``error`` has failed: not for a skip or an interrupt."""
    skips = type(error).__name__ == "SkipTest"  # unittest's, which pytest takes for its own
    return isinstance(error, Exception | pytest.fail.Exception) and not skips


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocator ended the body."""
    names = {cls.__name__ for cls in type(error).__mro__}
    on_cpu = isinstance(error, RuntimeError) and _CPU_TEXT in str(error)
    return on_cpu or not names.isdisjoint(_OUT_OF_MEMORY)


def raised(error: BaseException) -> str:
    """Return an exception on one line, cut where it is long: ``AssertionError: assert 1 == 2``."""
    name = type(error).__name__ if isinstance(error, Exception) else "failed"
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    text = f"{name}: {first}" if first else name
    return text if len(text) <= _TEXT_LENGTH else text[: _TEXT_LENGTH - 3] + "..."


def out_of_memory_sentences(result: Result, live: Sequence[Contributor]) -> tuple[str, ...]:
    """Return what to say of a body that ran out of memory: how much was live, and what.

    ``live`` is what was live then; where that is not known, the peak until then stands for it.
    """
    when = "" if live else " at the most"
    contributors = live or result.peak.live
    held_bytes = sum(c.size_bytes for c in live) if live else result.peak.total
    if not held_bytes:
        return (
            f"ran out of memory while the body held none on {result.device}: one allocation was "
            "too large by itself, or others hold the memory, or it was another device's",
        )
    first = f"ran out of memory on {result.device} with {format_size(held_bytes)} live{when}"
    if not contributors:
        return (first,)
    causes = [f"{format_size(c.size_bytes)} {origin(c)}" for c in contributors[:_NAMED]]
    return (f"{first}: largest {causes[0]}", *(f"also live: {cause}" for cause in causes[1:]))


def out_of_memory_section(
    sentences: Sequence[str], live: Sequence[Contributor], timeline: Sequence[str], width: int
) -> str:
    """Return what pytest shows below the traceback."""
    lines = [sentences[0]]
    if timeline:
        lines += ["", "footprint, change by change:", *timeline]
    if live:
        lines += ["", "live then:", *live_table(live, width)]
    return "\n".join(lines)


if TYPE_CHECKING:
    from pytest_torchmem.measuring.body_measurement import BodyMeasurement, BodyRegion

_PACKAGE: Final = Path(__file__).parents[2]
_PREFIX: Final = "torchmem_"
# Settings without which the same command would measure something else.
_CHOOSES_DEVICE: Final = ("torchmem_device", "torchmem_world")
_WIDTH: Final = 60
_LOG_WIDTH: Final = 80
_WORTH_DRAWING: Final = 8
_TRACE_LIMIT_BYTES: Final = 32 * 1024 * 1024
PICTURED_REGIONS: Final = 20
"""So many regions of a test have a timeline in a report without being checked."""


@dataclass(frozen=True, slots=True)
class Sender:
    """Sends what one test measured."""

    item: pytest.Item
    run: Run

    @property
    def nodeid(self) -> str:
        return plain_nodeid(self.item)

    @property
    def baseline_nodeid(self) -> str:
        return baseline_nodeid(self.item)

    def not_measured(self, reason: str) -> None:
        self._send("", not_measured=reason)

    def send_judged(
        self,
        judgement: Judgement,
        sources: Mapping[str, BodyMeasurement | BodyRegion],
        measurement: BodyMeasurement,
    ) -> str:
        """Send what was judged, and the other regions beside it; return the text of the failure.

        ``sources`` has the body, as ``""``, and the judged regions by name. The text is ``""``
        where nothing failed.
        """
        failed = judgement.failed
        is_failure = bool(failed or judgement.problem)
        windows: list[Window] = []
        drawings: dict[str, Sequence[str]] = {}
        for window in judgement.windows:
            name, is_drawn = window.result.name, window.failed or bool(judgement.problem)
            picture = picture_of(sources[name], is_drawn, self.run.settings, self.run.rootdir)
            if window.failed:
                drawings[name] = drawn(picture, self.item.config)
            windows.append(replace(window, picture=self._picture_to_report(picture)))
        regions = [one for one in measurement.regions if one not in sources.values()]
        others = tuple(self._regions(regions, is_failure)) if windows else ()
        self._send(measurement.device, tuple(windows), others, problem=judgement.problem)
        if failed:
            self._pack_trace(measurement)
        if not is_failure:
            return ""
        lines = room(self.item.config)
        return failure_text(failed, judgement.problem, self._command(), drawings, lines)

    def raised(self, error: BaseException) -> None:
        """Send that the body's own exception ended it, so that every report counts the test."""
        self._send("", raised=raised(error))

    def unfinished(self, raw: Result, measurement: BodyMeasurement, error: BaseException) -> None:
        """Send what was measured until the body's own exception, for reports."""
        settings, rootdir = self.run.settings, self.run.rootdir
        result = replace(portable(raw, rootdir), notes=(*raw.notes, UNTIL_THEN))
        picture = None
        findings: tuple[Finding, ...] = ()
        memory_ran_out = is_out_of_memory(error)
        if memory_ran_out or settings.timelines is not Timelines.NONE:
            picture = picture_of(measurement, True, settings, rootdir)
        if memory_ran_out:
            # Nothing where no event of the recording says that memory ran out.
            struck = measurement.profile_so_far().out_of_memory
            live = portable_live(struck[-1] if struck else (), rootdir)
            sentences = out_of_memory_sentences(result, live)
            findings = tuple(Finding(FindingKind.OUT_OF_MEMORY, TOTAL, text) for text in sentences)
            timeline = drawn(picture, self.item.config)
            section = out_of_memory_section(sentences, live, timeline, room(self.item.config))
            self.item.add_report_section("call", "torchmem", section)
        body = Window(result, findings, picture=self._picture_to_report(picture))
        windows = (body, *self._regions(measurement.regions, failed=True))
        self._send(measurement.device, unjudged=windows, raised=raised(error))
        self._pack_trace(measurement)

    def _picture_to_report(self, picture: Picture | None) -> Picture | None:
        return None if self.run.settings.timelines is Timelines.NONE else picture

    def _regions(self, regions: Iterable[BodyRegion], failed: bool) -> Iterator[Window]:
        """Yield regions that are held against nothing, where a report asks for them."""
        settings, rootdir = self.run.settings, self.run.rootdir
        for place, region in enumerate(regions if settings.reports else ()):
            drawn_too = place < PICTURED_REGIONS
            picture = picture_of(region, failed, settings, rootdir) if drawn_too else None
            yield Window(portable(region.result, rootdir), picture=picture)

    def _send(
        self,
        device: str,
        windows: tuple[Window, ...] = (),
        unjudged: tuple[Window, ...] = (),
        *,
        not_measured: str = "",
        problem: str = "",
        raised: str = "",
    ) -> None:
        environment = self.run.environment(device) if windows or unjudged else {}
        texts = not_measured, problem, unjudged, raised
        record = MeasuredTest(self.nodeid, str(self.item.path), environment, windows, *texts)
        self.item.stash[PAYLOAD] = record.to_json()
        set_properties(self.item, record)

    def _pack_trace(self, measurement: BodyMeasurement) -> None:
        """Let the recording travel with what was just sent, where the report keeps it."""
        if self.run.settings.keeps_traces:
            self.item.stash[PAYLOAD][TRACE] = packed_trace(measurement)

    def _command(self) -> str:
        """Return the command that accepts what was measured, to be pasted where pytest was run."""
        typed = self.item.config.option
        words = [f"--torchmem-simulate={gpu}"] if (gpu := typed.torchmem_simulate) else []
        for setting in typed.override_ini or ():
            if setting.partition("=")[0].strip() in _CHOOSES_DEVICE:
                words += ["-o", setting]
        test = typed_nodeid(self.item.config, self.baseline_nodeid)
        return shlex.join([*_pytest(os.environ), test, *words, "--torchmem-update-baseline"])


def _pytest(environment: Mapping[str, str]) -> list[str]:
    """Return the command that runs pytest: torchrun's where that runs one in each rank."""
    ranks = environment.get("LOCAL_WORLD_SIZE", "1")
    if "TORCHELASTIC_RUN_ID" not in environment or ranks == "1":
        return ["pytest"]
    return ["torchrun", "--nproc-per-node", ranks, "-m", "pytest"]


def picture_of(
    source: BodyMeasurement | BodyRegion, failed: bool, settings: Settings, rootdir: Path
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


def drawn(picture: Picture | None, config: pytest.Config) -> Sequence[str]:
    """Return a timeline as lines for the text of a failure."""
    if picture is None or picture.change_count < _WORTH_DRAWING:
        return ()
    width = min(_WIDTH, config.get_terminal_writer().fullwidth - 2)
    # A worker cannot ask the terminal itself, but runs under the same locale.
    plain = "utf" not in locale.getpreferredencoding(False).lower()
    return timeline_lines(picture, max(20, width), plain)


def room(config: pytest.Config) -> int:
    """Return how many columns the text of a failure has: as many as it likes in a log."""
    writer = config.get_terminal_writer()
    narrow = writer.fullwidth < _LOG_WIDTH  # somebody said so
    return writer.fullwidth if narrow or writer.hasmarkup else ANY_WIDTH


def report_on(item: pytest.Item, report: pytest.TestReport) -> None:
    """Send what was measured along with a report of the test."""
    if item.stash.get(BAD_ARGUMENT, False) and hasattr(report, "wasxfail"):
        # A marker nobody can read is not the failure that was expected.
        del report.wasxfail
        report.outcome = "failed"
    if not report.passed:
        # The test may have replaced functions that we call.
        with item.config.stash[RUN].originals.back():
            _point_at_test(item, report)
    attach(item, report)


def _point_at_test(item: pytest.Item, report: pytest.TestReport) -> None:
    """Make the test the place of a failure that we raise, and its first line the message.

    pytest shows both with ``--tb=line``, in JUnit's file and in the last lines of a run in CI. Our
    own line, which raised the failure, would help nobody there, and the tables are above.
    """
    crash = getattr(report.longrepr, "reprcrash", None)
    traceback = getattr(report.longrepr, "reprtraceback", None)
    if crash is None or traceback is None or traceback.style != "value":
        return
    if not Path(crash.path).is_relative_to(_PACKAGE):
        return
    # In place: what xdist sends has the same objects a second time.
    crash.path, crash.lineno = str(item.path), (item.location[1] or 0) + 1
    # pytest writes the test before it.
    crash.message = crash.message.partition("\n")[0].replace(f"{plain_nodeid(item)}: ", "", 1)
    option = item.config.getoption
    if report.when == "call" and option("tbstyle") == "line" and not option("usepdb", False):
        traceback.reprentries.clear()


def set_properties(item: pytest.Item, measured: MeasuredTest | None) -> None:
    """Replace the properties of a test in JUnit's XML; None takes them away.

    pytest keeps one list for all attempts of a test, so a rerun must not add to it.
    """
    others = [pair for pair in item.user_properties if not str(pair[0]).startswith(_PREFIX)]
    item.user_properties[:] = [*others, *(_properties(measured) if measured else ())]


def _properties(measured: MeasuredTest) -> list[tuple[str, object]]:
    properties: dict[str, object] = {}
    for window in measured.windows:
        result = window.result
        peaks = result.peak.by_category.items()
        window_properties = {
            "device": result.device,
            "peak_bytes": result.peak.total,
            **{f"peak_{category.value}_bytes": size or None for category, size in peaks},
            "retained_bytes": result.retained.total,
            "growth_bytes": result.growth,
            "baseline_bytes": window.baseline_bytes if window.is_compared else None,
            "status": window.status or None,
        }
        start = f"{result.name}_" if result.name else ""
        properties |= {f"{start}{name}": value for name, value in window_properties.items()}
    properties["raised"] = measured.raised or None
    properties["not_measured"] = measured.not_measured or None
    return [(_PREFIX + name, value) for name, value in properties.items() if value is not None]
