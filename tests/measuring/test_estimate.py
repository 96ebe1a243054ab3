"""A program on a GPU that is not there: the calls, and what is said where that cannot be."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from pytest_torchmem import GiB, MiB, estimate, load, save
from pytest_torchmem.simulate import GPU_VARIABLE
from pytest_torchmem.simulate.torch_builds import torch_build
from pytest_torchmem.values.errors import EstimateError, MarkerError, SimulationError
from tests.documents import has_simulated_gpu

pytestmark = pytest.mark.slow
nightly = partial(pytest.param, marks=pytest.mark.nightly)


@pytest.fixture
def build() -> None:
    """The CUDA build of torch; the test is skipped without it."""
    if not has_simulated_gpu():
        pytest.skip("needs torch's CUDA build: torchmem simulate --fetch")


def half_a_gibibyte() -> torch.Tensor:
    assert os.environ[GPU_VARIABLE] == "L4"
    kept = torch.empty(256 * MiB, dtype=torch.uint8, device="cuda")
    torch.empty(512 * MiB, dtype=torch.uint8, device="cuda")
    return kept


def train(batch: int, width: int) -> None:
    """A step after a warm one: no state is new in it."""
    model = torch.nn.Linear(width, width, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.ones(batch, width, device="cuda")).sum().backward()
        optimizer.step()


class OwnError(ValueError):
    """An error that another process can read."""


class UnreadableError(ValueError):
    """One that it cannot: its arguments are not those of its class."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def raises() -> None:
    raise OwnError("mine")


def raises_what_is_unreadable() -> None:
    raise UnreadableError(1, 2)


def asks_for_too_much() -> None:
    torch.empty(25 * GiB, dtype=torch.uint8, device="cuda")


def exits() -> None:
    sys.exit(3)


def leaves() -> None:
    os._exit(7)


def is_killed() -> None:
    os.abort()


def uses_nothing() -> None:
    torch.ones(1000)


def optimizer_knows(weight: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    assert optimizer.param_groups[0]["params"][0] is weight
    assert weight.neg().is_cuda


def has_its_types(values: dict[str, list[torch.Tensor]], count: int) -> None:
    (leaf,) = values["leaves"]
    leaf.neg()
    assert (leaf.device.type, leaf.is_leaf, leaf.requires_grad, count) == ("cuda", True, True, 3)


@pytest.mark.usefixtures("build")
def test_the_result_is_called_simulated():
    result = estimate(half_a_gibibyte, gpu="L4")
    assert result.name == f"half_a_gibibyte (simulated L4, {torch_build().releases})"
    assert (result.device, result.peak.total) == ("cuda:0", 768 * MiB)
    assert result.counters is not None
    assert result.counters.reserved >= 768 * MiB
    # What the call returns is nobody's.
    assert result.retained.total == 0


@pytest.mark.usefixtures("build")
def test_where_memory_comes_from_is_known_by_the_line():
    result = estimate(half_a_gibibyte, gpu="L4")
    largest = result.peak.live[0]
    assert largest.source is not None
    assert Path(largest.source.file).name == "test_estimate.py"
    assert largest.source.function == "half_a_gibibyte"


@pytest.mark.usefixtures("build")
def test_a_step_has_what_a_gpu_s_libraries_take():
    peak = estimate(train, 8, 1024, gpu="H100").peak
    weights = 4 * (1024 * 1024 + 1024)
    assert peak.optimizer_state == 2 * weights
    assert (peak.parameter, peak.workspace) == (weights, 64 * MiB)


@pytest.mark.nightly
@pytest.mark.usefixtures("build")
def test_modules_and_tensors_on_meta_get_their_memory_on_the_gpu():
    with torch.device("meta"):
        model, batch = torch.nn.Linear(65536, 65536, bias=False), torch.empty(4, 65536)
    peak = estimate(model, batch, gpu="A100").peak
    assert (peak.parameter, peak.input) == (16 * GiB, MiB)
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.nightly
@pytest.mark.usefixtures("build")
def test_arguments_are_put_on_the_gpu_as_what_they_are():
    weight = torch.nn.Parameter(torch.ones(8))
    estimate(optimizer_knows, weight, torch.optim.SGD([weight]), gpu="T4")
    estimate(has_its_types, {"leaves": [torch.ones(8, requires_grad=True)]}, count=3)
    assert not weight.is_cuda


@pytest.mark.usefixtures("build")
def test_what_the_program_raises_comes_out_and_says_where():
    with pytest.raises(OwnError, match=r"^mine") as raised:
        estimate(raises)
    (note,) = raised.value.__notes__
    assert note.startswith("in a process with a simulated GPU:\n")
    assert "in raises\n" in note
    assert str(Path("measuring", "estimate.py")) not in note
    with pytest.raises(torch.cuda.OutOfMemoryError, match=r"total capacity of 21\.96 GiB"):
        estimate(asks_for_too_much, gpu="L4")


@pytest.mark.usefixtures("build")
@pytest.mark.parametrize(
    ("program", "told"),
    [
        nightly(raises_what_is_unreadable, "raised .*UnreadableError: 1 and 2"),
        nightly(exits, r"ended its process: SystemExit\(3\)"),
        nightly(leaves, r"of leaves \(simulated H100, torch .*\) ended with exit code 7"),
        (is_killed, "ended with the signal SIGABRT"),
        nightly(uses_nothing, r"uses_nothing \(simulated H100, .*\) used no memory of the GPU"),
    ],
)
def test_a_process_without_an_answer_says_what_became_of_it(program, told):
    with pytest.raises(EstimateError, match=told):
        estimate(program)


@pytest.mark.usefixtures("build")
def test_a_result_goes_through_a_file(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    result = estimate(half_a_gibibyte, gpu="L4")
    save("mem.json", [result])
    assert load("mem.json")[result.name].peak.at_peak == result.peak.at_peak


SCRIPT = """
import torch
from pytest_torchmem import estimate

class Net(torch.nn.Linear):
    pass

def work(net):
    net(torch.ones(4, 4, device="cuda"))

{guard}    print(estimate(work, Net(4, 4), gpu="T4").name)
"""


@pytest.mark.nightly("False")
@pytest.mark.usefixtures("build")
@pytest.mark.parametrize("as_module", [False, True])
def test_a_script_is_found_in_the_other_process(tmp_path, as_module):
    (tmp_path / "job.py").write_text(SCRIPT.format(guard="if __name__ == '__main__':\n"))
    started = ["-m", "job"] if as_module else ["job.py"]
    done = subprocess.run(
        [sys.executable, *started], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    shown = f"work (simulated T4, {torch_build().releases})\n"
    assert (done.stdout, done.returncode) == (shown, 0), done.stderr


@pytest.mark.nightly
@pytest.mark.usefixtures("build")
def test_a_script_that_estimates_when_it_is_imported_is_told(tmp_path):
    (tmp_path / "job.py").write_text(SCRIPT.format(guard="if True:\n"))
    done = subprocess.run(
        [sys.executable, "job.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "call it below `if __name__ == '__main__':`" in done.stderr.splitlines()[-1]


@pytest.mark.usefixtures("build")
def test_what_only_this_process_has_is_not_found_in_another(monkeypatch):
    monkeypatch.setattr(half_a_gibibyte, "__qualname__", "made_here")
    monkeypatch.setattr(sys.modules[__name__], "made_here", half_a_gibibyte, raising=False)
    with pytest.raises(EstimateError, match=r"not found in another process .*top level of a file"):
        estimate(half_a_gibibyte)


def test_a_program_that_cannot_be_sent_is_told_how_to_write_it(monkeypatch, tmp_path):
    def local() -> None: ...

    monkeypatch.setattr(platform, "system", lambda: "Linux")
    for program, args in ((lambda: 1, ()), (local, ()), (train, ((n for n in "a"),))):
        with pytest.raises(EstimateError, match="write it as a function at the top level of a fil"):
            estimate(program, *args)


def test_a_gpu_that_is_none_is_an_error_at_once():
    with pytest.raises(SimulationError, match="no GPU is called 'H1'"):
        estimate(train, gpu="H1")
    with pytest.raises(MarkerError, match="None is not the name of a GPU"):
        estimate(train, gpu=None)  # type: ignore[call-overload]
    with pytest.raises(MarkerError, match="needs a module or a function, got 3"):
        estimate(3)  # type: ignore[call-overload]


@pytest.mark.parametrize("system", ["Darwin", "Windows"])
def test_elsewhere_a_graph_can_be_estimated(monkeypatch, system):
    monkeypatch.setattr(platform, "system", lambda: system)
    with pytest.raises(SimulationError, match=rf"this is {system}.*estimate\(torch.export"):
        estimate(train, 8, 8)


def test_without_the_build_the_command_that_fetches_it_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if torch.version.cuda:
        pytest.skip("the torch that is installed is a CUDA build")
    with pytest.raises(SimulationError, match="`torchmem simulate --fetch` fetches it"):
        estimate(train, 8, 8)
