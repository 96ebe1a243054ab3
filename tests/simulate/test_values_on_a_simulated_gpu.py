"""Values on a simulated GPU: small ones are computed, others are told when they are read."""

import ctypes
import itertools
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional

import pytest_torchmem
from pytest_torchmem.values.units import MiB

pytestmark = pytest.mark.usefixtures("gpu")

CUDA = "cuda"


def inexact_reads():
    reads = ctypes.CDLL(None).torchmem_unknown_reads
    reads.restype = ctypes.c_long
    return reads()


@pytest.fixture
def exact(gpu):
    """Fail the test if it reads a value that is not exact."""
    before = inexact_reads()
    yield
    assert inexact_reads() == before


def unknown(*sizes):
    """A product that is too large to be computed, cut down to the sizes that are asked for."""
    count = torch.Size(sizes).numel()
    rows = torch.ones(max(1024, -(-count // 4096)), 1, device=CUDA)
    return (rows @ torch.ones(1, 4096, device=CUDA)).flatten()[:count].view(sizes)


SHAPES_FROM_VALUES = {
    "nonzero": torch.nonzero,
    "a mask": lambda x: x[x > 1],
    "unique": torch.unique,
    "unique, both": lambda x: torch.unique(x, return_inverse=True, return_counts=True)[2],
    "unique rows": lambda x: torch.unique(x.view(-1, 2), dim=0),
    "unique_consecutive": torch.unique_consecutive,
    "bincount": torch.bincount,
    "repeat_interleave": lambda x: torch.repeat_interleave(x, x),
    "masked_select": lambda x: x.masked_select(x != 3),
    "one_hot": functional.one_hot,
}


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", SHAPES_FROM_VALUES)
def test_a_shape_that_depends_on_values_is_that_of_the_values(name):
    values = torch.tensor([3, 1, 3, 3, 0, 2])
    call = SHAPES_FROM_VALUES[name]
    assert torch.equal(call(values.to(CUDA)).cpu(), call(values))


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("sizes", [(3000,), (2, 3000), (5, 4)])
def test_the_most_frequent_value_of_long_rows_is_found(sizes):
    values = (torch.arange(torch.Size(sizes).numel()) * 7919 % 257).view(sizes)
    assert all(map(torch.equal, values.mode(), map(torch.Tensor.cpu, values.to(CUDA).mode())))


def test_the_scratch_of_a_mode_is_that_of_its_kinds_of_values():
    def requested(values):
        before = torch.cuda.memory_stats()["requested_bytes.all.allocated"]
        values.mode()
        return torch.cuda.memory_stats()["requested_bytes.all.allocated"] - before

    values = torch.arange(3000, device=CUDA)
    key_and_count = 16
    assert requested(values % 107) - requested(values % 7) == 100 * key_and_count


def test_the_most_frequent_of_values_that_are_not_exact_reads_zero():
    assert unknown(MiB).mode().values.item() == 0


def test_complex_numbers_that_are_not_exact_are_no_nan():
    zeros = unknown(4).to(torch.complex64) * 0
    assert not (zeros / zeros).isnan().any().item()
    assert not (zeros / zeros).conj().mul_(1).isnan().any().item()


def test_what_is_not_exact_has_not_overflowed():
    known = -torch.log(torch.tensor([0.0, 1.0], device=CUDA))
    assert known[0].item() == float("inf")
    assert known.isfinite().tolist() == [False, True]
    zeros = unknown(2)
    loss = -torch.log(zeros)
    assert loss[0].item() == 0
    assert loss.isfinite().all().item()
    assert not loss.isinf().any().item()
    assert (zeros.log() == float("-inf")).tolist() == [True, True]  # as a mask has it


CALLS = {
    "product": lambda x: x @ x.T,
    "softmax": lambda x: x.softmax(-1),
    "sort": lambda x: x.sort(dim=1, descending=True).values,
    "topk": lambda x: x.topk(2).indices,
    "argmax": lambda x: x.argmax(-1),
    "cumsum": lambda x: x.cumsum(0),
    "where": lambda x: torch.where(x > 0, x, -x),
    "scatter": lambda x: x.scatter(1, torch.zeros(4, 1, dtype=torch.int64, device=x.device), 7.0),
    "transposed in place": lambda x: x.clone().T.add_(1),
    "foreach": lambda x: torch._foreach_mul([x, x + 1], 2.0)[1],
    "norm": lambda x: functional.layer_norm(x, (6,)),
    "bfloat16": lambda x: x.bfloat16() * 3,
    "convolution": lambda x: functional.conv1d(x[None], x[:, :4, None].contiguous()),
    "transposed convolution": lambda x: functional.conv_transpose1d(x[None], x[:, :2, None]),
    "batch norm": lambda x: functional.batch_norm(x, None, None, training=True),
    "attention": lambda x: functional.scaled_dot_product_attention(*[x.view(1, 2, 3, 4)] * 3),
    "mean of the absolute": lambda x: x.abs().mean(),
    "histogram of integers": lambda x: torch.histc(
        x.int() if x.is_cuda else x.trunc(), bins=4, min=-2, max=2
    ).int(),
    "least squares": lambda x: torch.linalg.lstsq(x.T[:, :2].sin(), x.T[:, 2:]).solution,
    "eigenvalues": lambda x: torch.linalg.eigvals(x[:, :4].cos()).abs().sort()[0],
    "linear algebra": lambda x: torch.linalg.inv(x[:, :4] + 9 * torch.eye(4, device=x.device)),
}


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", CALLS)
def test_a_small_tensor_has_the_values_that_the_cpu_computes(name):
    values = torch.linspace(-2, 3, 24).view(4, 6)
    on_gpu = CALLS[name](values.to(CUDA)).cpu()
    torch.testing.assert_close(on_gpu, CALLS[name](values), rtol=1e-4, atol=1e-5)


def doubled(tensor):
    torch._foreach_mul_([tensor], 2.0)
    return tensor


IN_PLACE = {
    # Each is made of other operators on the GPU, which change the tensor before it is computed.
    "a conjugate from the host": lambda x: torch.zeros(
        4, 3, dtype=torch.complex64, device=x.device
    ).copy_(torch.view_as_complex(x.cpu().view(4, 3, 2)).conj()),
    "out of other operators": lambda x: x.abs_().add_(5).mvlgamma_(2),
    "foreach, one by one": lambda x: doubled(x[:, ::2]),
    "cumulative sum": lambda x: x.cumsum_(0),
    "index_put": lambda x: x.index_put_((x[:, 0] > 0,), x[0].clone(), accumulate=True),
    "masked_scatter": lambda x: x.masked_scatter_(x > 0, x.flip(0).clone()),
    "addmm": lambda x: x[:, :4].addmm_(x, x.T),
}


def test_random_numbers_can_be_cast_to_eight_bits():
    values = torch.randn(16, 32, device=CUDA).to(torch.float8_e4m3fn)
    one = torch.ones((), device=CUDA)
    product = torch._scaled_mm(values, values.t(), one, one, out_dtype=torch.bfloat16)
    assert product.shape == (16, 16)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("given", [False, True], ids=["returned", "out"])
def test_the_scale_of_a_result_in_eight_bits_multiplies(given):
    ones = torch.ones(16, 16, device=CUDA).to(torch.float8_e4m3fn)
    one, four = torch.ones((), device=CUDA), torch.full((), 4.0, device=CUDA)
    out = torch.empty_like(ones) if given else None
    product = torch._scaled_mm(
        ones, ones.t(), one, one, scale_result=four, out_dtype=ones.dtype, out=out
    )
    assert product.float().cpu().eq(16 * 4).all()
    assert out is None or product.data_ptr() == out.data_ptr()


def of_eight_bits(rows, columns):
    values = torch.arange(float(rows * columns)).sin().view(rows, columns) * 3
    return values.to(torch.float8_e4m3fn)


def as_tensor_cores_read(scales):
    """Of 128 rows and four columns those of each 32nd row come first, as cuBLAS documents it."""
    rows, columns = scales.shape
    down, across = -(-rows // 128), -(-columns // 4)
    laid = torch.ones(down * across * 512)
    for row, column in itertools.product(range(rows), range(columns)):
        tile = row // 128 * across + column // 4
        laid[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4] = scales[row, column]
    return laid


def powers_of_two(*sizes):
    return 2.0 ** (torch.arange(torch.Size(sizes).numel()) * 7 % 5 - 2).view(sizes)


# For both matrices: how large a block has a scale, and how the scales are given.
SCALES = {
    "rows": ((1, 256), (1, 256), lambda x: x, lambda x: x.t()),
    "blocks of rows": (
        (1, 128),
        (1, 128),
        lambda x: x.t().contiguous().t(),
        lambda x: x.t().contiguous(),
    ),
    "blocks": ((1, 128), (128, 128), lambda x: x.t().contiguous().t(), lambda x: x.t()),
    "32 numbers": (
        (1, 32),
        (1, 32),
        lambda x: as_tensor_cores_read(x).to(torch.float8_e8m0fnu),
        lambda x: as_tensor_cores_read(x).to(torch.float8_e8m0fnu),
    ),
}


CUDA_RELEASE = tuple(map(int, (torch.version.cuda or "0").split(".")))


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", SCALES)
def test_a_product_of_numbers_of_eight_bits_has_a_scale_for_rows_or_blocks(name):
    if name.startswith("blocks") and CUDA_RELEASE < (12, 9):
        pytest.skip("needs CUDA 12.9")
    left, right = of_eight_bits(160, 256), of_eight_bits(256, 256)
    factors, expected = [], []
    for numbers, (down, across), given in zip(
        (left, right), SCALES[name][:2], SCALES[name][2:], strict=True
    ):
        scale = powers_of_two(numbers.shape[0] // down, numbers.shape[1] // across)
        factors.append(given(scale).to(CUDA))
        each = scale.repeat_interleave(down, 0).repeat_interleave(across, 1)
        expected.append(numbers.float() * each)
    first, second = factors
    product = torch._scaled_mm(
        left.to(CUDA), right.to(CUDA).t(), first, second, out_dtype=torch.bfloat16
    )
    wanted = (expected[0] @ expected[1].t()).bfloat16()
    torch.testing.assert_close(product.cpu(), wanted, rtol=1e-2, atol=1e-1)


@pytest.mark.usefixtures("exact")
def test_a_product_of_numbers_of_four_bits_has_a_scale_for_each_16_of_them():
    bytes_of_two = (torch.arange(128 * 64) * 7919 % 256).to(torch.uint8).view(128, 64)
    positive = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat([positive, -positive])
    numbers = table[torch.stack([bytes_of_two & 15, bytes_of_two >> 4], -1).int()].flatten(1)
    scale = powers_of_two(128, 8)
    packed = bytes_of_two.to(CUDA).view(torch.float4_e2m1fn_x2)
    factors = as_tensor_cores_read(scale).to(CUDA, torch.float8_e4m3fn)
    product = torch._scaled_mm(packed, packed.t(), factors, factors, out_dtype=torch.bfloat16)
    each = numbers * scale.repeat_interleave(16, 1)
    torch.testing.assert_close(product.cpu(), (each @ each.t()).bfloat16(), rtol=1e-2, atol=1e-1)
    both = [factors, torch.full((), 0.5, device=CUDA)]
    kinds = [functional.ScalingType.BlockWise1x16, functional.ScalingType.TensorWise]
    swizzles = [functional.SwizzleType.SWIZZLE_32_4_4, functional.SwizzleType.NO_SWIZZLE]
    by_recipe = functional.scaled_mm(
        packed, packed.t(), both, kinds, both, kinds, swizzles, swizzles
    )
    torch.testing.assert_close(by_recipe, product / 4)


@pytest.mark.usefixtures("exact")
@pytest.mark.skipif(CUDA_RELEASE < (12, 9), reason="needs CUDA 12.9")
@pytest.mark.parametrize("in_blocks", [0, 1])
def test_by_recipe_a_column_has_the_scales_of_blocks_beside_each_other(in_blocks):
    matrices, given, expected = (of_eight_bits(256, 320), of_eight_bits(128, 320)), [], []
    kinds = [functional.ScalingType.BlockWise1x128] * 2
    kinds[in_blocks] = functional.ScalingType.BlockWise128x128
    for place, matrix in enumerate(matrices):
        down = 128 if place == in_blocks else 1
        scale = powers_of_two(len(matrix) // down, 4 if place == in_blocks else 3)
        laid = scale.t() if place == in_blocks else scale.t().contiguous().t()
        given.append(laid.to(CUDA))
        each = scale.repeat_interleave(down, 0).repeat_interleave(128, 1)
        expected.append(matrix.float() * each[:, :320])
    left, right = (matrix.to(CUDA) for matrix in matrices)
    product = functional.scaled_mm(left, right.t(), given[0], kinds[0], given[1], kinds[1])
    wanted = (expected[0] @ expected[1].t()).bfloat16()
    torch.testing.assert_close(product.cpu(), wanted, rtol=1e-2, atol=1e-1)


def of_groups(left, right, ends):
    """What each group gives: of its rows, its columns or both, or of a matrix of its own."""
    parts, bounds = [], [0, *ends]
    axis = int(left.dim() == right.dim())
    for group, (start, end) in enumerate(itertools.pairwise(bounds)):
        first = left[group] if left.dim() == 3 else left.narrow(axis, start, end - start)
        other = right[group] if right.dim() == 3 else right.narrow(1 - axis, start, end - start)
        parts.append(first @ other)
    return torch.stack(parts) if axis else torch.cat(parts, int(right.dim() == 2))


@pytest.mark.usefixtures("exact")
@pytest.mark.skipif(not hasattr(torch, "_scaled_grouped_mm"), reason="needs torch 2.7")
@pytest.mark.parametrize(("left_axes", "right_axes"), [(2, 3), (3, 3), (2, 2), (3, 2)])
def test_a_product_of_groups_has_a_scale_for_each_row_and_column(left_axes, right_axes):
    left = of_eight_bits(64, 64) if left_axes == 2 else of_eight_bits(128, 64).view(2, 64, 64)
    right = of_eight_bits(48, 64) if right_axes == 2 else of_eight_bits(96, 64).view(2, 48, 64)
    ends = [16, 48] if (left_axes, right_axes) == (3, 2) else [32, 64]
    both = left_axes == right_axes == 2
    rows, columns = (
        powers_of_two(*((2,) if both else ()), *matrix.shape[:-1]) for matrix in (left, right)
    )
    offs = None if left_axes == right_axes == 3 else torch.tensor(ends).to(CUDA, torch.int32)
    first, second = left.to(CUDA), right.to(CUDA).transpose(-2, -1)
    down, across = ((scale.flatten() if both else scale).to(CUDA) for scale in (rows, columns))
    product = torch._scaled_grouped_mm(
        first, second, down, across, offs=offs, out_dtype=torch.bfloat16
    )
    if hasattr(functional, "scaled_grouped_mm"):  # from torch 2.10 on
        kind = functional.ScalingType.RowWise
        by_recipe = functional.scaled_grouped_mm(first, second, down, kind, across, kind, offs=offs)
        assert torch.equal(by_recipe, product)
    if both:  # each group is for some of the columns
        left, right = (
            torch.cat([m.float()[:, :32] * s[0, :, None], m.float()[:, 32:] * s[1, :, None]], 1)
            for m, s in ((left, rows), (right, columns))
        )
    else:
        left, right = left.float() * rows[..., None], right.float() * columns[..., None]
    wanted = of_groups(left, right.transpose(-2, -1), ends).bfloat16()
    torch.testing.assert_close(product.cpu(), wanted, rtol=1e-2, atol=1e-1)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(("rows", "columns", "tiles", "group"), [(16, 64, 2, 32), (24, 256, 8, 64)])
def test_a_product_with_packed_weights_of_four_bits_is_that_of_their_numbers(
    rows, columns, tiles, group
):
    numbers = (torch.arange(rows * columns) * 7919 % 16).view(rows, columns)
    scales = torch.linspace(0.5, 2, columns // group * rows * 2).view(-1, rows, 2).bfloat16()
    left = torch.linspace(-1, 1, 3 * columns).view(3, columns).bfloat16()
    two_each = (numbers[:, ::2] << 4 | numbers[:, 1::2]).to(torch.uint8)
    packed = torch._convert_weight_to_int4pack(two_each.to(CUDA), tiles)
    of_word, of_row = (columns // (16 * tiles), 32, tiles // 2), scales.float().transpose(0, 1)
    product = torch._weight_int4pack_mm(left.to(CUDA), packed, group, scales.to(CUDA))
    weight = (numbers.view(rows, -1, group) - 8) * of_row[..., :1] + of_row[..., 1:]
    assert packed.shape == (rows // 8, *of_word)
    expected = left.float() @ weight.view(rows, columns).T
    torch.testing.assert_close(product.float().cpu(), expected, rtol=1e-2, atol=1e-1)


@pytest.mark.usefixtures("exact")
def test_a_word_of_packed_weights_has_the_columns_that_a_lane_reads():
    columns = torch.arange(32).div(2, rounding_mode="floor").expand(8, 32)
    two_each = (columns[:, ::2] << 4 | columns[:, 1::2]).to(torch.uint8)
    packed = torch._convert_weight_to_int4pack(two_each.to(CUDA), 2).view(8, 4).cpu()
    # Lane t has columns 2 t, 2 t + 1 and each eight further; here both have their half as value.
    words = [sum((lane + 4 * at) * 0x10001 << 4 * at for at in range(4)) for lane in range(4)]
    assert (packed.long() & 0xFFFFFFFF).tolist() == [words] * 8


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.usefixtures("exact")
def test_observers_of_each_channel_find_what_they_find_on_the_host():
    """Their kernels give the ranges and scales that they are given the size of what they find."""
    from torch.ao.quantization import default_fused_per_channel_wt_fake_quant as observer

    weight = torch.linspace(-2, 3, 32).sin().view(4, 8)
    on_host, on_gpu = observer(), observer().to(CUDA)
    for factor in (1, 2):
        expected = on_host(weight * factor)
        torch.testing.assert_close(on_gpu((weight * factor).to(CUDA)).cpu(), expected)
    for name, value in on_host.state_dict().items():
        torch.testing.assert_close(on_gpu.state_dict()[name].cpu(), value)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", IN_PLACE)
def test_what_is_changed_in_place_is_changed_once(name):
    values = torch.linspace(-2, 3, 24).view(4, 6)
    on_gpu = IN_PLACE[name](values.to(CUDA)).cpu()
    torch.testing.assert_close(on_gpu, IN_PLACE[name](values.clone()), rtol=1e-4, atol=1e-5)


def of_a_bag(weight):
    indices = torch.tensor([0, 3, 3, 1], device=weight.device)
    bags = torch.tensor([0, 1], device=weight.device)
    return functional.embedding_bag(indices, weight, bags, mode="sum")


def of_a_cell(kind):
    def call(x):
        torch.manual_seed(0)
        out = kind(6, 5).to(x.device)(x)
        return out[0] if kind is nn.LSTMCell else out

    return call


DIFFERENTIATED = {
    "depthwise convolution": lambda x: functional.conv2d(
        x.view(1, 2, 3, 4), x.view(-1)[:8].view(2, 1, 2, 2), groups=2
    ),
    "batch norm": lambda x: nn.BatchNorm1d(6).to(x.device)(x),
    "attention": lambda x: functional.scaled_dot_product_attention(
        x.view(1, 2, 3, 4), x.view(1, 2, 3, 4), x.view(1, 2, 3, 4), is_causal=True
    ),
    "bag of embeddings": of_a_bag,
    "layer norm": lambda x: functional.layer_norm(x, (6,), x[0], x[1]),
    "grid sampler": lambda x: functional.grid_sample(
        x.view(1, 1, 4, 6), x.view(1, 4, 3, 2).tanh(), align_corners=True
    ),
    "LSTM cell": of_a_cell(nn.LSTMCell),
    "GRU cell": of_a_cell(nn.GRUCell),
    "RMS norm of a frozen weight": lambda x: functional.rms_norm(x, (6,), x[1].detach(), 1e-3),
    "RMS norm of two axes": lambda x: functional.rms_norm(x.view(2, 2, 6), (2, 6)),
    "batch norm that is frozen": lambda x: functional.batch_norm(
        x, x[0].detach(), x[0].exp().detach()
    ),
}


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_gradients_of_small_tensors_are_those_that_the_cpu_computes(name):
    def outcome(device):
        x = torch.linspace(-2, 3, 24).view(4, 6).to(device).requires_grad_()
        out = DIFFERENTIATED[name](x)
        out.pow(3).sum().backward()
        return out.detach().cpu(), x.grad.cpu()

    torch.testing.assert_close(outcome(CUDA), outcome("cpu"), rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["layer norm", "RMS norm of two axes", "batch norm"])
def test_half_precision_is_computed_where_the_cpu_has_no_kernel_for_it(name, dtype):
    def gradient(device, dtype):
        x = torch.linspace(-2, 3, 24).view(4, 6).to(device, dtype).requires_grad_()
        DIFFERENTIATED[name](x).sum().backward()
        return x.grad.float().cpu()

    in_single = gradient("cpu", torch.float32)
    torch.testing.assert_close(gradient(CUDA, dtype), in_single, rtol=0.05, atol=0.1)


@pytest.mark.usefixtures("exact")
def test_a_histogram_is_written_where_it_is_asked_for():
    values, counts = torch.tensor([1.0, 2.0, 2.0]), torch.empty(2)
    expected = torch.histc(values, bins=2, min=1, max=2, out=counts).tolist()
    for kind in (torch.float32, torch.int32):
        on_gpu = torch.empty(2, dtype=kind, device=CUDA)
        torch.histc(values.to(CUDA, kind), bins=2, min=1, max=2, out=on_gpu)
        assert on_gpu.tolist() == expected


SPARSE = {
    "product": lambda x: torch.sparse.mm(x.to_sparse(), x.T),
    "dense again": lambda x: x.to_sparse().to_dense(),
    "scaled": lambda x: (x.to_sparse() * 3).to_dense(),
    "softmax": lambda x: torch.sparse.softmax(x.to_sparse(), 1).to_dense(),
    "rows": lambda x: x.to_sparse_csr() @ x.T,
    "rows and a vector": lambda x: x.to_sparse_csr() @ x[0],
    "sparse and sparse": lambda x: torch.sparse.mm(x.to_sparse(), x.T.to_sparse()).to_dense(),
    "rows and rows": lambda x: (x.to_sparse_csr() @ x.T.to_sparse_csr()).to_dense(),
    "sum of rows": lambda x: (x.to_sparse_csr() + x.flip(1).to_sparse_csr()).to_dense(),
}


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", SPARSE)
def test_a_small_sparse_tensor_has_the_values_that_the_cpu_computes(name):
    values = torch.linspace(-2, 3, 24).view(4, 6).relu()
    on_gpu = SPARSE[name](values.to(CUDA)).cpu()
    torch.testing.assert_close(on_gpu, SPARSE[name](values), rtol=1e-4, atol=1e-5)


def test_a_sparse_product_that_is_not_computed_is_not_exact():
    x = torch.eye(3, device=CUDA).to_sparse()
    before = inexact_reads()
    torch.sparse.mm(x, unknown(3, 3)).sum().item()
    assert inexact_reads() > before


def test_a_padded_batch_takes_the_fast_path_of_an_encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 1).eval().to(CUDA)
    padding = torch.tensor([[False, False, True]], device=CUDA)
    with torch.inference_mode():
        out = encoder(torch.ones(1, 3, 8, device=CUDA), src_key_padding_mask=padding)
    assert out.shape == (1, 3, 8)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_a_recurrent_layer_has_the_values_and_gradients_that_the_cpu_computes(kind, packed):
    torch.manual_seed(0)
    layer = getattr(nn, kind)(8, 16, num_layers=2, bidirectional=True, batch_first=True)
    values = torch.linspace(-1, 1, 120).view(3, 5, 8)

    def outcome(device):
        whole = values.to(device)
        lengths = torch.tensor([5, 4, 2])
        parts = nn.utils.rnn.pack_padded_sequence(whole, lengths, batch_first=True)
        out = layer.to(device)(parts if packed else whole)[0]
        out = out.data if packed else out
        layer.zero_grad()
        out.square().sum().backward()
        return [out.cpu(), *(parameter.grad.cpu() for parameter in layer.parameters())]

    torch.testing.assert_close(outcome(CUDA), outcome("cpu"), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("exact")
def test_a_graph_computes_at_each_launch_with_what_is_there_then():
    counter, x = torch.zeros(2, 2, device=CUDA), torch.ones(2, 2, device=CUDA)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            doubled = x @ x
        torch.cuda.current_stream().wait_stream(side)
        counter += doubled
        total = torch.zeros(2, device=CUDA).add_(counter.sum())
    assert counter.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    for value in (1, 2, 3):
        x.fill_(value)
        graph.replay()
        assert doubled[0, 0].item() == 2 * value * value
    assert total.tolist() == [4 * (2 + 8 + 18)] * 2


def test_a_graph_takes_no_value_to_the_host_while_it_is_captured():
    x = torch.ones(2, device=CUDA)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="captur"), torch.cuda.graph(graph):
        (x * 2).sum().item()


@pytest.mark.usefixtures("exact")
def test_a_product_does_not_depend_on_what_it_leaves_out():
    x = torch.ones(2, 3, 3, device=CUDA)
    nothing = torch.empty(2, 3, 3, device=CUDA)
    assert torch.baddbmm(nothing, x, x, beta=0)[0, 0, 0].item() == 3.0
    assert (x[0] @ x[0, 0]).tolist() == [3.0] * 3


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("size", [10, 40_000, 250_000])
def test_a_norm_is_computed_for_whatever_is_small(size):
    values = torch.ones(size, device=CUDA)
    assert values.norm().item() == pytest.approx(size**0.5)
    assert nn.utils.get_total_norm([values, values]).item() == pytest.approx((2 * size) ** 0.5)


@pytest.mark.usefixtures("exact")
def test_a_loop_ends_where_its_values_say():
    x, steps = torch.ones((), device=CUDA), 0
    while x < 20:
        x, steps = x * 2, steps + 1
    assert steps == 5


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("fused", [False, True])
def test_a_small_model_learns(fused):
    torch.manual_seed(0)
    layer = nn.Linear(4, 1).to(CUDA)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=fused)
    x = torch.linspace(-1, 1, 40).view(10, 4).to(CUDA)
    losses = []
    for _ in range(5):
        loss = (layer(x) - x.sum(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("value", [1.0, float("inf")])
def test_a_grad_scaler_leaves_out_a_step_that_overflowed(value):
    weight = torch.ones(4, device=CUDA, requires_grad=True)
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), torch.amp.GradScaler("cuda")
    scaler.scale((weight * value).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    taken = value == 1.0
    assert weight.tolist() == ([0.0] if taken else [1.0]) * 4
    assert scaler.get_scale() == (65536.0 if taken else 32768.0)


@pytest.mark.usefixtures("exact")
def test_gradients_that_are_not_exact_have_not_overflowed():
    weight = torch.ones(4 * MiB, device=CUDA, requires_grad=True)
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), torch.amp.GradScaler("cuda")
    scaler.scale((weight * 3).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 65536.0


def test_a_value_that_is_not_exact_is_told_with_the_line_that_read_it():
    line = test_a_value_that_is_not_exact_is_told_with_the_line_that_read_it.__code__.co_firstlineno
    with pytest_torchmem.measure(device=CUDA) as measured:
        large = unknown(4, 4)
        large.sum().item()
        large.tolist()
    (said,) = measured.result.blind_spots
    assert said.startswith("the body read values that are not exact on a simulated GPU 2 times, ")
    assert f"first in tests/simulate/test_values_on_a_simulated_gpu.py:{line + 4};" in said


def test_a_value_that_autograds_own_thread_reads_has_the_line_of_the_backward_pass():
    line = sys._getframe().f_lineno
    with pytest_torchmem.measure(device=CUDA) as measured:
        product = unknown(4, 4).requires_grad_().prod()
        product.backward()
    decided, said = measured.result.blind_spots  # the backward pass of a product looks for zeros
    assert decided.startswith("a shape, a count or a branch rests once ")
    assert f"first in tests/simulate/test_values_on_a_simulated_gpu.py:{line + 3};" in said


def test_nothing_is_told_of_values_that_are_exact():
    with pytest_torchmem.measure(device=CUDA) as measured:
        assert torch.arange(10, device=CUDA).sum().item() == 45
    assert not measured.result.blind_spots


def test_what_is_computed_from_an_inexact_value_is_inexact():
    before = inexact_reads()
    small = torch.ones(4, device=CUDA)
    small += unknown(4)
    assert small.tolist() == [1.0] * 4
    assert inexact_reads() == before + 1
    small.fill_(2)
    assert small.tolist() == [2.0] * 4
    assert inexact_reads() == before + 1


def test_a_large_tensor_that_is_changed_in_place_is_no_longer_exact():
    large = torch.arange(5.0 * MiB).to(CUDA)
    before = inexact_reads()
    assert large[7].item() == 7.0
    assert inexact_reads() == before
    large.add_(1)
    assert large[7].item() == 0.0
    assert inexact_reads() == before + 1


def test_what_is_not_exact_is_no_nan():
    nothing = unknown(4)
    assert (nothing / nothing).tolist() == [0.0] * 4
    assert (torch.zeros(1, device=CUDA) / 0).isnan().item()


PASSED = {
    "finite": lambda x: torch.isfinite(x).all().item() and not torch.isnan(x).any().item(),
    "close": lambda x: torch.testing.assert_close(x, x + 1) is None,
    "equal": lambda x: torch.equal(x, x + 1),
    "of a distribution": lambda x: torch.distributions.Normal(x, x.exp()).sample(),
    "of each row": lambda x: torch.distributions.Categorical(x.softmax(-1)).sample(),
    "of torch's own": lambda x: torch._check_tensor_all(x > 2) is None,
}


@pytest.mark.parametrize("rows", [600, 1500, 2100])  # of 4.1 MiB, as a mask
@pytest.mark.parametrize("name", PASSED)
def test_a_check_of_what_is_not_exact_passes_and_is_told(name, rows):
    large = unknown(rows, rows)
    before = inexact_reads()
    passed = PASSED[name](large)
    assert isinstance(passed, torch.Tensor) or passed
    assert inexact_reads() > before


def test_a_matrix_that_is_not_exact_has_eigenvalues():
    assert torch.linalg.eig(unknown(600, 600)).eigenvalues.shape == (600,)


@pytest.mark.usefixtures("exact")
def test_a_check_of_what_is_known_fails():
    known = torch.arange(3.0 * MiB).to(CUDA)
    assert not (known != 7).all().item()
    assert not torch.equal(known, torch.zeros(3 * MiB).to(CUDA))
    with pytest.raises(ValueError, match="constraint"):
        torch.distributions.Normal(known[:5], known[:5])


def test_a_router_that_knows_nothing_gives_each_expert_as_much():
    logits = unknown(12, 6).softmax(-1)
    assert logits.topk(2, dim=-1).indices.flatten().bincount().tolist() == [4] * 6
    assert logits.argmax(-1).bincount().tolist() == [2] * 6
    assert (logits.argmax(-1) * 0 + 1).max().item() == 1


def test_a_language_model_generates_as_many_tokens_as_it_may():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=4)
    model = transformers.GPT2LMHeadModel(config).to(CUDA).eval()
    start = torch.tensor([[5, 6, 7]], device=CUDA)
    for sample in (False, True):
        assert model.generate(start, max_new_tokens=6, do_sample=sample).shape == (1, 9)


def test_what_computes_values_is_not_seen_by_the_profiler():
    x = torch.ones(8, 8, device=CUDA)
    torch.nonzero(x @ x)  # makes the workspace
    with torch.profiler.profile(profile_memory=True, record_shapes=True) as profile:
        torch.nonzero(x @ x)
    events = profile.events()
    operators = [event.name for event in events if event.name.startswith("aten::")]
    of_nonzero = ["nonzero", "resize_", "t", "transpose", "as_strided", "set_"]
    assert operators == [f"aten::{name}" for name in ("matmul", "mm", *of_nonzero)]
    assert not any(event.cpu_memory_usage for event in events)


def several(x, w):
    """What makes pointwise kernels, reductions, scans and indices."""
    y = torch.relu(x @ w + 1) * 2
    chosen = y.argmax(-1)
    return y.softmax(-1), y.cumsum(0), chosen, w[chosen].half() * 3, functional.layer_norm(y, (16,))


@pytest.mark.slow
@pytest.mark.usefixtures("exact")
def test_compiled_code_has_the_values_that_the_cpu_computes():
    x, w = torch.linspace(-2, 3, 192).view(12, 16), torch.linspace(1, -1, 256).view(16, 16)
    compiled = torch.compile(several)(x.to(CUDA), w.to(CUDA))
    for on_gpu, on_cpu in zip(compiled, several(x, w), strict=True):
        torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("exact")
def test_a_graph_of_compiled_code_computes_at_each_launch():
    step = torch.compile(lambda x: (x * 2 + 1).sum(), mode="reduce-overhead")
    for value in range(5):
        assert step(torch.full((4,), float(value), device=CUDA)).item() == 4 * (2 * value + 1)


@pytest.mark.slow
@pytest.mark.usefixtures("exact")
def test_a_pool_of_graphs_that_is_put_back_keeps_its_values():
    torch.compiler.reset()

    @torch.compile(mode="reduce-overhead")
    def branched(x):
        doubled = x + x
        if doubled.sum() > 0:  # two graphs: torch puts the pool back between them
            return doubled + 10
        return doubled - 10

    x = torch.zeros(4, 4, device=CUDA)
    assert [branched(x)[0, 0].item() for _ in range(2)] == [-10, -10]
    x.add_(1)
    assert [branched(x)[0, 0].item() for _ in range(3)] == [12, 12, 12]


@pytest.mark.slow
def test_compiled_code_is_as_exact_as_what_it_reads_and_not_if_it_takes_too_long():
    torch.compiler.reset()
    plus_one = torch.compile(lambda x: x + 1)
    before = inexact_reads()
    assert plus_one(torch.zeros(16, device=CUDA))[3].item() == 1.0
    assert inexact_reads() == before
    plus_one(unknown(16))[3].item()
    assert inexact_reads() == before + 1
    plus_one(torch.zeros(16 * MiB, device=CUDA))[3].item()
    assert inexact_reads() == before + 2


KERNEL = """
import triton
import triton.language as tl

@triton.jit
def product(x, y, out, total, inner, SIZE: tl.constexpr):
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    sums = tl.zeros((SIZE, SIZE), tl.float32)
    for start in range(0, inner, SIZE):
        a = tl.load(x + row * inner + start + column)
        b = tl.load(y + (start + row) * SIZE + column)
        sums += tl.dot(a, b)
    tl.store(out + row * SIZE + column, sums)
    if tl.program_id(0) == 1:
        tl.atomic_add(total, tl.sum(tl.sum(sums, 0), 0))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("exact")
def test_a_kernel_of_triton_is_run_program_by_program(pytester):
    pytest.importorskip("triton")
    pytester.makepyfile(kernel_of_a_test=KERNEL)
    pytester.syspathinsert()
    from kernel_of_a_test import product

    x, y = torch.linspace(-1, 1, 512).view(16, 32), torch.linspace(2, -2, 512).view(32, 16)
    out, total = torch.empty(16, 16, device=CUDA), torch.zeros((), device=CUDA)
    product[(3,)](x.to(CUDA), y.to(CUDA), out, total, 32, SIZE=16)
    torch.testing.assert_close(out.cpu(), x @ y, rtol=1e-3, atol=1e-3)
    assert total.item() == pytest.approx((x @ y).sum().item(), rel=1e-3, abs=1e-2)


@pytest.mark.slow
def test_a_kernel_that_is_timed_leaves_what_it_reads_exact(pytester):
    pytest.importorskip("triton")
    pytester.makepyfile(kernel_that_is_timed=KERNEL)
    pytester.syspathinsert()
    from kernel_that_is_timed import product

    x, y = torch.ones(16, 16, device=CUDA), torch.ones(16, 16, device=CUDA)
    out, total = torch.empty(16, 16, device=CUDA), torch.zeros((), device=CUDA)
    for _ in range(80):
        product[(2,)](x, y, out, total, 16, SIZE=16)
    before = inexact_reads()
    assert x[3, 3].item() == y[3, 3].item() == 1
    assert inexact_reads() == before
    total.item()
    assert inexact_reads() == before + 1


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(("count", "told"), [(8, 0), (MiB, 1)], ids=["small", "large"])
def test_a_small_quantized_tensor_is_computed_and_reading_a_large_one_is_told(count, told):
    quantized = torch.quantize_per_tensor(torch.ones(count, device=CUDA), 0.5, 0, torch.qint8)
    before = inexact_reads()
    assert quantized.dequantize().sum().item() == (0 if told else count)
    assert inexact_reads() == before + told


@pytest.mark.usefixtures("exact")
def test_the_parts_of_synchronized_batch_norm_are_those_of_the_whole():
    x, of_out = (
        torch.linspace(-2, 3, 72).sin().view(8, 3, 3),
        torch.linspace(1, -2, 72).cos().view(8, 3, 3),
    )
    whole, input = nn.BatchNorm1d(3), x.clone().requires_grad_()
    nn.init.constant_(whole.weight, 2)
    expected = whole(input)
    expected.backward(of_out)

    weight, bias = whole.weight.detach().to(CUDA), whole.bias.detach().to(CUDA)
    running, variance = torch.zeros(3, device=CUDA), torch.ones(3, device=CUDA)
    parts, of_parts = x.to(CUDA).split([6, 2]), of_out.to(CUDA).split([6, 2])
    counts = torch.tensor([18.0, 6.0], device=CUDA)
    stats = [torch.batch_norm_stats(part, 1e-5) for part in parts]
    means, scales = (torch.stack(values) for values in zip(*stats, strict=True))
    mean, scale = torch.batch_norm_gather_stats_with_counts(
        parts[0], means, scales, running, variance, 0.1, 1e-5, counts
    )
    out = [torch.batch_norm_elemt(part, weight, bias, mean, scale, 1e-5) for part in parts]
    reduced = [
        torch.batch_norm_backward_reduce(of_part, part, mean, scale, weight, True, True, True)
        for part, of_part in zip(parts, of_parts, strict=True)
    ]
    sums, with_values, of_weight, of_bias = (sum(values) for values in zip(*reduced, strict=True))
    of_input = [
        torch.batch_norm_backward_elemt(
            of_part, part, mean, scale, weight, sums, with_values, counts.int()
        )
        for part, of_part in zip(parts, of_parts, strict=True)
    ]
    for on_gpu, on_cpu in (
        (torch.cat(out), expected.detach()),
        (running, whole.running_mean),
        (variance, whole.running_var),
        (of_weight, whole.weight.grad),
        (of_bias, whole.bias.grad),
        (torch.cat(of_input), input.grad),
    ):
        torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=1e-4, atol=1e-5)


def test_a_program_sees_no_mode_and_no_other_tensor():
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    assert not _get_current_dispatch_mode_stack()
    assert not _get_current_function_mode_stack()
    assert type(torch.ones(2, device=CUDA) + 1) is torch.Tensor


@pytest.mark.nightly("xdist", "below `torchmem simulate`")
@pytest.mark.parametrize(
    "arguments",
    [("--torchmem-simulate=L4",), ("--torchmem-simulate=L4", "-p", "xdist", "-n", "1"), ()],
    ids=["alone", "xdist", "below `torchmem simulate`"],
)
def test_an_assertion_on_values_is_told_from_a_failure_of_memory(pytester, arguments):
    pytester.makepyfile(
        """
        import pytest, torch

        def test_a_large_sum():
            total = (torch.ones(8 << 20, device="cuda") * 3).sum().item()
            assert total > 0

        def test_a_small_sum():
            assert (torch.ones(8, device="cuda") * 3).sum().item() == 0

        def test_large_sums():
            sums = torch.ones(8 << 20, device="cuda") + 3
            torch.testing.assert_close(sums, sums + 1)

        def test_sums_that_differ():
            with pytest.raises(AssertionError):
                assert (torch.ones(8 << 20, device="cuda") * 3).sum().item() == 0

        @pytest.mark.memory_budget("1MiB", device="cuda")
        def test_memory():
            (torch.ones(8 << 20, device="cuda") * 3).sum().item()

        @pytest.mark.memory_budget("1GiB", device="cuda")
        def test_a_branch():
            if (torch.ones(4 << 20, device="cuda").view(2048, -1).matmul(
                torch.ones(2048, 2048, device="cuda")
            )).sum().item() > 1:
                torch.ones(8, device="cuda")
        """
    )
    plain = ("-p", "no:asyncio", "-p", "no:cacheprovider")
    run = pytester.runpytest_subprocess(*plain, *arguments)
    run.assert_outcomes(failed=5, passed=1)
    run.stdout.fnmatch_lines(
        [
            "*Captured simulated GPU call*",
            "the body read values that are not exact on a simulated GPU once, first in *.py:4; *",
            "torchmem: 2 of the failures are not about memory: an assertion failed after the body*",
            "torchmem: 1 of the tests that passed read values that are not exact*",
        ]
    )
    assert str(run.stdout).count("Captured simulated GPU call") == 2


@pytest.mark.usefixtures("exact")
def test_a_sparse_gradient_keeps_its_elements_when_it_is_coalesced():
    rows = nn.Embedding(5, 2, sparse=True).to(CUDA)
    optimizer = torch.optim.SparseAdam(rows.parameters(), lr=0.5)
    nn.init.zeros_(rows.weight)
    rows(torch.tensor([1, 3, 1], device=CUDA)).sum().backward()
    gradient = rows.weight.grad.coalesce()
    assert gradient.indices().tolist() == [[1, 3]]
    assert gradient.values().tolist() == [[2, 2], [1, 1]]
    optimizer.step()
    assert rows.weight[:, 0].tolist() == pytest.approx([0, -0.5, 0, -0.5, 0], abs=1e-4)


@pytest.mark.parametrize("known", [True, False])
def test_a_large_sparse_tensor_has_as_many_elements_as_its_places_say_or_may_say(known):
    count = 1 << 20
    places = torch.zeros(2, count, dtype=torch.int64, device=CUDA)
    if not known:
        places += unknown(2, count).long()
    sparse = torch.sparse_coo_tensor(
        places, torch.ones(count, device=CUDA), (4, 4), check_invariants=False
    )
    assert sparse.coalesce().values().shape == (1 if known else count,)


def test_a_product_of_a_sparse_tensor_runs_and_is_a_lower_bound():
    places = torch.tensor([[0, 1], [1, 0]], device=CUDA)
    sparse = torch.sparse_coo_tensor(
        places, torch.ones(2, device=CUDA), (2, 2), check_invariants=False
    )
    with pytest_torchmem.measure(device=CUDA) as measured:
        product = sparse @ torch.ones(2, 3, device=CUDA)
    assert product.shape == (2, 3)
    assert "called cuSPARSE" in " ".join(measured.result.blind_spots)


@pytest.mark.parametrize(
    ("dtype", "sixteenths"), [(torch.float16, 9), (torch.bfloat16, 9), (torch.int8, 10)]
)
def test_a_matrix_of_which_half_is_zero_is_compressed_and_the_rest_is_a_lower_bound(
    dtype, sixteenths
):
    dense = torch.tensor([0, 0, 1, 1], device=CUDA, dtype=dtype).tile((64, 32))
    other = torch.ones(128, 32, device=CUDA, dtype=dtype).t().contiguous().t()
    with pytest_torchmem.measure(device=CUDA) as measured:
        packed = torch._cslt_compress(dense)
        product = torch._cslt_sparse_mm(packed, other)
    assert packed.nbytes == dense.nbytes * sixteenths // 16
    assert product.shape == (64, 32)
    assert measured.result.retained.total == packed.nbytes + product.nbytes
    assert "called cuSPARSELt" in " ".join(measured.result.blind_spots)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("to_first", ["to_sparse_csr", "to_sparse_csc"])
@pytest.mark.parametrize("to_second", ["to_sparse_csr", "to_sparse_csc"])
def test_matrices_that_are_compressed_by_columns_are_multiplied(to_first, to_second):
    first = torch.tensor([[0.0, 0, 1], [2, 3, 0], [0, 0, 4]])
    second = torch.tensor([[0.0, 1, 0], [5, 0, 6], [0, 7, 0]])
    product = getattr(first.to(CUDA), to_first)() @ getattr(second.to(CUDA), to_second)()
    assert product.to_dense().tolist() == (first @ second).tolist()


@pytest.mark.parametrize("zero_infinity", [False, True])
def test_the_loss_of_sequences_is_computed_where_cudnn_has_a_kernel(zero_infinity):
    scores = torch.linspace(-1, 1, 480).view(12, 4, 10).log_softmax(2)
    targets = torch.tensor([1, 2, 2, 3, 4, 5, 6, 7], dtype=torch.int32)
    of_inputs, of_targets = (12, 12, 12, 12), (2, 2, 2, 2)
    found, gradients = [], []
    for device in ("cpu", CUDA):
        given = scores.clone().to(device).requires_grad_()
        loss = torch.ctc_loss(given, targets, of_inputs, of_targets, 0, 1, zero_infinity)
        loss.backward()
        found.append(loss.item())
        gradients.append(given.grad.cpu())
    assert torch._use_cudnn_ctc_loss(scores.to(CUDA), targets, of_inputs, of_targets, 0)
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    assert torch.allclose(gradients[1], gradients[0], atol=1e-5)


OUT_OF_BOUNDS = {
    "embedding": lambda index: functional.embedding(index, torch.ones(3, 2, device=CUDA)),
    "x[index]": lambda index: torch.ones(3, device=CUDA)[index],
    "gather": lambda index: torch.ones(3, device=CUDA).gather(0, index),
    "cross_entropy": lambda index: functional.cross_entropy(torch.zeros(1, 3, device=CUDA), index),
    "scatter_add_": lambda index: torch.zeros(3, device=CUDA).scatter_add_(0, index, index + 1.0),
    "take": lambda index: torch.ones(3, device=CUDA).take(index),
    "embedding_bag": lambda index: functional.embedding_bag(
        index, torch.ones(3, 2, device=CUDA), torch.tensor([0], device=CUDA)
    ),
    "max_unpool1d": lambda index: functional.max_unpool1d(
        torch.ones(1, 1, 1, device=CUDA), index.view(1, 1, 1), (3,)
    ),
    "binary_cross_entropy": lambda index: functional.binary_cross_entropy(
        index / 2.0, torch.ones(1, device=CUDA)
    ),
}


def test_torchscript_takes_by_an_index():
    @torch.jit.script
    def taken(x, index):
        return x[index]

    x, index = torch.arange(6.0, device=CUDA).view(3, 2), torch.tensor([0, 2], device=CUDA)
    assert taken(x, index).tolist() == [[0, 1], [4, 5]]
    with pytest.raises(RuntimeError, match=r"device-side assert triggered\n.*out of bounds"):
        taken(x, index + 1)


@pytest.mark.parametrize("use", OUT_OF_BOUNDS.values(), ids=list(OUT_OF_BOUNDS))
def test_an_index_out_of_bounds_fails_at_its_line(use):
    use(torch.tensor([2], device=CUDA))
    with pytest.raises(
        RuntimeError, match=r"device-side assert triggered\n.*(out of|max index|0 and 1)"
    ):
        use(torch.tensor([3], device=CUDA))


OUT_OF_BOUNDS_OF_UNKNOWN = {
    "embedding": lambda index, size: functional.embedding(index, torch.randn(3, size, device=CUDA)),
    "x[:, index]": lambda index, size: torch.randn(size, 3, device=CUDA)[:, index],
    "gather": lambda index, size: torch.randn(size, 3, device=CUDA).gather(
        1, index.expand(size, 1)
    ),
    "cross_entropy": lambda index, size: functional.cross_entropy(
        torch.randn(size, 3, device=CUDA), index.repeat(size)
    ),
    "multi_margin_loss": lambda index, size: functional.multi_margin_loss(
        torch.randn(size, 3, device=CUDA), index.repeat(size)
    ),
    "take": lambda index, size: torch.randn(8 * size, device=CUDA).take(index + 8 * size - 3),
    "put_": lambda index, size: torch.randn(8 * size, device=CUDA).put_(
        index + 8 * size - 3, index / 1.0
    ),
    "index_reduce": lambda index, size: torch.randn(3, size, device=CUDA).index_reduce(
        0, index, torch.randn(1, size, device=CUDA), "amax"
    ),
    "embedding_bag": lambda index, size: functional.embedding_bag(
        index, torch.randn(3, size, device=CUDA), torch.tensor([0], device=CUDA)
    ),
}


@pytest.mark.filterwarnings("ignore:index_reduce.. is in beta")
@pytest.mark.parametrize("size", [4, 2**18], ids=["computed", "too large"])
@pytest.mark.parametrize(
    "use", OUT_OF_BOUNDS_OF_UNKNOWN.values(), ids=list(OUT_OF_BOUNDS_OF_UNKNOWN)
)
def test_an_index_out_of_bounds_fails_whatever_is_known_of_the_values(use, size):
    use(torch.tensor([2], device=CUDA), size)
    with pytest.raises(RuntimeError, match=r"device-side assert triggered\n.*out of"):
        use(torch.tensor([3], device=CUDA), size)
    use(unknown(1).long() + 3, size)


def test_a_label_that_is_left_out_is_not_out_of_bounds():
    logits = torch.randn(2**18, 3, device=CUDA)
    functional.cross_entropy(logits, torch.full((2**18,), -100, device=CUDA))


@pytest.mark.parametrize("size", [4, 2**20], ids=["computed", "too large"])
def test_an_element_may_be_counted_from_the_end(size):
    values = torch.randn(size, device=CUDA)
    values.take(torch.tensor([-1, -size], device=CUDA))
    with pytest.raises(RuntimeError, match=r"device-side assert triggered\n"):
        values.take(torch.tensor([-size - 1], device=CUDA))


def test_a_check_on_the_device_fails_where_its_values_are_known():
    with pytest.raises(RuntimeError, match=r"device-side assert triggered\n"):
        torch.multinomial(torch.zeros(3, device=CUDA), 1)
    assert torch.multinomial(torch.tensor([0.0, 1.0, 0.0], device=CUDA), 1).tolist() == [1]
    torch.multinomial(unknown(3), 1)


def nested(device, layout=torch.strided, kind=torch.float32):
    values = [torch.arange(24.0).view(3, 8) / 10, torch.arange(16.0).view(2, 8) / 7]
    return torch.nested.nested_tensor(values, layout=layout, dtype=kind).to(device)


def of_padded(x):
    weight = torch.ones(8, 8, device=x.device, requires_grad=True)
    functional.linear(x, weight).relu().to_padded_tensor(0.0).sum().backward()
    return weight.grad


def encoded(x):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True, dropout=0.0).eval().to(x.device)
    with torch.no_grad():
        return layer(x)


NESTED = {
    "padded": lambda x: x.to_padded_tensor(0.5),
    "a product": lambda x: torch.matmul(x, x.transpose(1, 2)),
    "from a mask": lambda x: torch._nested_tensor_from_mask(
        torch.ones(2, 2, 8, device=x.device), torch.tensor([[1, 1], [1, 0]], device=x.device).bool()
    ),
    "in place": lambda x: x.clone().mul_(3),
    "a gradient": of_padded,
    "an encoder's layer": encoded,
}


@pytest.mark.usefixtures("exact")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", NESTED)
def test_small_nested_tensors_are_computed(name):
    def parts(device):
        out = NESTED[name](nested(device))
        return [part.cpu() for part in (out.unbind() if out.is_nested else [out])]

    torch.testing.assert_close(parts(CUDA), parts("cpu"), rtol=1e-4, atol=1e-5)


def test_what_is_left_out_of_a_nested_tensor_is_zero_and_the_rest_is_twice_as_large():
    before = inexact_reads()
    values, left = nested(CUDA).values(), functional.dropout(nested(CUDA), 0.5).values()
    assert torch.equal(left[left != 0], 2 * values[left != 0])
    assert 0 < int((left != 0).sum()) < values.numel()
    assert inexact_reads() == before


def packed_attention(values, starts, **options):
    longest = max(int(end - start) for start, end in itertools.pairwise(starts))
    out = torch.ops.aten._flash_attention_forward(
        *[values] * 3, starts.int(), starts.int(), longest, longest, 0.0, False, False, **options
    )
    return out[0]


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({}, lambda own, key: True),
        ({"window_size_left": -1, "window_size_right": 0}, lambda own, key: key <= own),
        ({"window_size_left": 1, "window_size_right": 0}, lambda own, key: own - 1 <= key <= own),
    ],
    ids=["all", "causal", "window"],
)
def test_sequences_behind_each_other_attend_to_themselves(options, seen):
    starts = torch.tensor([0, 3, 4, 9])
    values = (torch.arange(9 * 2 * 8.0).view(9, 2, 8) * 0.37).sin().half()
    out = packed_attention(values.to(CUDA), starts.to(CUDA), **options).cpu().float()
    for start, end in itertools.pairwise(starts):
        own = values[start:end].float().transpose(0, 1)
        count = int(end - start)
        mask = torch.tensor([[seen(row, key) for key in range(count)] for row in range(count)])
        wanted = functional.scaled_dot_product_attention(own, own, own, attn_mask=mask)
        torch.testing.assert_close(
            out[start:end].transpose(0, 1), wanted, rtol=1e-2, atol=1e-2, check_dtype=False
        )


@pytest.mark.usefixtures("exact")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", [torch.float16, torch.float32], ids=["flash", "efficient"])
def test_attention_of_jagged_tensors_has_its_gradient(kind):
    def gradient(device, kind):
        values = nested(device, torch.jagged, kind)
        leaf = values.values().detach().requires_grad_()
        rows = torch.nested.nested_tensor_from_jagged(leaf, values.offsets())
        query = rows.view(2, -1, 1, 8).transpose(1, 2)
        out = functional.scaled_dot_product_attention(query, query, query)
        out.transpose(1, 2).values().square().sum().backward()
        return leaf.grad.cpu().float()

    torch.testing.assert_close(
        gradient(CUDA, kind), gradient("cpu", torch.float32), rtol=2e-2, atol=2e-2
    )
