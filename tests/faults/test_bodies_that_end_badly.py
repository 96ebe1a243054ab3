"""Bodies that end in ways of their own, with torch: the next test is judged as if alone."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("torch")

BODIES = """
import signal, sys, threading, _thread
import pytest, torch

# Who started the run in the background may have let it ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

KiB = 1024

def deeper(x):
    return deeper(x + 1)

def recursion():
    deeper(torch.ones(KiB))

def recursion_in_backward():
    class Deep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x): return x * 2
        @staticmethod
        def backward(ctx, g): return deeper(g)
    Deep.apply(torch.ones(KiB, requires_grad=True)).sum().backward()

def interrupted():
    torch.ones(KiB)
    _thread.interrupt_main()
    for _ in range(1000000):
        torch.ones(2)

def exits():
    torch.ones(KiB)
    sys.exit(3)

def other_limit():
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(len(__import__("inspect").stack()) + 60)
    try:
        deeper(torch.ones(KiB))
    finally:
        sys.setrecursionlimit(before)

ENDINGS = [recursion, recursion_in_backward, interrupted, exits, other_limit]

@pytest.mark.memory_budget("1GiB")
@pytest.mark.parametrize("ending", ENDINGS, ids=lambda f: f.__name__)
class Test:
    def test_ends(self, ending):
        with pytest.raises((RecursionError, KeyboardInterrupt, SystemExit)):
            ending()

    @pytest.mark.memory_budget("1MiB")
    def test_next(self, ending):
        x = torch.ones(256 * KiB)
        y = x + 1
        del x, y
        torch.ones(KiB)

    @pytest.mark.memory_budget("3MiB")
    def test_the_one_after(self, ending):
        x = torch.ones(256 * KiB)
        y = x + 1
        del x, y
"""


def test_the_test_after_a_body_that_ended_badly_has_its_own_number(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(BODIES)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "--torchmem-strict")
    result.assert_outcomes(passed=10, failed=5)
    # All five have one cause, which is told in whole once.
    result.stdout.fnmatch_lines(
        ["memory peaked at 2.0 MiB, +1.0 MiB (+100 %) over the limit*"]
        + ["*test_next[[]*2.0 MiB *over limit*"] * 5
    )
