"""A run made by hand: failed, grown, shrunk, new, unmeasured and plain tests, with timelines."""

from __future__ import annotations

import math
from dataclasses import replace

from pytest_torchmem.store.run_reports import RunReport
from pytest_torchmem.values.baseline import BaselineEntry, Change
from pytest_torchmem.values.contributors import (
    Category,
    CategoryBytes,
    Contributor,
    Phase,
    Source,
)
from pytest_torchmem.values.measured import MeasuredTest, Window
from pytest_torchmem.values.picture import OperatorUse, Picture, Span, Track
from pytest_torchmem.values.results import Counters, Peak, Result, Retained
from pytest_torchmem.values.units import MiB
from tests.results import failed

MS = 1_000_000
MOMENTS = 120


def made(size, category=Category.ACTIVATION, operator="aten::mm", module="model.layers.*.mlp"):
    source = Source("src/net.py", 41, "forward")
    return Contributor(category, size, 12, operator, module, source, Phase.FORWARD)


def picture(scale=MiB):
    """A training step: activations rise and fall, gradients take their place, Adam follows."""
    levels = {Category.PARAMETER: [], Category.GRADIENT: [], Category.OPTIMIZER_STATE: []}
    levels |= {Category.ACTIVATION: [], Category.TEMPORARY: [], Category.UNKNOWN: []}
    for moment in range(MOMENTS):
        done = moment / MOMENTS
        levels[Category.PARAMETER].append(20 * scale)
        levels[Category.GRADIENT].append(int(20 * scale * max(0.0, min(1.0, done * 3 - 1.2))))
        levels[Category.OPTIMIZER_STATE].append(40 * scale if done > 0.8 else 0)
        rise = math.sin(min(1.0, done / 0.75) * math.pi)
        levels[Category.ACTIVATION].append(int(64 * scale * max(0.0, rise)) & ~511)
        levels[Category.TEMPORARY].append(6 * scale if moment % 3 == 0 else 0)
        levels[Category.UNKNOWN].append(scale // 2 if done > 0.9 else 0)
    columns = {category: tuple(column) for category, column in levels.items()}
    halves = tuple(amount // 2 for amount in columns[Category.ACTIVATION])
    who = made(max(halves), operator="aten::_to_copy", module="model.layers.*.norm")
    return Picture(
        times_ns=tuple(moment * MS // 2 for moment in range(MOMENTS)),
        rows=tuple(moment * 7 for moment in range(MOMENTS)),
        change_count=MOMENTS * 7,
        levels=columns,
        tracks=(
            Track(who, halves),
            Track(made(20 * scale, Category.PARAMETER, "", ""), columns[Category.PARAMETER]),
            Track(
                made(20 * scale, Category.GRADIENT, "aten::mm", "model.head"),
                columns[Category.GRADIENT],
            ),
        ),
        operators=(
            OperatorUse("aten::_to_copy", 24, 96 * scale, 32 * scale, 4 * MS),
            OperatorUse("aten::mm", 120, 400 * scale, 20 * scale, 1234 * MS),
        ),
        spans=(
            Span("region", "step <1>", 0, MOMENTS * MS // 2),
            Span("backward", "", 24 * MS, 44 * MS),
            Span("optimizer", "", 47 * MS, 58 * MS),
        ),
        running=(
            Span("running", "attention", 20 * MS, 32 * MS),
            Span("running", "aten::_to_copy", 21 * MS, 22 * MS),
        ),
    )


def result_of(drawn, name="", device="cpu", **changes):
    largest = CategoryBytes.of({c: max(levels) for c, levels in drawn.levels.items()})
    at_peak = drawn.at(drawn.peak)
    live = tuple(
        replace(t.contributor, size_bytes=t.levels[drawn.peak])
        for t in drawn.tracks
        if t.levels[drawn.peak]
    )
    time_ns = drawn.times_ns[drawn.peak]
    return Result(
        name=name,
        device=device,
        estimated=drawn.estimated,
        peak=Peak(at_peak.total, time_ns, at_peak, largest, live),
        retained=Retained(MiB, CategoryBytes(gradient=MiB), live[:1]),
        **changes,
    )


def entry_of(result, share=0.75):
    """The baseline of a result that has grown since by its largest contributor."""
    activation = int(result.peak.by_category.activation * share)
    peaks = replace(result.peak.by_category, activation=activation)
    total = result.peak.total - (result.peak.by_category.activation - activation)
    largest, *others = result.peak.live
    live = (replace(largest, size_bytes=int(largest.size_bytes * share)), *others)
    return BaselineEntry(
        total=total,
        at_peak=replace(result.peak.at_peak, activation=activation),
        peaks=peaks,
        live=live,
        retained=result.retained.by_category,
        at_peak_live=live,
    )


def window(key, change=Change.SAME, sentence="", scale=MiB, share=1.0, device="cpu", **changes):
    drawn = picture(scale)
    result = result_of(drawn, device=device, **changes)
    entry = entry_of(result, share) if change not in (Change.NEW, Change.NOT_COMPARED) else None
    return Window(
        result,
        failed(*filter(None, [sentence])),
        change,
        baseline_bytes=entry.total if entry else 0,
        key=key,
        limits={"total": 120 * scale},
        baseline=entry,
        picture=drawn,
    )


def on_gpu(key, **changes):
    """A body without a picture, of which the allocator's own counters are known."""
    nothing = CategoryBytes()
    result = Result(
        name="",
        device="cuda:0",
        estimated=False,
        peak=Peak(3 * MiB, 0, nothing, nothing),
        retained=Retained(MiB, nothing),
        counters=Counters(3 * MiB, 3 * MiB, 3 * MiB, 4 * MiB),
    )
    limits = {"total": 4 * MiB}
    return Window(result, key=key, limits=limits, **changes)


GROWN = (
    "activation peaked at 64.0 MiB, +16.0 MiB (+33 %) over the baseline of 48.0 MiB: "
    "+16.0 MiB from aten::_to_copy at net.py:41 in model.layers.*.norm"
)


def report_of(name, *windows, outcome="passed", line=12, **changes):
    environment = {"device": windows[0].result.device if windows else "cpu", "torch": "2.13"}
    nodeid = f"tests/test_step.py::{name}"
    ended = {"outcome": outcome, "line": line, **changes}
    return MeasuredTest(nodeid, "tests/test_step.py", environment, windows, **ended)


def sample_run():
    return RunReport(
        tests=(
            report_of(
                "test_train[bf16]",
                window("test_train[bf16]", Change.GROWN, GROWN, share=0.75),
                outcome="failed",
            ),
            report_of("test_eval", window("test_eval", Change.SHRUNK, share=1.3, scale=2 * MiB)),
            report_of("test_new", window("test_new", Change.NEW, scale=MiB // 4)),
            report_of("test_plain", window("test_plain", scale=MiB // 2, notes=("seen late",))),
            report_of("test_gpu", window("test_gpu", device="cuda:0", scale=8 * MiB)),
            report_of("test_unseen", not_measured="another profiler is active [not-measured]"),
            report_of(
                "test_<script>alert('x')</script>&amp;",
                window("test_<script>", scale=MiB // 8),
            ),
        ),
        created="2026-01-02T03:04:05Z",
        commit="0123456789abcdef0123456789abcdef01234567",
        dirty=True,
        versions={"torchmem": "0.1.0", "torch": "2.13.0", "python": "3.11.7"},
        problems=("the baseline x.json cannot be read [bad-baseline]",),
    )
