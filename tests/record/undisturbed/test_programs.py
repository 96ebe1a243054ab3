"""A program ends as it does without a measurement: its results, and everything in the process."""

from __future__ import annotations

import ctypes
import gc
import importlib
from pathlib import Path

import pytest
import torch

from pytest_torchmem.record.patches import quiet
from tests.measured import measured
from tests.record.undisturbed.state import NIGHTLY, PROGRAMS, ended, hears_calls, state

for file in sorted(Path(__file__).parent.glob("programs_*.py")):
    importlib.import_module(f"tests.record.undisturbed.{file.stem}")

pytestmark = [pytest.mark.slow, pytest.mark.compiles, pytest.mark.filterwarnings("ignore")]


def named(name):
    return pytest.param(name, marks=pytest.mark.nightly) if name in NIGHTLY else name


@pytest.fixture(scope="module", autouse=True)
def measured_once():
    """The first measurement of a process imports what it needs; and so would the first program."""
    importlib.import_module("torch._dynamo.utils")
    measured(lambda: torch.ones(1))


@pytest.mark.parametrize("name", [named(name) for name in PROGRAMS])
def test_a_program_ends_as_without_a_measurement(name):
    # The first run imports, and fills caches.
    ended(name, lambda body: body())
    alone, expected = ended(name, lambda body: body())
    within, found = ended(name, measured)
    assert within == alone
    assert {key: value for key, value in found.items() if value != expected[key]} == {}


def test_there_are_enough_programs():
    assert len(PROGRAMS) >= 120


def test_a_pause_of_tracers_that_nobody_ends_would_be_noticed():
    state = ctypes.c_void_p(quiet._current())
    quiet._enter(state)
    try:
        heard = hears_calls()
    finally:
        quiet._leave(state)
    assert (heard, hears_calls()) == (False, True)


def test_what_a_measurement_leaves_would_be_noticed():
    before = state()
    gc.callbacks.append(print)
    try:
        assert [key for key, value in state().items() if value != before[key]] == [
            "collector's callbacks"
        ]
    finally:
        gc.callbacks.remove(print)
