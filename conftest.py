"""Plugins for our own tests: pytester runs pytest on small projects, some with a stand-in
engine whose bodies say what memory they use."""

import compileall
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_torchmem.building import cache_root

pytest_plugins = ["pytester", "tests.project"]

# These tests read what pytest prints on a terminal; on a build server pytest and we print more.
for _name in ("CI", "BUILD_NUMBER", "GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
    os.environ.pop(_name, None)

# pytest rewrites the asserts of 160 files: each worker and each run would do so again, 7 seconds
# long, where the environment says that no bytecode is written.
sys.dont_write_bytecode = False


@pytest.fixture(scope="session", autouse=True)
def inner_runs_load_no_plugin_but_ours() -> Iterator[None]:
    """Tests start pytest on small projects. Such a run loads our plugin and those it names with
    ``-p``; otherwise every plugin of the machine (pytest-randomly, pytest-cov) would take part.

    Nor does it write bytecode: a test may write two programs of one size in one second, and the
    second would be taken for the first.

    What is compiled once is in our cache, whatever home such a run has.

    A fixture sets this and not the module: xdist's workers inherit the controller's environment.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache_root().parent))
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        patch.setenv("PYTEST_PLUGINS", "pytest_torchmem.plugin.hooks")
        patch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        patch.setattr(sys, "dont_write_bytecode", True)
        yield


#: It starts all tests that need a GPU in one process that sees a simulated one. It goes first: no
#: other test takes as long.
SIMULATED = "tests/test_cuda_on_a_simulated_gpu.py"
EXAMPLES = "examples/"
_SLOW_FILE = re.compile(
    r"^pytestmark = .*pytest\.mark\.slow|^    pytest\.mark\.slow,$", re.MULTILINE
)

_IMPORTED = pytest.StashKey[frozenset[str]]()


@pytest.fixture(scope="session")
def imported_before_a_test(pytestconfig: pytest.Config) -> frozenset[str]:
    """Return what had been imported when all tests were known."""
    return pytestconfig.stash[_IMPORTED]


def pytest_configure(config: pytest.Config) -> None:
    """Compile the package once: the processes that tests start write no bytecode."""
    if not hasattr(config, "workerinput"):
        compileall.compile_dir(config.rootpath / "pytest_torchmem", quiet=1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="run the tests that take longest, too")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """A worker that is done takes tests from another: some tests take a hundred times as long."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """In the quick loop, slow files are not even imported."""
    if config.getoption("markexpr") != "not slow" or collection_path.suffix != ".py":
        return None
    is_example = collection_path.is_relative_to(config.rootpath / EXAMPLES)
    return True if is_example or _SLOW_FILE.search(collection_path.read_text("utf-8")) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by what they need, so that ``-m`` can choose: see CONTRIBUTING.

    Searches of the heap come first, while there is little in it, and then the quick tests, which
    look at it, too. Tests that compile come last. A run of everything leaves what is marked
    ``nightly`` to ``--nightly``; a run that names such a test, its file or its folder has it.
    """
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        needs = {
            "slow": item.nodeid.startswith(EXAMPLES) or "browser" in fixtures,
            "torch": hasattr(getattr(item, "module", None), "torch"),
            "browser": "browser" in fixtures,
            "gpu": "cuda" in fixtures or "gpu" in fixtures,
            "by_day": not is_nightly(item),
        }
        for name, needed in needs.items():
            if needed:
                item.add_marker(name)
    items.sort(key=_turn)
    named = {config.rootpath / argument for argument in config.args}
    if named == {config.rootpath / "tests"}:
        by_night = config.getoption("nightly", False)
        left = [i for i in items if (not by_night and is_nightly(i)) or _runs_elsewhere(i)]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]


def is_nightly(item: pytest.Item) -> bool:
    """Return whether a test is marked ``nightly``, or has parameters that the mark names."""
    parameters = getattr(item, "callspec", None)
    return any(
        not mark.args or (parameters is not None and parameters.id in mark.args)
        for mark in item.iter_markers("nightly")
    )


def _runs_elsewhere(item: pytest.Item) -> bool:
    """Return whether the process of `SIMULATED` runs a test, and this one cannot; or the other way
    round, in that process."""
    if "TORCHMEM_SIMULATED" in os.environ:
        return item.nodeid.startswith(SIMULATED)
    if item.get_closest_marker("gpu") is None:
        return False
    torch = sys.modules.get("torch")
    needs_a_simulated_one = "gpu" in getattr(item, "fixturenames", ())
    return needs_a_simulated_one or torch is None or not torch.cuda.is_available()


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[_IMPORTED] = frozenset(sys.modules)


def _turn(item: pytest.Item) -> int:
    if item.nodeid.startswith(SIMULATED):
        return -3
    # Those that need optimizers import torch's compiler.
    if searches := item.get_closest_marker("searches"):
        return -1 if searches.kwargs.get("with_optimizers") else -2
    if item.get_closest_marker("compiles"):
        return 3
    return 2 if item.get_closest_marker("slow") else 1
