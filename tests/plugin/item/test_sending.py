"""What a test's report carries to the process that writes the files."""

from __future__ import annotations

import base64
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_torchmem.analysis.pipeline import analyze
from pytest_torchmem.plugin.item import sending
from pytest_torchmem.store.traces import load_trace
from tests.builders import TraceBuilder


def recorded() -> Any:
    b = TraceBuilder()
    with b.op("aten::ones"):
        b.alloc(8)
    profile = analyze(b.build())
    return SimpleNamespace(profile_so_far=lambda: profile)


def test_a_recording_travels_as_text(tmp_path: Path) -> None:
    path = tmp_path / "body.trace"
    path.write_bytes(base64.b64decode(sending.packed_trace(recorded())))
    assert load_trace(path).allocations["size_bytes"].tolist() == [8]


def test_a_recording_that_is_too_large_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "_TRACE_LIMIT_BYTES", 100)
    assert sending.packed_trace(recorded()) == ""


def test_reports_that_pytest_keeps_hold_nothing_of_what_was_measured(
    pytester: pytest.Pytester,
) -> None:
    pytester.makeconftest(
        """
        import pytest
        from pytest_torchmem.plugin.run import workers

        carried = []

        @pytest.hookimpl(tryfirst=True)
        def pytest_runtest_logreport(report):
            carried.append(hasattr(report, workers._ATTRIBUTE))

        def pytest_terminal_summary(terminalreporter):
            kept = terminalreporter.getreports("passed")
            held = [hasattr(report, workers._ATTRIBUTE) for report in kept]
            terminalreporter.write_line(f"{sum(carried)} carried, {sum(held)} of {len(held)} hold")
        """
    )
    pytester.makepyfile(
        """
        import pytest, torch

        @pytest.mark.memory_budget("1KiB")
        @pytest.mark.parametrize("number", range(2))
        def test_ones(number):
            torch.ones(3)
        """
    )
    run = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    run.assert_outcomes(passed=2)
    run.stdout.fnmatch_lines(["2 carried, 0 of 2 hold"])
