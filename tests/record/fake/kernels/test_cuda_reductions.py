"""Partial results of CUDA's reductions, beside what was measured on a simulated H100."""

from __future__ import annotations

import pytest
import torch

from pytest_torchmem.record.fake.kernels import cuda
from pytest_torchmem.record.fake.kernels.cuda_attention import flash_forward
from pytest_torchmem.record.fake.kernels.cuda_reductions import (
    Read,
    Reduction,
    partial_bytes,
)
from pytest_torchmem.record.fake.kernels.operator_call import EXTREMES, Call, Processors
from pytest_torchmem.record.torch_api import fake_tensors

H100 = Processors(132, 2048)
SUM, PLACE, MOMENTS = Reduction(4, 4), Reduction(16, 8), Reduction(16, 4, unrolled=2)
aten = torch.ops.aten


def taken(shape, dims, kind=SUM, processors=H100, *, strides=None, offset=0, item=4):
    x = torch.empty(shape, device="meta")
    return partial_bytes(
        Read(tuple(shape), tuple(strides or x.stride()), offset, item), dims, kind, processors
    )


@pytest.mark.parametrize(
    ("shape", "dims", "kind", "measured"),
    [
        ((1024, 256), (), SUM, 132),
        ((1024, 256), (0,), SUM, 2_097_160),
        ((1024, 256), (1,), SUM, 0),
        ((4096, 4096), (0,), SUM, 134_217_856),
        ((64, 1_000_000), (1,), SUM, 2560),
        ((1_000_000, 64), (0,), SUM, 34_603_012),
        ((4096, 4096), (), MOMENTS, 8452),
        ((1_000_000, 64), (0,), PLACE, 138_412_036),
    ],
)
def test_a_reduction_keeps_partial_results_as_it_is_split(shape, dims, kind, measured):
    assert taken(shape, dims, kind) == measured


def test_axes_that_are_one_in_memory_are_one():
    assert taken((32, 128, 512), (0, 1)) == taken((4096, 512), (0,))
    apart = (128 * 512 * 2, 512, 1)
    assert taken((32, 128, 512), (0, 1), strides=apart) == taken((4096, 512), (0,))


def test_an_address_between_vectors_is_read_one_by_one():
    # A quarter of the outputs of a thread, and four times the threads beside each other.
    assert taken((4096, 4096), (0,), offset=1) < taken((4096, 4096), (0,))


def test_nothing_is_split_where_nothing_is_read():
    assert taken((0, 8), (0,)) == 0
    assert taken((), ()) == 0


def test_a_smaller_gpu_splits_less():
    smallest, largest = (taken((2**24,), (), processors=p) for p in EXTREMES)
    assert smallest < taken((2**24,), ()) <= largest


def call_of(func, *args, **kwargs):
    outputs = fake_tensors.tensors_in(func(*args, **kwargs))
    return Call(func, func._schema.name, args, kwargs, outputs)


def test_without_a_gpu_all_that_are_known_give_an_interval(monkeypatch):
    call = call_of(aten.sum.default, torch.empty(2**24, device="meta"))
    monkeypatch.setattr(fake_tensors, "processors_here", lambda: None)
    least, most = cuda.cuda_bounds(call)
    assert least < most
    monkeypatch.setattr(fake_tensors, "processors_here", lambda: (132, 2048))
    assert least < cuda.cuda_bounds(call)[0] == cuda.cuda_bounds(call)[1] <= most


def test_a_mask_is_counted_as_whole_numbers(monkeypatch):
    monkeypatch.setattr(fake_tensors, "processors_here", lambda: (132, 2048))
    mask = torch.empty(1024, 256, dtype=torch.bool, device="meta")
    assert cuda.cuda_bounds(call_of(aten.sum.default, mask)) == (2_097_412, 2_097_412)


def test_few_heads_split_the_keys_of_flash_attention():
    def call(batch, heads, length):
        query = torch.empty(batch, heads, length, 64, dtype=torch.bfloat16, device="meta")
        name = "aten::_scaled_dot_product_flash_attention"
        func = aten._scaled_dot_product_flash_attention.default
        return Call(func, name, (query, query, query), {}, [query], H100)

    assert flash_forward(call(2, 4, 512)) == 2_129_920
    assert flash_forward(call(1, 1, 2048)) == 4_259_840
    assert flash_forward(call(64, 8, 512)) == 0


def test_cudnn_may_attend_in_the_place_of_flash_attention(monkeypatch):
    monkeypatch.setattr(fake_tensors, "processors_here", lambda: None)
    query = torch.empty(2, 4, 512, 64, dtype=torch.bfloat16, device="meta")
    func = aten._scaled_dot_product_flash_attention.default
    call = Call(func, func._schema.name, (query, query, query), {}, [query])
    assert cuda.cuda_bounds(call)[0] == 0 < cuda.cuda_bounds(call)[1]
