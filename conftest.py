"""Plugins for our own tests: pytester runs pytest on small projects, some with a stand-in
engine whose bodies say what memory they use."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["pytester", "tests.project"]

# These tests read what pytest prints on a terminal; on a build server pytest and we print more.
for _name in ("CI", "BUILD_NUMBER", "GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
    os.environ.pop(_name, None)

# A machine that is busy with something else fails no test.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


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


#: Tests that start processes, train models, build C++ or search the whole heap: a file belongs here
#: when it takes more than 5 seconds of processor time (``--durations=0``).
SLOW = (
    "examples/",
    "tests/accelerator/",
    "tests/analysis/caching_allocator/test_caching_allocator_properties.py",
    "tests/analysis/storages/test_attribution.py",
    "tests/analysis/storages/test_labels.py",
    "tests/analysis/torch_view/test_torch_labels.py",
    "tests/distributed/",
    "tests/measuring/",
    "tests/plugin/item/test_growth_per_step.py",
    "tests/plugin/item/test_real_bodies.py",
    "tests/plugin/item/test_real_estimates.py",
    "tests/plugin/item/test_tracebacks.py",
    "tests/plugin/run/test_xdist.py",
    "tests/record/compiled/test_compiled_source.py",
    "tests/record/holders/test_holders.py",
    "tests/record/owners/test_bare_storages.py",
    "tests/record/owners/test_frozen_objects.py",
    "tests/record/owners/test_live_objects.py",
    "tests/record/patches/test_functorch.py",
    "tests/record/patches/test_patches.py",
    "tests/record/patches/test_threads.py",
    "tests/record/test_exit.py",
    "tests/record/test_kept_by_the_profiler.py",
    "tests/record/test_recorder.py",
    "tests/record/test_traps.py",
    "tests/record/test_undisturbed",
    "tests/store/test_baseline_scale.py",
    "tests/stress/",
    "tests/test_baseline_story.py",
    "tests/test_docs.py",
    "tests/test_examples.py",
    "tests/test_readme.py",
    "tests/test_stories.py",
    "tests/torch_names/",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by what they need, so that ``-m`` can choose: see CONTRIBUTING."""
    for item in items:
        path = item.path.relative_to(config.rootpath).as_posix()
        fixtures = getattr(item, "fixturenames", ())
        needs = {
            "slow": path.startswith(SLOW) or "browser" in fixtures,
            "torch": hasattr(getattr(item, "module", None), "torch"),
            "browser": "browser" in fixtures,
            "gpu": "cuda" in fixtures,
        }
        for name, needed in needs.items():
            if needed:
                item.add_marker(name)
