"""Some of the regressions that `benchmarks.regressions` scores, and how it scores them."""

from __future__ import annotations

import pytest

from benchmarks.regression_programs import REGRESSIONS
from benchmarks.regression_programs.case import ANY, Blame, Regression
from benchmarks.regressions import Outcome, run_all, score
from pytest_torchmem.simulate.torch_builds import torch_build
from pytest_torchmem.values.errors import SimulationError

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

SOME = (
    "float_mask_buffer",
    "exceptions",
    "cache_after_generation",
    "silu_by_hand",
    "amsgrad",
    "moving_average",
    "distances",
    "retained_losses",
    "kept_errors",
    "width_in_yaml",
)

#: With matrix products: on a simulated H100 64 MiB of cuBLAS's workspaces are beside them.
WITH_PRODUCTS = (
    "naive_attention",
    "float32_scores",
    "attention_chunks",
    "weights_kept",
    "cache_after_generation",
    "silu_by_hand",
    "weights_not_tied",
    "amsgrad",
    "recompute_in_ini",
    "retained_losses",
)

DOUBLED = Regression(
    "doubled",
    """
      def double(x):
    -     return x.mul_(2)
    +     return x * 2
    """,
    "double(torch.ones(1024, 256))",
    (Blame("temporary", "aten::mul", 1 << 20),),
    holder="doubled.KEPT",
)
LINE = sorted(DOUBLED.blamed_places)[0][1]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("regressions") / "project"
    some = [regression for regression in REGRESSIONS if regression.name in SOME]
    return run_all(some, folder, false_alarms=False)


@pytest.mark.parametrize("name", SOME)
def test_the_first_line_names_what_was_edited(outcome: Outcome, name: str) -> None:
    (found,) = (each for each in outcome.scores if each.regression.name == name)
    assert all(found.columns), found.text
    assert found.holder is not False, found.text
    assert found.edit, found.text


@pytest.fixture(scope="module")
def on_a_gpu(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    try:
        torch_build()
    except SimulationError as error:
        pytest.skip(f"what needs a GPU is not run: {error.sentence}")
    folder = tmp_path_factory.mktemp("on_a_gpu") / "project"
    some = [regression for regression in REGRESSIONS if regression.name in WITH_PRODUCTS]
    return run_all(some, folder, false_alarms=False, gpu="H100")


@pytest.mark.parametrize("name", WITH_PRODUCTS)
def test_the_workspaces_of_a_gpu_hide_no_edit(on_a_gpu: Outcome, name: str) -> None:
    (found,) = (each for each in on_a_gpu.scores if each.regression.name == name)
    assert found.edit, found.text
    assert "of workspace from" not in found.sentence


def test_an_edit_is_written_as_a_diff() -> None:
    assert "mul_" in DOUBLED.before["doubled.py"]
    assert "mul_" not in DOUBLED.after["doubled.py"]
    assert DOUBLED.after["doubled.py"].splitlines()[LINE - 1].strip() == "return x * 2"


def said(size: str, operator: str, line: int, more: str = "") -> str:
    cause = f"+{size} of temporary from {operator} at doubled.py:{line}{more}"
    return f"memory peaked at 2.0 MiB, +1.0 MiB (+100 %) over the baseline of 1.0 MiB: {cause}\n"


def test_a_right_answer_is_right_in_all_columns() -> None:
    assert score(DOUBLED, said("1.0 MiB", "aten::mul", LINE)).columns == (True,) * 4


@pytest.mark.parametrize(
    ("text", "column"),
    [
        (said("1.0 MiB", "aten::mul", LINE).replace("of temporary", "of activation"), 0),
        (said("1.0 MiB", "aten::add", LINE), 1),
        (said("1.0 MiB", "aten::mul", LINE + 1), 2),
        (said("1.2 MiB", "aten::mul", LINE), 3),
        (said("0.4 MiB", "aten::mul", LINE, ", 0.6 MiB more elsewhere"), 3),
    ],
)
def test_each_column_can_be_wrong(text: str, column: int) -> None:
    columns = score(DOUBLED, text).columns
    assert [place for place, right in enumerate(columns) if not right] == [column]


def test_a_line_tells_all_that_it_made_and_what_is_elsewhere() -> None:
    less = ", 0.2 MiB more and 0.6 MiB less elsewhere"
    assert all(score(DOUBLED, said("1.4 MiB", "aten::mul", LINE, less)).columns)
    parts = said("1.0 MiB", "aten::add and others", LINE).replace(
        f":{LINE}", f":{LINE}-{LINE + 3} (activation 0.6, temporary 0.4)"
    )
    assert all(score(DOUBLED, parts.replace("of temporary ", "")).columns)


def test_a_test_that_passed_is_wrong_in_all_columns() -> None:
    assert not any(score(DOUBLED, "").columns)


def test_the_holder_may_stand_below_the_first_line() -> None:
    line = said("1.0 MiB", "aten::mul", LINE)
    assert score(DOUBLED, line).holder is False
    assert score(DOUBLED, line + "still held by doubled.KEPT[*]").holder is True


def test_an_edited_line_may_be_named_after_the_one_that_makes_the_memory() -> None:
    assert score(DOUBLED, said("1.0 MiB", "aten::mul", LINE)).edit
    elsewhere = said("1.0 MiB", "aten::mul", LINE - 1)
    assert not score(DOUBLED, elsewhere).edit
    more = f"; changed since: doubled.py:{LINE}"
    assert score(DOUBLED, said("1.0 MiB", "aten::mul", LINE - 1, more)).edit


def test_the_line_after_one_that_is_gone_is_edited() -> None:
    gone = Regression("gone", "  a = 1\n- b = 2\n  c = 3\n", "", ())
    ((file, line),) = gone.edited_places
    assert gone.after[file].splitlines()[line - 1] == "c = 3"


def test_growth_that_no_line_is_to_blame_for_needs_none() -> None:
    all_of_it = Regression("doubled", "", "", (Blame("temporary", ANY, 1 << 20),))
    line = (
        "memory peaked at 2.0 MiB, +1.0 MiB over the baseline of 1.0 MiB: +1.0 MiB of temporary\n"
    )
    assert all(score(all_of_it, line).columns)


def test_names_are_used_once() -> None:
    assert len({regression.name for regression in REGRESSIONS}) == len(REGRESSIONS)
