"""What a test measured, from its report to the end of the run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pytest_torchmem.plugin.run.workers import TRACE, detach, unpacked
from pytest_torchmem.values.measured import MeasuredTest, Window
from tests.results import contributor, result

MEASURED = MeasuredTest(
    "test_net.py::test_step",
    "test_net.py",
    {"device": "cpu"},
    (Window(result(*(contributor(size) for size in range(1, 60))), key="test_step"),),
)


def report(**attributes: Any) -> pytest.TestReport:
    place = ("test_net.py", 0, "test_step")
    return pytest.TestReport(
        "test_net.py::test_step", place, {}, "passed", None, "call", **attributes
    )


def test_results_wait_for_the_end_of_the_run_packed() -> None:
    sent = MEASURED.to_json()
    told = report(torchmem={**sent, TRACE: "A" * 10_000})
    packed = detach(told)
    assert unpacked(packed) == MEASURED
    assert len(packed) < len(json.dumps(sent)) / 10
    assert not hasattr(told, "torchmem")


def test_a_report_without_results_leaves_nothing() -> None:
    assert detach(report()) == b""
