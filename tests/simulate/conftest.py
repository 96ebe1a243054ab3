from __future__ import annotations

import pytest

from pytest_torchmem.simulate.gaps import simulated_here
from pytest_torchmem.simulate.torch_builds import cache_folder

# pytester gives the programs it starts another home, where nothing is fetched or built.
_CACHE = cache_folder().parent.parent


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> str:
    """The simulated GPU that this process sees; the test is skipped without one."""
    if not simulated_here():
        pytest.skip("needs a simulated GPU: `.ci/cuda` runs this test on one")
    monkeypatch.setenv("XDG_CACHE_HOME", str(_CACHE))
    return simulated_here()
