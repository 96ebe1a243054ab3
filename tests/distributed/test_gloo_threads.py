"""What gloo's threads are the last to hold is freed where the program lets go of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import SEES_THREADS, needs_gloo, run
from slow_gloo import PART_BYTES

pytestmark = [
    pytest.mark.slow,
    needs_gloo,
    pytest.mark.skipif(not SEES_THREADS, reason="only Linux tells what a thread does"),
]


def test_a_wait_is_over_when_gloo_has_let_go():
    done = run(Path(__file__).with_name("slow_gloo.py"))
    assert done.returncode == 0, done.stderr
    if done.stdout == "unnamed\n":
        pytest.skip("this torch gives gloo's threads no name to know them by")
    assert done.stdout.split() == [str(PART_BYTES), "0"]
