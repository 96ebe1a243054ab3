"""Scratch inside operators, rule by rule."""

from __future__ import annotations

import torch

from pytest_torchmem.record.fake.scratch import scratch_bytes, uncounted


def test_a_matrix_that_blas_can_read_is_not_copied():
    a, b = torch.ones(4, 6), torch.ones(6, 8)
    assert scratch_bytes("aten::mm", [a, b]) == 0
    assert scratch_bytes("aten::mm", [a, torch.ones(8, 6).t()]) == 0
    assert scratch_bytes("aten::mm", [torch.ones(4, 12)[:, :6], b]) == 0


def test_an_expanded_matrix_is_copied():
    expanded = torch.ones(()).expand(4, 6)
    assert scratch_bytes("aten::mm", [expanded, torch.ones(6, 8)]) == 4 * 6 * 4
    bias = torch.ones(8)
    assert scratch_bytes("aten::addmm", [bias, expanded, torch.ones(6, 8)]) == 4 * 6 * 4


def test_backward_kernels_copy_a_gradient_that_is_not_contiguous():
    expanded, output = torch.ones(()).expand(4, 6), torch.ones(4, 6)
    assert scratch_bytes("aten::_softmax_backward_data", [expanded, output, -1]) == 4 * 6 * 4
    assert scratch_bytes("aten::_softmax_backward_data", [output, output, -1]) == 0


def test_operators_without_a_rule_take_none():
    assert scratch_bytes("aten::relu", [torch.ones(()).expand(4, 6)]) == 0


def test_what_is_left_out_is_said_by_device():
    assert uncounted(["aten::relu"], "cpu") == ""
    assert "aten::convolution" in uncounted(["aten::relu", "aten::convolution"], "cpu")
    assert "cuBLAS" in uncounted(["aten::relu"], "cuda")
