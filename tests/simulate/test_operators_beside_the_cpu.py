"""Each operator of torch's database, with small arguments: the same as on the CPU, or listed."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map_only

if not torch.cuda.is_available():  # the database imports torch's compiler
    pytest.skip("needs a CUDA device, or `torchmem simulate`", allow_module_level=True)
pytest.importorskip("expecttest", reason="torch's own database of operators needs it")

from torch.testing._internal.common_methods_invocations import op_db

pytestmark = [
    pytest.mark.usefixtures("gpu"),
    pytest.mark.filterwarnings("ignore"),
]

CUDA = "cuda"
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.bool)
HALVES = DTYPES[:2]
#: A name, then why its values are others than the CPU's.
LISTED = dict(
    line.split(maxsplit=1)
    for line in Path(__file__).with_name("other_than_on_the_cpu.txt").read_text().splitlines()
    if line and not line.startswith("#")
)
OPERATORS = {op.formatted_name: op for op in op_db if not op.formatted_name.startswith("jiterator")}
#: These stand for all in a run that is not nightly.
SAMPLE = sorted(OPERATORS)[::16]


def samples_of(op, dtype) -> Iterator:
    """Yield up to two samples of 4 to 64 elements, or of what the operator has instead."""
    samples = list(itertools.islice(op.sample_inputs("cpu", dtype), 40))
    tensors = [s for s in samples if isinstance(s.input, torch.Tensor)]
    small = [s for s in tensors if 4 <= s.input.numel() <= 64]
    yield from (small or [s for s in samples if s not in tensors] or samples)[:2]


def converted(value, of_tensors):
    return tree_map_only(torch.Tensor, lambda t: of_tensors(t.detach()), value)


def widened(dtype, wider, tensor):
    return tensor.to(wider) if tensor.dtype == dtype else tensor.clone()


def called(op, sample, of_tensors, device):
    """Call an operator with its tensors converted, and for a device."""
    given, args, kwargs = converted((sample.input, sample.args, sample.kwargs), of_tensors)
    if "device" in kwargs:
        kwargs = {**kwargs, "device": device}
    return tree_flatten(op(given, *args, **kwargs))[0]


def compare_sizes(found, expected, _):
    for mine, theirs in zip(found, expected, strict=True):
        if isinstance(theirs, torch.Tensor):
            assert (mine.shape, mine.stride()) == (theirs.shape, theirs.stride())


def compare(found, expected, dtype):
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        if not isinstance(theirs, torch.Tensor):
            continue
        here = mine if mine.layout == torch.strided else mine.to_dense()
        there = theirs if theirs.layout == torch.strided else theirs.to_dense()
        error = 0.05 if dtype in HALVES else 1e-3
        torch.testing.assert_close(
            here.cpu(), there.to(here.dtype), rtol=error, atol=error, equal_nan=True
        )


def check(name, compare=compare):
    op = OPERATORS[name]
    for dtype in DTYPES:
        if not op.supports_dtype(dtype, CUDA):
            continue
        # The CPU may lack a kernel for a kind of numbers; the GPU computes as in single precision.
        wider = dtype if op.supports_dtype(dtype, "cpu") else torch.float32
        on_cpu = functools.partial(widened, dtype, wider)
        for sample in samples_of(op, dtype):
            expected = called(op, sample, on_cpu, "cpu")
            found = called(op, sample, lambda t: t.to(CUDA), CUDA)
            try:
                compare(found, expected, dtype)
            except AssertionError as error:
                raise AssertionError(f"{name} of {dtype}: {error}") from None


@pytest.mark.parametrize("name", [name for name in SAMPLE if name not in LISTED])
def test_an_operator_computes_what_the_cpu_computes(name):
    check(name)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", [name for name in sorted(OPERATORS) if name not in LISTED and name not in SAMPLE]
)
def test_each_other_operator_computes_what_the_cpu_computes(name):
    check(name)


@pytest.mark.parametrize(
    "name", [name for name, why in LISTED.items() if why.startswith(("random", "reads whatever"))]
)
def test_an_operator_that_draws_or_fills_nothing_has_the_sizes_of_the_cpu(name):
    check(name, compare_sizes)


def test_the_list_names_operators():
    assert LISTED.keys() <= OPERATORS.keys()
