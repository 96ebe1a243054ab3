"""A user's mistake is reported at the user's line, with none of our code after it."""

import re

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("torch")

MISTAKES = {
    "torchmem.measure('')": "needs the region's name",
    "torchmem.steps(0)": "cannot make 0 steps",
    "torchmem.check('a')": "needs a region of this body",
    "torchmem.check(done, tolerance='2')": "percent need the sign",
    "[torchmem.check(done) for _ in range(2)]": "two regions named 'done'",
    "torchmem.estimate(3)": "needs a module or a function, got 3",
    "torchmem.estimate(torch.ones, 3, gpu='H1')": "no GPU is called 'H1'",
    "torchmem.save_trace('/nonexistent/x')": "the trace cannot be written to '/nonexistent/x' (No",
    "measure('1MiB')": "reads as a size",
    "measure(total='1')": "measure, total: cannot read '1'",
    "measure('never').peak": "nothing has been measured yet",
}
HEADER = """
import torch
from pytest_torchmem import measure
from pytest_torchmem.measuring import body_measurement
"""
MISTAKE = """
def test_{}(torchmem):
    with torchmem.measure("done") as done:
        torch.ones(1024)
    {}
"""
OTHERS = """
def test_open_region(torchmem):
    with torchmem.measure("open") as region:
        region.peak.total

def test_over():
    with measure("block", total="1KiB", device="cpu"):
        torch.ones(1024)

def test_misspelt(torchmem):
    with torchmem.measure("done") as done:
        torch.ones(1024)
    done.peak.activatoin

def test_ours(torchmem, monkeypatch):
    monkeypatch.setattr(body_measurement, "MarkKind", None)
    with torchmem.measure("forward"):
        pass
"""


def test_a_mistake_is_reported_at_the_users_line(torch_pytester):
    mistakes = [MISTAKE.format(number, call) for number, call in enumerate(MISTAKES)]
    torch_pytester.makepyfile("\n".join([HEADER, *mistakes, OTHERS]))
    result = torch_pytester.runpytest_inprocess()
    result.assert_outcomes(failed=len(MISTAKES) + 4)
    parts = re.split(r"^_+ test_(\w+) _+$", result.stdout.str(), flags=re.MULTILINE)[1:]
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    for number, sentence in enumerate(MISTAKES.values()):
        assert sentence in sections[str(number)]
    assert "no attribute 'activatoin' (did you mean 'activation'?)" in sections["misspelt"]
    ours = {name for name, text in sections.items() if re.search(r"pytest_torchmem/\S*:\d", text)}
    # Our own mistakes keep their traceback.
    assert ours == {"ours"}


PROGRAMS = """
import copy
import pytest
import torch

pytestmark = pytest.mark.memory_budget("1GiB")

def test_backward():
    x = torch.ones(8, requires_grad=True)
    y = x.exp()
    y.add_(1).sum().backward()

def test_hook():
    def hook(grad):
        raise ValueError("the program's own")
    x = torch.ones(8, requires_grad=True)
    x.register_hook(hook)
    (x * 2).sum().backward()

def test_transform():
    torch.func.grad(lambda x: x * torch.ones(3, 4))(torch.ones(5))

def test_resize():
    torch.ones(3).untyped_storage().resize_(-5)

def test_copy():
    class Copied(torch.nn.Module):
        def __setstate__(self, state):
            super().__setstate__(1)
    copy.deepcopy(Copied())
"""


def test_an_error_of_the_program_has_the_traceback_that_it_has_without_us(torch_pytester):
    torch_pytester.makepyfile(PROGRAMS)
    result = torch_pytester.runpytest_inprocess()
    result.assert_outcomes(failed=5)
    result.stdout.no_re_match_line(r".*pytest_torchmem/\S*:\d")
