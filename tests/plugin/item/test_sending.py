"""What a test's report carries to the process that writes the files."""

from __future__ import annotations

import base64
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_torchmem.analysis.pipeline import analyze_trace
from pytest_torchmem.plugin.item import sending
from pytest_torchmem.store.traces import load_trace
from tests.builders import TraceBuilder


def recorded() -> Any:
    b = TraceBuilder()
    with b.op("aten::ones"):
        b.alloc(8)
    profile = analyze_trace(b.build())
    return SimpleNamespace(profile_so_far=lambda: profile)


def test_a_recording_travels_as_text(tmp_path: Path) -> None:
    path = tmp_path / "body.trace"
    path.write_bytes(base64.b64decode(sending.packed_trace(recorded())))
    assert load_trace(path).allocations["size_bytes"].tolist() == [8]


def test_a_recording_that_is_too_large_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "_TRACE_LIMIT_BYTES", 100)
    assert sending.packed_trace(recorded()) == ""


def test_reports_that_pytest_keeps_hold_nothing_of_what_was_measured(
    torch_pytester: pytest.Pytester,
) -> None:
    torch_pytester.makeconftest(
        """
        import pytest
        from pytest_torchmem.plugin.run import workers

        carried = []

        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_runtest_logreport(report):
            carried.append(hasattr(report, workers._ATTRIBUTE))
            return (yield)

        def pytest_terminal_summary(terminalreporter):
            kept = terminalreporter.getreports("passed")
            held = [hasattr(report, workers._ATTRIBUTE) for report in kept]
            terminalreporter.write_line(f"{sum(carried)} carried, {sum(held)} of {len(held)} hold")
        """
    )
    torch_pytester.makepyfile(
        """
        import pytest, torch

        @pytest.mark.memory_budget("1KiB")
        @pytest.mark.parametrize("number", range(2))
        def test_ones(number):
            torch.ones(3)
        """
    )
    run = torch_pytester.runpytest_inprocess("-p", "no:cacheprovider")
    run.assert_outcomes(passed=2)
    run.stdout.fnmatch_lines(["2 carried, 0 of 2 hold"])


ORIGINS = """
import os

import pytest
import torch


@pytest.mark.memory_budget("1MiB", retained="1MiB")
@pytest.mark.memory_baseline
def test_ones():
    global kept
    kept = torch.ones(int(os.environ.get("COUNT", "3000")))
"""
COUNTING = """
import json
from pytest_torchmem.plugin.run import workers

carried = []

def pytest_sessionfinish(session):
    for plugin in session.config.pluginmanager.get_plugins():
        for attempt in getattr(plugin, "_attempts", {}).values():
            measured = workers.unpacked(attempt.measured)
            carried.extend(window.result.peak.live for window in measured.windows)

def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"carried {[len(live) for live in carried]}")
"""


@pytest.mark.slow
def test_where_memory_comes_from_is_looked_for_where_somebody_wants_it(
    torch_pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_pytester.makeconftest(COUNTING)
    torch_pytester.makepyfile(ORIGINS)

    def carried(*arguments: str) -> str:
        run = torch_pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments)
        return next(line for line in run.outlines if line.startswith("carried"))

    assert carried("--torchmem-update-baseline") == "carried [1]"
    assert carried() == "carried [0]"
    assert carried("--torchmem-report=run.json") == "carried [1]"
    monkeypatch.setenv("COUNT", "1000000")
    assert carried() == "carried [1]"
    monkeypatch.setenv("COUNT", "3000")
    with Path("conftest.py").open("a") as file:
        file.write("\n\ndef pytest_torchmem_measured(results):\n    pass\n")
    assert carried() == "carried [1]"
