from __future__ import annotations

import pytest
import torch


@pytest.fixture
def cuda() -> torch.device:
    """A GPU that really allocates; the test is skipped without one."""
    try:
        torch.empty(1, device="cuda:0")
    except (RuntimeError, AssertionError) as error:
        pytest.skip(f"needs a CUDA device: {str(error).splitlines()[0]}")
    return torch.device("cuda", 0)
