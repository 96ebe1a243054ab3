from __future__ import annotations

import os

import pytest

from pytest_torchmem.simulate import GPU_VARIABLE
from pytest_torchmem.simulate.torch_builds import cache_folder

# pytester gives the programs it starts another home, where nothing is fetched or built.
_CACHE = cache_folder().parent.parent


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> str:
    """The simulated GPU that this process sees; the test is skipped without one."""
    if not os.environ.get(GPU_VARIABLE):
        pytest.skip("needs a simulated GPU: `.ci/cuda` runs this test on one")
    monkeypatch.setenv("XDG_CACHE_HOME", str(_CACHE))
    return os.environ[GPU_VARIABLE]
