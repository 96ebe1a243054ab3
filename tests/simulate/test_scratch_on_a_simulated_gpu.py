"""Memory that kernels of CUDA take for themselves, by our rules and as torch's allocator counts it.

torch's own code decides how much that is; the simulated GPU has its processors.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pytest_torchmem.record.fake.kernels.operator_call import Call
from pytest_torchmem.record.fake.kernels.scratch import scratch_of
from pytest_torchmem.record.torch_api import fake_tensors

pytestmark = pytest.mark.usefixtures("gpu")

aten = torch.ops.aten
# A scan over all takes a few kilobytes, and C++ makes tensors of Python's numbers.
SMALL = 3000


def floats(*shape, dtype=torch.float32):
    return torch.zeros(*shape, device="cuda", dtype=dtype)


def places(count, largest):
    return torch.randint(0, largest, (count,), device="cuda")


def measured(func, *args, **kwargs):
    """The bytes that a call holds at its peak beyond those that are there after it."""
    func(*args, **kwargs)
    torch.cuda.reset_peak_memory_stats()
    held = func(*args, **kwargs)
    stats = torch.cuda.memory_stats()
    del held
    return stats["requested_bytes.all.peak"] - stats["requested_bytes.all.current"]


def require_rule(func, *args, **kwargs):
    outputs = fake_tensors.tensors_in(func(*args, **kwargs))
    call = Call(func, func._schema.name, args, kwargs, outputs)
    scratch = scratch_of(call, on_cpu=False)
    del call, outputs
    found = measured(func, *args, **kwargs)
    assert scratch.bytes_ - SMALL <= found <= scratch.at_most_bytes + SMALL


REDUCTIONS = {
    "sum": lambda x, d: (aten.sum.dim_IntList, (x, d)),
    "mean": lambda x, d: (aten.mean.dim, (x, d)),
    "norm": lambda x, d: (aten.linalg_vector_norm.default, (x, 2, d)),
    "amax": lambda x, d: (aten.amax.default, (x, d)),
    "var": lambda x, d: (aten.var.correction, (x, d)),
    "any": lambda x, d: (aten.any.dims, (x, d)),
    "prod": lambda x, d: (aten.prod.dim_int, (x, d[0])),
    "argmax": lambda x, d: (aten.argmax.default, (x, d[0])),
    "max": lambda x, d: (aten.max.dim, (x, d[0])),
    "max of all": lambda x, d: (aten.max.default, (x,)),
    "logsumexp": lambda x, d: (aten.logsumexp.default, (x, d)),
    "count_nonzero": lambda x, d: (aten.count_nonzero.dim_IntList, (x, d)),
}
TYPES = [torch.float32, torch.bfloat16, torch.float64]
SIZES = st.sampled_from([1, 2, 3, 8, 33, 100, 128, 256, 1000, 4096])
LAYOUTS = st.sampled_from(["whole", "reversed", "part", "expanded"])


def laid_out(x, layout):
    if layout == "reversed":
        return x.permute(*reversed(range(x.dim())))
    if layout == "part":
        return x[..., x.shape[-1] // 2 :]
    return x[:1].expand(x.shape) if layout == "expanded" else x


@pytest.mark.parametrize("name", REDUCTIONS)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(SIZES, min_size=1, max_size=3), LAYOUTS, st.sampled_from(TYPES), st.data())
def test_the_partial_results_of_a_reduction_are_known(name, shape, layout, dtype, data):
    while torch.Size(shape).numel() > 2**24:
        shape[shape.index(max(shape))] //= 8
    x = laid_out(floats(*shape, dtype=dtype), layout)
    dims = data.draw(st.sets(st.integers(0, x.dim() - 1), min_size=1))
    func, args = REDUCTIONS[name](x, sorted(dims))
    require_rule(func, *args)


@pytest.mark.parametrize("dim", [0, 1])
def test_exponents_of_expanded_rows_are_added_up_from_a_copy(dim):
    require_rule(aten.logsumexp.default, floats(1, 4096).expand(33, 4096), [dim])


@pytest.mark.parametrize("count", [100, 3073, 10_000, 70_000])
@pytest.mark.parametrize("rows", [100, 50_000])
def test_gradients_of_rows_that_are_looked_up_are_sorted(count, rows):
    indices = places(count, rows)
    of_rows = aten.embedding_dense_backward.default
    require_rule(of_rows, floats(count, 24), indices, rows, -1, False)
    require_rule(aten.index_put.default, floats(rows, 24), (indices,), floats(count, 24), True)
    expanded = floats(24).expand(count, 24)
    require_rule(aten.index_put.default, floats(rows, 24), (indices,), expanded, True)


@pytest.mark.parametrize("shape", [(100,), (9000,), (3, 5000), (200, 5000), (5000, 3), (40, 1000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16])
def test_what_sorts_and_what_finds_the_largest_is_bounded(shape, dtype):
    x = floats(*shape, dtype=dtype)
    for dim in range(x.dim()):
        require_rule(aten.sort.default, x, dim)
    require_rule(aten.topk.default, x, 2)
    require_rule(aten.median.default, x)
    require_rule(aten.randperm.default, shape[0], device="cuda")


def test_many_rows_share_their_largest_over_blocks():
    require_rule(aten.topk.default, floats(8192, 768), 4)


@pytest.mark.parametrize("shape", [(128, 256), (300, 20), (8, 16), (4, 128, 64), (4, 16, 8)])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("vectors", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_singular_values_are_found_in_a_copy(shape, full, vectors, dtype):
    require_rule(aten._linalg_svd.default, floats(*shape, dtype=dtype), full, vectors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("width", [16, 64, 96, 128, 256])
@pytest.mark.parametrize("length", [64, 100, 512])
def test_attention_adds_up_in_blocks(length, width, dtype):
    x = floats(2, 3, length, width, dtype=dtype)
    forward = aten._scaled_dot_product_efficient_attention.default
    require_rule(forward, x, x, x, None, True)
    out, *sums = forward(x, x, x, None, True)
    for grad in (torch.zeros_like(out), floats(1, dtype=dtype).expand(out.shape)):
        backward = aten._scaled_dot_product_efficient_attention_backward.default
        require_rule(backward, grad, x, x, x, None, out, *sums, 0.0, [True, True, True, False])


@pytest.mark.parametrize("heads_of_keys", [1, 4])
@pytest.mark.parametrize("shape", [(2, 4, 512, 64), (1, 4, 2048, 128), (1, 4, 1, 96)])
def test_flash_attention_splits_keys_and_adds_up_in_32_bits(shape, heads_of_keys):
    batch, heads, length, width = shape
    query = floats(batch, length, heads, width, dtype=torch.float16).transpose(1, 2)
    key = floats(batch, 512, heads_of_keys, width, dtype=torch.float16).transpose(1, 2)
    forward = aten._scaled_dot_product_flash_attention.default
    require_rule(forward, query, key, key)
    out = forward(query, key, key)
    backward = aten._scaled_dot_product_flash_attention_backward.default
    args = (query, key, key, *out[:6], 0.0, False, *out[6:8])
    require_rule(backward, torch.zeros_like(out[0]), *args)


LOSSES = ["mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy"]


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("name", [*LOSSES, "binary_cross_entropy_with_logits"])
def test_the_loss_of_each_element_is_there_until_it_is_added_up(name, reduction):
    x = floats(3000, 700)
    weights = {"binary_cross_entropy": 1, "binary_cross_entropy_with_logits": 2}.get(name, 0)
    require_rule(getattr(aten, name).default, x, x, *[None] * weights, reduction)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_of_pictures_copy_what_they_cannot_read(layout, dtype, monkeypatch):
    monkeypatch.delenv("SIMULATED_CUDA_CUDNN", raising=False)  # whose workspaces have no rule
    x = floats(4, 16, 32, 32, dtype=dtype).to(memory_format=layout)
    half = floats(4, 16, 16, 16, dtype=dtype).to(memory_format=layout)
    weight = floats(16, 16, 3, 3, dtype=dtype)
    how = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    require_rule(aten.convolution.default, x, weight, None, *how)
    back = aten.convolution_backward.default
    require_rule(back, x, x, weight, [16], *how, [True, True, True])
    for grad in (half, floats(1, dtype=dtype).expand(half.shape)):
        pooled = ([2, 2], [2, 2], [0, 0], False, True, None)
        require_rule(aten.avg_pool2d_backward.default, grad, x, *pooled)
        require_rule(aten._adaptive_avg_pool2d_backward.default, grad, x)
    require_rule(aten.im2col.default, x, [3, 3], [1, 1], [0, 0], [1, 1])
    per_channel = floats(16, dtype=dtype)
    group = (4, 16, 1024, 8, 1e-5)
    plain = x.contiguous()
    require_rule(aten.native_group_norm.default, plain, per_channel, per_channel, *group)


@pytest.mark.parametrize("of_x", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("places", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_are_scaled_by_channel_where_a_channel_has_several_values(
    dtype, places, scaled, of_x
):
    x, sizes = floats(64, 64, places, dtype=dtype), (64, 64, places, 4)
    weight = floats(64, dtype=dtype) if scaled else None
    require_rule(aten.native_group_norm.default, x, weight, weight, *sizes, 1e-5)
    kept = floats(64, 4, dtype=dtype), floats(64, 4, dtype=dtype)
    wanted = [of_x, scaled, scaled]
    if any(wanted):
        func = aten.native_group_norm_backward.default
        require_rule(func, x, x, *kept, weight, *sizes, wanted)


@pytest.fixture
def no_workspaces():
    """cuBLAS without workspaces of torch's, where these would count in each call."""
    if not torch.cuda.is_available() or not hasattr(torch.backends.cuda, "cublas_workspace_size"):
        yield
        return
    size = torch.backends.cuda.cublas_workspace_size
    before = size()
    size(0)
    yield
    size(before)


@pytest.mark.usefixtures("no_workspaces")
@pytest.mark.parametrize("shape", [(16, 16), (64, 64), (3, 64, 64), (200, 64, 64), (700, 700)])
def test_linear_systems_need_their_factors_and_the_order_of_rows(shape):
    x = torch.eye(shape[-1], device="cuda").expand(shape).contiguous()
    require_rule(aten.linalg_inv_ex.default, x)
    require_rule(aten._linalg_solve_ex.default, x, x)
    factors, order, _ = aten.linalg_lu_factor_ex(x)
    for columns in (1, shape[-1]):
        wanted = floats(*shape[:-1], columns)
        require_rule(aten.linalg_lu_solve.default, factors, order, wanted)
        require_rule(aten.linalg_lu_solve.default, factors, order, wanted, adjoint=True)
    require_rule(aten.linalg_matrix_exp.default, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_copies_gradients_for_cudnn(dtype, training):
    layer = torch.nn.BatchNorm2d(16).cuda().train(training)
    x = floats(4, 16, 32, 32, dtype=dtype).requires_grad_()
    out = layer(x)
    for grad in (torch.zeros_like(out), floats(1, dtype=dtype).expand(out.shape)):
        args = (grad, x, layer.weight, None, None, None, None, training, 1e-5, [True] * 3)
        call = Call(
            aten.native_batch_norm_backward.default,
            "aten::native_batch_norm_backward",
            args,
            {},
            [x],
        )
        found = measured(torch.autograd.grad, out, (x, layer.weight), grad, retain_graph=True)
        assert abs(found - scratch_of(call, on_cpu=False).bytes_) <= SMALL


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_bags_copy_an_expanded_gradient(mode):
    weight, indices, offsets = (
        floats(100, 64),
        places(4096, 100),
        torch.arange(0, 4096, 16, device="cuda"),
    )
    out, *found = aten._embedding_bag(weight, indices, offsets, False, mode)
    func = aten._embedding_bag_backward.default
    require_rule(
        func, floats(1).expand(out.shape), indices, offsets, *found, 100, False, mode, False, None
    )


@pytest.mark.parametrize("norm", [0.0, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_each_pair_has_a_part_in_the_gradient_of_distances(batch, norm):
    x, other, distances = floats(*batch, 20, 7), floats(*batch, 50, 7), floats(*batch, 20, 50)
    require_rule(aten._cdist_backward.default, distances, x, other, norm, distances)
    if not batch:
        require_rule(aten._pdist_backward.default, floats(190), x, norm, floats(190))


def test_each_further_dimension_is_rolled_anew():
    for count in range(1, 5):
        require_rule(aten.roll.default, floats(8, 8, 8, 8), [1] * count, list(range(count)))


@pytest.mark.parametrize("shape", [(256, 48), (48,), (256, 1)])
def test_a_mask_that_is_expanded_is_copied(shape):
    x, mask = floats(256, 48), torch.ones(shape, dtype=torch.bool, device="cuda")
    require_rule(aten.masked_scatter.default, x, mask, x)
