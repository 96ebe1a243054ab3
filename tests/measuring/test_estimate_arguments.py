"""What `estimate` is given and cannot use is told in words, at the user's line."""

from __future__ import annotations

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from pytest_torchmem import estimate, estimate_graph, estimate_pair  # noqa: E402
from pytest_torchmem.values.errors import (  # noqa: E402
    DeviceNameError,
    EstimateError,
    MarkerError,
    TorchmemError,
)

X = torch.ones(2, 4)


def model() -> nn.Module:
    return nn.Linear(4, 4)


async def later(x):
    return x


def in_parts(x):
    yield x


BAD = {
    "number": (lambda: estimate(3, X), "needs a module or a function, got 3"),  # type: ignore[arg-type]
    "nothing": (lambda: estimate(None), "needs a module or a function, got None"),  # type: ignore[arg-type]
    "tensor": (lambda: estimate(X), "needs a module or a function, got a Tensor"),
    "class": (lambda: estimate(nn.Linear, X), "needs a module, got its class Linear"),
    "async": (lambda: estimate(later, X), "later does it later, as generators and async"),
    "generator": (lambda: estimate(in_parts, X), "in_parts does it later"),
    "no arguments": (lambda: estimate(model()), "missing a required argument: 'input'"),
    "too many": (lambda: estimate(model(), X, X), "too many positional arguments"),
    "keyword": (lambda: estimate(model(), X, y=X), "unexpected keyword argument 'y'"),
    "tuple": (lambda: estimate(model(), (X,)), "one tuple for Linear.*give the arguments one by"),
    "list": (lambda: estimate(model(), [X]), "one list for Linear.*give the arguments one by"),
    "backward": (lambda: estimate(model(), X, backward="no"), "'no' is not True or False"),  # type: ignore[arg-type]
    "optimizer": (
        lambda: estimate(model(), X, optimizer="adam"),
        "optimizer: 'adam' is not an optimizer",
    ),
    "device": (lambda: estimate(model(), X, device=3), "device: 3 is not a device"),  # type: ignore[arg-type]
    "graph": (
        lambda: estimate(torch.export.export(model(), (X,)), X),
        "no arguments for a graph",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_an_argument_that_cannot_be_used_is_named(case):
    call, told = BAD[case]
    with pytest.raises(MarkerError, match=rf"(?s){told}.*\[bad-argument\]$"):
        call()


IMPOSSIBLE = {
    "no tensors": (lambda: estimate(lambda a: 2 * a, 3), "makes and reads no tensor"),
    "scripted": (lambda: estimate(torch.jit.trace(model(), X), X), "scripted module"),
    "optimizer of more": (
        lambda: estimate(model(), X, optimizer=torch.optim.lr_scheduler.StepLR),
        "cannot be made of the parameters alone.*step_size",
    ),
    "no optimizer": (
        lambda: estimate(model(), X, optimizer=lambda parameters: None),
        r"makes None, which has no step\(\)",
    ),
    "no graph": (lambda: estimate_graph(model()), "cannot read a Linear as a graph"),
    "no pair": (lambda: estimate_pair(model(), 3), "cannot read a Linear as a graph"),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_what_cannot_be_followed_is_told_with_the_reason(case):
    call, told = IMPOSSIBLE[case]
    with pytest.raises(EstimateError, match=rf"{told}.*\[not-estimated\]$"):
        call()


@pytest.mark.parametrize("name", ["gpu", "cuda:x", ""])
def test_a_device_that_is_on_no_machine_is_named(name):
    graph = torch.export.export(model(), (X,))
    for call in (
        lambda: estimate(model(), X, device=name),
        lambda: estimate_graph(graph, device=name),
    ):
        with pytest.raises(DeviceNameError, match=rf"called '{name}' on any machine.*-argument"):
            call()


def test_a_device_may_be_torchs_own_value():
    assert estimate(model(), X, device=torch.device("cpu")).device == "cpu"


def test_training_for_a_device_that_torch_was_built_without_does_not_end_the_process():
    code = (
        "import torch; from pytest_torchmem import estimate\n"
        "for device in ('mps', 'vulkan'):\n"
        "    result = estimate(torch.nn.Linear(4, 4), torch.ones(2, 4), device=device)\n"
        "    assert result.device == device + ':0' and result.peak.gradient == 80\n"
        "    assert any('on a machine without one' in note for note in result.notes)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_the_program_itself_raises_comes_out_as_it_is():
    def program(x):
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine") as caught:
        estimate(program, X)
    assert not isinstance(caught.value, TorchmemError)


def test_a_program_that_cannot_be_followed_is_told_at_the_line_that_asked(torch_pytester):
    torch_pytester.makepyfile(
        """
        import torch

        def program(x):
            return x if x.sum() > 0 else 2 * x

        def test_a(torchmem):
            torchmem.estimate(program, torch.ones(2))
        """
    )
    result = torch_pytester.runpytest_inprocess()
    result.stdout.fnmatch_lines(
        [
            ">       torchmem.estimate(program, torch.ones(2))",
            "E       *the program needs the value of a tensor at test_*.py:4 *",
            "test_*.py:7: EstimateError",
        ]
    )
    result.stdout.no_fnmatch_line("*fake_tensor.py*")
