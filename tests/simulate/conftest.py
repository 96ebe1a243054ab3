from __future__ import annotations

import pytest

from pytest_torchmem.simulate.process import simulated_here


@pytest.fixture
def gpu() -> str:
    """The simulated GPU that this process sees; the test is skipped without one."""
    if not simulated_here():
        pytest.skip("needs `torchmem simulate`: see CONTRIBUTING.md")
    return simulated_here()
