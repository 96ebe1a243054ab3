"""Plugins for our own tests: pytester runs pytest on small projects, some with a stand-in
engine whose bodies say what memory they use."""

import os
from collections.abc import Iterator

import pytest

pytest_plugins = ["pytester", "tests.project"]

# These tests read what pytest prints on a terminal; on a build server pytest and we print more.
for _name in ("CI", "BUILD_NUMBER", "GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
    os.environ.pop(_name, None)


@pytest.fixture(scope="session", autouse=True)
def inner_runs_load_no_plugin_but_ours() -> Iterator[None]:
    """Tests start pytest on small projects. Such a run loads our plugin and those it names with
    ``-p``; otherwise every plugin of the machine (pytest-randomly, pytest-cov) would take part.

    A fixture sets this and not the module: xdist's workers inherit the controller's environment.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        patch.setenv("PYTEST_PLUGINS", "pytest_torchmem.plugin.hooks")
        yield
