"""Plugins for our own tests: pytester runs pytest on small projects, some with a stand-in
engine whose bodies say what memory they use."""

import compileall
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_torchmem.building.cache import cache_root

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


#: What starts processes, trains models, builds C++ or searches the whole heap: files that take
#: more than 5 seconds of processor time, and tests that take more than 2. ``python -m pytest
#: -p tools.slow_tests`` lists them.
SLOW = (
    "examples/",
    "tests/accelerator/",
    "tests/analysis/caching_allocator/test_caching_allocator_properties.py",
    "tests/analysis/storages/test_attribution.py",
    "tests/analysis/storages/test_labels.py",
    "tests/analysis/storages/test_one_answer.py",
    "tests/analysis/torch_view/test_torch_labels.py",
    "tests/cli/test_bisect.py",
    "tests/cli/test_calibrate.py::test_a_program",
    "tests/cli/test_calibrate.py::test_our_programs",
    "tests/cli/test_cli.py::test_a_reader_who_stops_early",
    "tests/distributed/",
    "tests/faults/",
    "tests/measuring/",
    "tests/plugin/item/test_growth_per_step.py",
    "tests/plugin/item/test_left_behind.py",
    "tests/plugin/item/test_real_bodies.py",
    "tests/plugin/item/test_tracebacks.py",
    "tests/plugin/item/test_sending.py::test_where_memory_comes_from_is_looked_for",
    "tests/plugin/options/test_option_accept.py::test_a_module",
    "tests/plugin/options/test_option_ask.py",
    "tests/plugin/options/test_option_report.py::test_a_worker",
    "tests/plugin/options/test_option_report.py::test_workers",
    "tests/plugin/run/test_everywhere.py",
    "tests/plugin/run/test_hooks.py::test_a_pass_that_raises_is_named_at_the_end_and_no_test_fails",
    "tests/plugin/run/test_hooks.py::test_the_guides_pass_labels",
    "tests/plugin/run/test_start.py::test_tests_of_plugins_that_run_pytest",
    "tests/plugin/run/test_start.py::test_whatever_asks_for_a_measurement_loads_the_rest",
    "tests/plugin/run/test_xdist.py",
    "tests/record/compiled/test_compiled_graphs.py",
    "tests/record/compiled/test_compiled_source.py",
    "tests/record/compiled/test_inductor_code.py::test_a_buffer_belongs",
    "tests/record/compiled/test_inductor_code.py::test_views_are_named",
    "tests/record/graphs/test_fx.py",
    "tests/record/holders/test_holders.py",
    "tests/record/holders/test_local_variables.py::test_a_tensor_is_found_by_the_variable",
    "tests/record/native/",
    "tests/record/test_both_recorders.py",
    "tests/record/test_memory_from_outside.py",
    "tests/record/owners/test_bare_storages.py",
    "tests/record/owners/test_frozen_objects.py",
    "tests/record/owners/test_live_objects.py",
    "tests/record/patches/test_compiled_regions.py",
    "tests/record/patches/test_patches.py",
    "tests/record/patches/test_swaps.py",
    "tests/record/test_exit.py",
    "tests/record/test_python_undisturbed.py",
    "tests/record/test_recorder.py",
    "tests/record/test_traps.py",
    "tests/record/test_undisturbed",
    "tests/record/undisturbed/",
    "tests/report/text/test_texts.py::test_a_comment_fits",
    "tests/report/text/test_texts.py::test_failures_keep_their_sentences_beside_thousands",
    "tests/report/text/test_texts.py::test_the_summary_of_a_job_is_below",
    "tests/report/viewers/test_perfetto.py",
    "tests/simulate/test_peaks_of_programs.py",
    "tests/store/test_baseline_rows.py::test_whatever_is_written_is_read_back_and_written_as_it_was",
    "tests/store/test_baseline_scale.py",
    "tests/store/test_baseline_writers.py::test_four_processes",
    "tests/stress/",
    "tests/test_baseline_story.py",
    "tests/test_cuda_on_a_simulated_gpu.py",
    "tests/test_docs.py",
    "tests/test_examples.py",
    "tests/test_readme.py",
    "tests/test_regressions.py",
    "tests/test_stories.py",
    "tests/tools/test_mutations.py",
    "tests/test_user_types.py",
    "tests/torch_names/",
)

#: Slow tests that go through many programs to find what others have shown on a few: beside another
#: engine, over whole projects, at a large scale. A run of everything leaves them to ``--nightly``;
#: a run that names them, their file or their folder has them.
NIGHTLY: tuple[str, ...] = (
    "tests/cuda/test_caching_allocator_recordings.py::test_a_fresh_recording",
    "tests/cuda/test_order_cuda.py::test_every_body_has_one_number_however_it_is_run[shuffled on",
    "tests/cuda/test_order_cuda.py::test_every_body_has_one_number_however_it_is_run[alone]",
    "tests/simulate/test_examples_on_a_simulated_gpu.py",
    "tests/simulate/test_kernels_of_others_on_a_simulated_gpu.py",
    "tests/simulate/test_operators_beside_the_cpu.py::test_each_other",
    "tests/simulate/test_peaks_of_programs.py",
    "tests/simulate/test_ranks_beside_each_other.py",
    "tests/simulate/test_started_again.py",
    "tests/simulate/test_world.py",
    "tests/accelerator/test_memdev.py",
    "tests/analysis/storages/test_labels.py::test_labels_are_right_for_compiled_code[inductor_transformer]",
    "tests/analysis/storages/test_labels.py::test_labels_are_right_for_transformers",
    "tests/analysis/torch_view/test_torch_labels.py",
    "tests/cli/test_bisect.py::test_a_commit_that_gives_no_number_is_said",
    "tests/cli/test_calibrate.py::test_our_programs",
    "tests/distributed/test_launchers.py",
    "tests/faults/test_flags.py::test_an_option_of_python_changes_nothing[-O]",
    "tests/faults/test_fuzz.py::test_ten_thousand",
    "tests/faults/test_killed_updates.py::test_th",
    "tests/faults/test_killed_updates.py::test_updates_that_are_killed_with_their_workers",
    "tests/faults/test_many_tests.py::test_t",
    "tests/faults/test_other_plugins.py::test_the_same_is_stored_and_judged_beside_another_plugin[f",
    "tests/faults/test_other_plugins.py::test_the_same_is_stored_and_judged_beside_another_plugin[g",
    "tests/faults/test_other_plugins.py::test_the_same_is_stored_and_judged_beside_another_plugin[l",
    "tests/faults/test_other_plugins.py::test_the_same_is_stored_and_judged_beside_another_plugin[sc",
    "tests/faults/test_other_plugins.py::test_a_worker_that_dies_in_a_body_loses_nothing_but_that_test[os.k",
    "tests/faults/test_other_plugins.py::test_what_ran_before_a_run_was_ended_is_stored_and_nothing_removed[1-e",
    "tests/measuring/test_outside_pytest.py::test_the_commands_of_the_page_run",
    "tests/measuring/test_outside_pytest.py::test_the_job_of_the_page_runs",
    "tests/record/test_undisturbed_peaks.py",
    "tests/record/native/test_choice.py::test_a_real_compiler_builds_one_that_works",
    "tests/record/undisturbed/test_programs.py::test_a_program_ends_as_without_a_measurement[nightly",
    "tests/store/test_baseline_scale.py",
    "tests/stress/",
    "tests/test_examples.py::test_numbers_do_not_depend_on_the_order_of_tests",
    "tests/test_regressions.py",
)

#: It starts all tests that need a GPU in one process that sees a simulated one. It goes first: no
#: other test takes as long.
SIMULATED = "tests/test_cuda_on_a_simulated_gpu.py"

#: Each of these tests looks at everything that is alive, several times. Those that need optimizers,
#: which import torch's compiler, come behind the others.
SEARCHES = (
    "tests/record/holders/",
    "tests/plugin/item/test_growth_per_step.py",
    "tests/plugin/item/test_left_behind.py",
    "tests/record/owners/",
    "tests/plugin/item/test_real_bodies.py",
)

#: What torch's compilers leave in memory makes each later look at the heap several times as long.
COMPILES = (
    "tests/analysis/storages/test_labels.py",
    "tests/analysis/storages/test_one_answer.py",
    "tests/record/compiled/",
    "tests/record/graphs/test_fx.py",
    "tests/record/patches/test_compiled_regions.py",
    "tests/record/patches/test_patches.py",
    "tests/record/test_undisturbed.py",
    "tests/record/undisturbed/",
    "tests/torch_names/test_memory_estimator.py",
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
    path = os.path.relpath(collection_path, config.rootpath).replace(os.sep, "/")
    quick = config.getoption("markexpr") == "not slow"
    return True if quick and f"{path}/".startswith(SLOW) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by what they need, so that ``-m`` can choose: see CONTRIBUTING.

    Searches of the heap come first, while there is little in it, and then the quick tests, which
    look at it, too. Tests that compile come last.
    """
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        needs = {
            "slow": item.nodeid.startswith(SLOW) or "browser" in fixtures,
            "torch": hasattr(getattr(item, "module", None), "torch"),
            "browser": "browser" in fixtures,
            "gpu": "cuda" in fixtures or "gpu" in fixtures,
        }
        for name, needed in needs.items():
            if needed:
                item.add_marker(name)
    items.sort(key=_turn)
    named = {config.rootpath / argument for argument in config.args}
    if named == {config.rootpath / "tests"}:
        nightly = () if config.getoption("nightly", False) else NIGHTLY
        left = [i for i in items if i.nodeid.startswith(nightly) or _runs_elsewhere(i)]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in set(left)]


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


@pytest.fixture(scope="session")
def left_to_nightly(pytestconfig: pytest.Config) -> tuple[str, ...]:
    """Return the starts of the names of the tests that this run leaves out."""
    return () if pytestconfig.getoption("nightly", False) else NIGHTLY


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[_IMPORTED] = frozenset(sys.modules)


def _turn(item: pytest.Item) -> int:
    if item.nodeid.startswith(SIMULATED):
        return -len(SEARCHES) - 1
    for place, searches in enumerate(SEARCHES):
        if item.nodeid.startswith(searches):
            return place - len(SEARCHES)
    if item.nodeid.startswith(COMPILES):
        return 3
    return 2 if item.get_closest_marker("slow") else 1
