from __future__ import annotations

import pytest
import torch


@pytest.fixture
def cuda() -> torch.device:
    """A GPU that really allocates; the test is skipped without one."""
    try:
        torch.empty(1, device="cuda:0")
    except (RuntimeError, AssertionError):
        pytest.skip("needs a GPU: `.ci/cuda` runs this test on a simulated one")
    return torch.device("cuda", 0)
