"""Convolutions beside what others measured on an RTX 3090 with an earlier release of cuDNN.

The peaks are those of Liger-Kernel's benchmark table of April 2025 (``multi_token_attention`` and
``sparse_multi_token_attention``, torch's own operators): a convolution of masked probabilities.
"""

from __future__ import annotations

import pytest
import torch

from tests.simulate.test_on_a_simulated_gpu import require_planner, sees

pytestmark = pytest.mark.usefixtures("gpu")

#: The length, and the bytes that were allocated at the peak on the real one.
HALF = ((32, 1006592), (64, 1553408), (128, 3642368), (256, 12785152), (1024, 187667968))
SINGLE = ((32, 474624), (128, 7390720), (512, 118022656), (1024, 471970304))

PROGRAM = """
    import torch
    from pytest_torchmem import measure

    def probabilities(scores, mask):
        low = torch.tensor(-1e9, device="cuda", dtype=scores.dtype)
        z = scores.masked_fill(~mask, low)
        if scores.dtype is torch.bfloat16:
            return z.softmax(-1)
        ordered, _ = z.sort(dim=-1, descending=True)  # sparsemax
        sums = ordered.cumsum(-1)
        ranks = torch.arange(1, len(mask) + 1, device="cuda", dtype=z.dtype)
        positive = ordered > -1e8
        chosen = (1 + ranks * ordered > sums) & positive
        count = chosen.sum(-1, keepdim=True)
        at_least_one = torch.max(count, torch.ones_like(count))
        last = sums.gather(-1, at_least_one.long() - 1)
        bound = (last - 1) / at_least_one.to(z.dtype)
        bound = torch.where(count == 0, torch.full_like(bound, float("inf")), bound)
        return (z - bound).clamp(min=0)

    def look(length, dtype):
        options = {"device": "cuda", "dtype": dtype}
        pairs = [(torch.zeros(4, 4, 3, 3, **options), torch.zeros(4, **options)) for _ in range(2)]
        weight, bias = (torch.nn.Parameter(tensor) for tensor in pairs[0])
        x = torch.randn(2, 4, length, length, **options, requires_grad=True)
        given = torch.randn_like(x)

        def forward():
            mask = torch.ones(length, length, dtype=torch.bool, device="cuda").tril()
            made = torch.conv2d(probabilities(x, mask), weight, bias, padding=1)
            return made.masked_fill(~mask, torch.tensor(0.0, **options))

        def step():
            made = forward()
            made.backward(given, retain_graph=True)

        step()
        torch.cuda.reset_peak_memory_stats()
        with measure(device="cuda") as measured:
            step()
        result, allocated = measured.result, torch.cuda.max_memory_allocated()
        print(allocated, result.at_most - result.peak.total, *result.blind_spots)

    for name in ROWS:
        length, dtype = name.split(":")
        look(int(length), getattr(torch, dtype))
"""


def require_fitted_release():
    """How many plans an interval has was fitted to cuDNN 9.20: others may rank smaller ones."""
    require_planner()
    if torch.backends.cudnn.version() // 100 != 920:
        pytest.skip("the numbers are those of cuDNN 9.20")


def test_a_convolution_has_two_ends_whatever_release_plans_it(pytester):
    """torch 2.13 asks cuDNN for all plans, and 2.15 for one."""
    require_planner()
    program = PROGRAM.replace("ROWS", repr(["128:float32"]))
    (line,) = sees(pytester, program, "--gpu", "RTX3090", "--", "python")
    assert int(line.split()[1]) > 0


def test_a_peak_with_convolutions_is_an_interval_that_has_the_peak_of_another_release(pytester):
    require_fitted_release()
    rows = [(f"{n}:bfloat16", real) for n, real in HALF]
    rows += [(f"{n}:float32", real) for n, real in SINGLE]
    program = PROGRAM.replace("ROWS", repr([name for name, _ in rows]))
    printed = sees(pytester, program, "--gpu", "RTX3090", "--", "python")
    lines = [line.split(" ", 2) for line in printed]
    assert len(lines) == len(rows)
    for (name, real), (least, more, *said) in zip(rows, lines, strict=True):
        assert int(least) <= real <= int(least) + int(more), name
        assert bool(said) == (int(more) > int(least) // 1000), name
    # Of the large ones the convolution is not the peak, or another plan needs nearly the same.
    exact = [name for (name, real), line in zip(rows, lines, strict=True) if int(line[0]) == real]
    assert exact == ["128:float32", "512:float32", "1024:float32"]
    assert int(lines[4][1]) < 187667968 // 100


def test_a_limit_within_what_other_plans_may_take_is_not_judged(pytester):
    require_fitted_release()
    pytester.makepyfile(
        """
        import pytest, torch

        @pytest.mark.memory_budget("3MiB")
        def test_conv():
            x = torch.zeros(2, 4, 64, 64, device="cuda", dtype=torch.bfloat16)
            torch.conv2d(x, torch.zeros(4, 4, 3, 3, device="cuda", dtype=x.dtype), padding=1)
        """
    )
    run = pytester.runpytest_subprocess("--torchmem-simulate=RTX3090", "-p", "no:asyncio")
    assert run.ret == pytest.ExitCode.TESTS_FAILED
    run.stdout.fnmatch_lines(
        [
            "the limit of 3.0 MiB on memory cannot be judged: the peak is between 1*",
            "*torchmem, simulated RTX3090, torch *, cuDNN 9.*",
        ]
    )
