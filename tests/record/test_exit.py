"""A program that ends in the middle of a measurement ends as it would without one."""

from __future__ import annotations

import atexit
import importlib
import subprocess
import sys

import pytest

from pytest_torchmem.measuring.body_measurement import BodyMeasurement
from tests.measured import measured

pytestmark = pytest.mark.slow

MEASURED = """
import atexit, os, sys, threading
import torch
from pytest_torchmem import measure
from pytest_torchmem.measuring.body_measurement import BodyMeasurement

{before}
measurement = {measurement}
torch.ones(10).add(1)
{after}
"""
BODY = "BodyMeasurement('cpu'); measurement.start()"
BLOCK = "measure(device='cpu'); measurement.__enter__()"
ENDS = {
    "the last line": ("", 0),
    "exit": ("sys.exit(3)", 3),
    "exception": ("raise ValueError('of the program')", 1),
}


def ended(measurement: str, after: str, before: str = "") -> tuple[int, str, str]:
    code = MEASURED.format(measurement=measurement, before=before, after=after)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.nightly("exception", "the last line")
@pytest.mark.parametrize(("after", "code"), ENDS.values(), ids=ENDS.keys())
def test_a_measurement_that_nobody_stopped_ends_with_the_program(after: str, code: int):
    got, _, said = ended(BLOCK, after)
    assert got == code, said
    assert ("of the program" in said) == ("raise" in after)


def test_what_runs_at_exit_finds_torch_as_it_was():
    before = """
set_state = torch.nn.Module.__setstate__
atexit.register(lambda: print(torch.nn.Module.__setstate__ is set_state))
"""
    assert ended(BODY, "", before)[:2] == (0, "True\n")


@pytest.mark.parametrize("end", ["stop", "cancel"])
def test_a_measurement_that_was_ended_leaves_nothing_for_the_exit(end: str, monkeypatch):
    importlib.import_module("torch._dynamo")  # which has something to say at the exit, too
    measured(lambda: None)  # the first one of a process registers what stays
    kept: list[object] = []
    measurement = BodyMeasurement("cpu")
    with monkeypatch.context() as patched:
        patched.setattr(atexit, "register", kept.append)
        patched.setattr(atexit, "unregister", lambda f: f in kept and kept.remove(f))
        measurement.start()
        assert len(kept) == 1
        getattr(measurement, end)()
    assert kept == []


def test_a_thread_may_be_in_the_middle_of_one():
    before = """
entered, held = threading.Event(), threading.Event()

def measured():
    with measure(device="cpu"):
        entered.set()
        held.wait()

threading.Thread(target=measured, daemon=True).start()
entered.wait()
sys.exit(5)
"""
    code, _, said = ended(BODY, "", before)
    assert code == 5
    assert "disableProfiler" not in said
