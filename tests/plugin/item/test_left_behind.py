"""What a body leaves behind on the real engine: in cycles, in place of what was there, known."""

import re
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.searches(with_optimizers=True)]

pytest.importorskip("torch")

BODIES = """
import pytest
import torch

CACHE, KEPT, OTHER = {}, [], []


class Node:
    def __init__(self):
        self.me, self.tensor = self, torch.ones(1 << 18)


@pytest.fixture
def cached():
    CACHE["batch"] = torch.ones(1 << 18)
    yield
    CACHE.clear()


@pytest.fixture
def garbage():
    Node()


@pytest.mark.memory_budget(retained="0B")
def test_cycle():
    Node()


@pytest.mark.memory_budget(retained="0B", collect=True)
def test_cycle_that_is_collected():
    Node()


@pytest.mark.memory_budget(retained="0B")
def test_replaced(cached):
    CACHE["batch"] = torch.ones(1 << 18)


@pytest.mark.memory_budget(net_retained="0B")
def test_replaced_net(cached):
    CACHE["batch"] = torch.ones(1 << 18)


@pytest.mark.memory_budget(net_retained="0B")
def test_replaced_by_more(cached):
    CACHE["batch"] = torch.ones(1 << 19)


@pytest.mark.memory_budget(net_retained="0B", collect=True)
def test_others_garbage_excuses_nothing(garbage):
    CACHE["more"] = torch.ones(1 << 18)


def test_region(torchmem, cached):
    with torchmem.measure("same") as same:
        CACHE["batch"] = torch.ones(1 << 18)
    with torchmem.measure("more") as more:
        CACHE["batch"] = torch.ones(1 << 19)
    assert (same.retained.net, more.retained.net) == (0, 1 << 20)


@pytest.mark.memory_budget(retained="0B", growth="0B")
def test_known(torchmem):
    for _ in torchmem.steps(3):
        KEPT.append(torch.ones(1 << 18))


@pytest.mark.memory_budget(retained="0B", growth="0B")
def test_known_and_another(torchmem):
    for _ in torchmem.steps(3):
        KEPT.append(torch.ones(1 << 18))
        OTHER.append(torch.ones(1 << 17))


@pytest.mark.memory_budget(retained="0B")
def test_graph_that_holds_itself():
    cache, weight = torch.zeros(2, 1 << 17), torch.ones(1 << 17, requires_grad=True)
    for _ in range(40):  # more nodes than there are searches
        cache[0] = weight
        cache[1] = cache[0] * weight


class Pair(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.large, self.small = torch.nn.Linear(256, 1024), torch.nn.Linear(256, 512)

    def forward(self, x):
        return [layer(x) for layer in (self.large, self.small)]


@pytest.mark.memory_budget(temporary="1MiB", retained="0B")
def test_peak_of_one_module_and_holder_of_another(torchmem):
    with torch.no_grad():
        OTHER.append(Pair()(torch.ones(512, 256))[1])


@pytest.mark.memory_budget(temporary="1MiB", retained="0B")
def test_peak_of_a_line_and_holder_of_a_part(torchmem):
    rows = [torch.ones(1 << 18) for _ in range(8)]
    OTHER.append(rows[0])


@pytest.mark.memory_budget(temporary="1MiB", retained="0B")
def test_peak_and_holder_of_a_line(torchmem):
    rows = [torch.ones(1 << 18) for _ in range(8)]
    OTHER.extend(rows[1:])
"""


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """Each failed test of the run, and the first line of its failure."""
    folder = tmp_path_factory.mktemp("left")
    (folder / "test_it.py").write_text(BODIES)
    (folder / "pytest.ini").write_text(
        "[pytest]\ntorchmem_device = cpu\ntorchmem_known_holder =\n"
        "    test_it.KEPT* because a batch is kept\n"
    )
    command = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    told = dict(re.findall(r"^_+ (test_\w+) _+$\n+(.*)", done.stdout, re.MULTILINE))
    return told | {"end": done.stdout}


def test_a_cycle_is_retained_unless_garbage_is_collected_first(failures):
    assert failures["test_cycle"].endswith("in a cycle of test_it.Node: tensor")
    assert "test_cycle_that_is_collected" not in failures


def test_a_graph_that_nothing_of_python_s_holds_is_told_as_that(failures):
    told = failures["test_graph_that_holds_itself"]
    assert told.endswith("by no Python object: most likely by an autograd graph that holds itself")


def test_what_took_the_place_of_something_is_retained_and_nothing_net(failures):
    assert failures["test_replaced"].startswith("retained 1.0 MiB, +1.0 MiB over")
    assert "test_replaced_net" not in failures
    assert "test_region" not in failures


def test_a_net_failure_tells_both_parts_and_the_holder(failures):
    told = failures["test_replaced_by_more"]
    assert told.startswith("retained a net 1.0 MiB (made 2.0 MiB, freed 1.0 MiB of before)")
    assert told.endswith("still held by test_it.CACHE['batch']")


def test_who_fills_a_cache_first_is_told_of_a_warm_up(failures):
    told = failures["end"].count("\nthe first test that fills a cache retains it; ")
    # A cycle is no cache, and what each step adds is not made once.
    assert told == failures["end"].count("\nwhat keeps it alive:") - 2


def test_garbage_that_others_left_is_no_part_of_what_a_body_freed(failures):
    assert failures["test_others_garbage_excuses_nothing"].startswith("retained a net 1.0 MiB, ")


def test_what_known_holders_have_is_not_counted_and_never_named(failures):
    assert "test_known" not in failures
    told = failures["test_known_and_another"]
    assert told.startswith("retained 1.5 MiB, +1.5 MiB over the limit of 0 B; known ")
    assert "; known holders have 3.0 MiB more: largest 1.5 MiB of temporary from aten::ones" in told
    assert told.endswith("still held by test_it.OTHER[*]")
    assert "\nalso: grew by 512.0 KiB per step" in failures["end"]
    assert "\nknown holder test_it.KEPT*: 3.0 MiB in 2 tests (a batch is kept)" in failures["end"]


@pytest.mark.parametrize(
    "test", ["one_module_and_holder_of_another", "a_line_and_holder_of_a_part"]
)
def test_a_peak_s_cause_is_not_held_by_who_holds_something_else_of_its_line(failures, test):
    told = failures[f"test_peak_of_{test}"]
    assert " peaked at " in told
    assert "held" not in told


def test_a_peak_s_cause_is_held_by_who_holds_most_of_it_at_the_end(failures):
    assert failures["test_peak_and_holder_of_a_line"].endswith("still held by test_it.OTHER[*]")


FIRST_OPTIMIZER = """
import gc

import torch

from pytest_torchmem import measure


def body():
    weight = torch.nn.Parameter(torch.ones(1 << 18))
    torch.optim.AdamW([weight])


gc.set_threshold(10**9)  # it comes by too late
with measure() as step:
    body()
print(step.retained.total)
"""


def test_the_first_optimizer_of_a_process_retains_nothing_by_importing_the_compiler(tmp_path):
    path = tmp_path / "first.py"
    path.write_text(FIRST_OPTIMIZER)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"


TAKEN_AWAY = """
import sys
from unittest import mock

import pytest


@pytest.fixture
def isolated():
    with mock.patch.dict(sys.modules):
        yield


@pytest.mark.memory_budget("1MiB")
def test_isolated(isolated):
    import torch

    torch.ones(3)


@pytest.mark.memory_budget("1MiB")
def test_taken_away(isolated):
    import torch

    torch.ones(3)
    for name in [name for name in sys.modules if name.startswith("pytest_torchmem")]:
        del sys.modules[name]


@pytest.mark.memory_budget("1KiB")
def test_after_it():
    import torch

    torch.ones(3000)
"""


def test_a_test_may_take_our_modules_away_and_the_next_one_is_measured(
    pytester: pytest.Pytester,
):
    # In a process of its own: nothing of ours or of torch's is imported there before.
    pytester.makepyfile(TAKEN_AWAY)
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["memory: 1 failed *, 2 ok"])


WITHOUT_NUMPY = """
import sys

import pytest
import torch


@pytest.mark.memory_budget("1KiB")
@pytest.mark.parametrize("how", ["deleted", "none"])
def test_without_numpy(how, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "numpy"]:
        monkeypatch.delitem(sys.modules, name)
    if how == "none":
        monkeypatch.setitem(sys.modules, "numpy", None)
    kept = torch.ones(3000)


@pytest.mark.memory_budget("1MiB")
def test_after_it():
    torch.ones(3000).numpy()
"""


def test_a_test_may_pretend_that_numpy_is_not_installed(pytester: pytest.Pytester):
    # In a process of its own: numpy imports parts of itself when they are first called.
    pytester.makepyfile(WITHOUT_NUMPY)
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(passed=1, failed=2)
    # Both have one cause, which is told in whole once.
    result.stdout.fnmatch_lines(["*the limit of 1.0 KiB*", *["*11.7 KiB *over limit*"] * 2])
