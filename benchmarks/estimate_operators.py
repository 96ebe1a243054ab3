"""Single operators estimated, beside what they measure, with their gradients.

    python benchmarks/estimate_operators.py [operator ...] [--output FILE.md]

The gradient here comes out of ``.sum()``, an expanded tensor, which many kernels copy first; in a
real model few see one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from estimated_beside_measured import compare
from torch import nn
from workloads_estimated import Program, Step

_Shape = tuple[int, ...]
_Function = Callable[..., Any]
BF16 = torch.bfloat16
COMPLEX = torch.complex64
MATRIX, IMAGE, SEQUENCE, HEADS = (64, 64), (4, 16, 32, 32), (4, 16, 32), (2, 4, 64, 32)
BATCH = (4, 48, 48)
LONG, LARGE, VOLUME = (8192, 128), (512, 512), (2, 4, 12, 12, 12)


class Operator:
    """A function of tensors of given shapes, and of whole numbers up to some number."""

    def __init__(
        self,
        function: _Function,
        *shapes: _Shape,
        dtype: torch.dtype = torch.float32,
        indices: tuple[_Shape, int] | None = None,
    ) -> None:
        self.function, self.shapes, self.dtype, self.indices = function, shapes, dtype, indices

    def step(self, device: str) -> Step:
        function = self.function
        if isinstance(function, nn.Module):
            function = function.to(device)
        given = [
            torch.randn(s, dtype=self.dtype, device=device, requires_grad=True) for s in self.shapes
        ]
        if self.indices is not None:
            shape, most = self.indices
            given.append(torch.randint(0, most, shape, device=device))
        leaves = [*given, *(function.parameters() if isinstance(function, nn.Module) else ())]

        def step() -> None:
            out = function(*given)
            out = out if isinstance(out, torch.Tensor) else out[0]
            out.sum().backward()
            del out
            for leaf in leaves:
                leaf.grad = None

        return step


def attention(**how: Any) -> Operator:
    return Operator(partial(F.scaled_dot_product_attention, **how), HEADS, HEADS, HEADS)


def loss(function: _Function, shape: _Shape = LARGE) -> Operator:
    return Operator(lambda a, b: function(a, b.detach().sigmoid()), shape, shape)


def square(function: _Function) -> Operator:
    eye = lambda a: torch.eye(len(a), device=a.device)  # noqa: E731
    return Operator(lambda a: function(a @ a.mT + eye(a)), MATRIX)


OPERATORS: dict[str, Operator] = {
    "conv2d": Operator(nn.Conv2d(16, 32, 3), IMAGE),
    "conv2d, depthwise": Operator(nn.Conv2d(16, 16, 3, groups=16), IMAGE),
    "conv2d, dilated": Operator(nn.Conv2d(16, 32, 3, dilation=2), IMAGE),
    "conv1d": Operator(nn.Conv1d(16, 32, 3), (4, 16, 128)),
    "conv3d": Operator(nn.Conv3d(4, 8, 3), VOLUME),
    "conv_transpose2d": Operator(nn.ConvTranspose2d(16, 32, 3), (4, 16, 16, 16)),
    "lstm": Operator(nn.LSTM(32, 32, batch_first=True), SEQUENCE),
    "gru": Operator(nn.GRU(32, 32, batch_first=True), SEQUENCE),
    "rnn": Operator(nn.RNN(32, 32, batch_first=True), SEQUENCE),
    "linear": Operator(nn.Linear(64, 64), MATRIX),
    "linear, long": Operator(nn.Linear(128, 16), LONG),
    "linear, transposed": Operator(
        lambda x, w, b: F.linear(x.transpose(1, 2), w, b), (4, 64, 128), (32, 64), (32,)
    ),
    "linear bf16": Operator(nn.Linear(64, 64, dtype=BF16), MATRIX, dtype=BF16),
    "bilinear": Operator(nn.Bilinear(32, 32, 8), (64, 32), (64, 32)),
    "layer_norm": Operator(nn.LayerNorm(64), MATRIX),
    "rms_norm": Operator(nn.RMSNorm(128), LONG),
    "group_norm": Operator(nn.GroupNorm(4, 16), IMAGE),
    "batch_norm": Operator(nn.BatchNorm2d(16), IMAGE),
    "instance_norm": Operator(nn.InstanceNorm2d(16, affine=True), IMAGE),
    "local_response_norm": Operator(nn.LocalResponseNorm(3), IMAGE),
    "normalize": Operator(F.normalize, LONG),
    "softmax": Operator(nn.Softmax(-1), MATRIX),
    "log_softmax": Operator(nn.LogSoftmax(0), LARGE),
    "gelu": Operator(nn.GELU(), MATRIX),
    "silu": Operator(nn.SiLU(), MATRIX),
    "glu": Operator(nn.GLU(), MATRIX),
    "prelu": Operator(nn.PReLU(128), LONG),
    "mish": Operator(nn.Mish(), MATRIX),
    "dropout": Operator(nn.Dropout(0.5), MATRIX),
    "embedding": Operator(nn.Embedding(100, 64), indices=((8, 16), 100)),
    "embedding, long": Operator(nn.Embedding(2000, 64), indices=((8192,), 2000)),
    "embedding_bag": Operator(nn.EmbeddingBag(100, 64), indices=((8, 16), 100)),
    "sdpa": attention(),
    "sdpa, causal": attention(is_causal=True),
    "sdpa, dropout": attention(dropout_p=0.1),
    "max_pool2d": Operator(nn.MaxPool2d(2), IMAGE),
    "avg_pool2d": Operator(nn.AvgPool2d(2), IMAGE),
    "adaptive_avg_pool2d": Operator(nn.AdaptiveAvgPool2d(4), IMAGE),
    "adaptive_max_pool2d": Operator(nn.AdaptiveMaxPool2d(4), IMAGE),
    "avg_pool3d": Operator(nn.AvgPool3d(2), VOLUME),
    "lp_pool2d": Operator(nn.LPPool2d(2, 2), IMAGE),
    "upsample": Operator(nn.Upsample(scale_factor=2, mode="bilinear"), IMAGE),
    "upsample, nearest": Operator(nn.Upsample(scale_factor=2), IMAGE),
    "upsample, nearest-exact": Operator(nn.Upsample(scale_factor=2, mode="nearest-exact"), IMAGE),
    "upsample bf16, linear": Operator(
        nn.Upsample(scale_factor=2, mode="linear"), (4, 16, 256), dtype=BF16
    ),
    "upsample, bicubic": Operator(nn.Upsample(scale_factor=2, mode="bicubic"), IMAGE),
    "upsample, trilinear": Operator(nn.Upsample(scale_factor=2, mode="trilinear"), VOLUME),
    "reflection_pad2d": Operator(nn.ReflectionPad2d(2), IMAGE),
    "reflection_pad3d": Operator(nn.ReflectionPad3d(2), VOLUME),
    "replication_pad3d": Operator(nn.ReplicationPad3d(2), VOLUME),
    "circular pad": Operator(lambda a: F.pad(a, (2, 2, 2, 2), "circular"), IMAGE),
    "unfold": Operator(nn.Unfold(3), IMAGE),
    "fold": Operator(nn.Fold(16, 3), (4, 36, 196)),
    "pixel_shuffle": Operator(nn.PixelShuffle(4), IMAGE),
    "grid_sample": Operator(
        lambda x, g: F.grid_sample(x, g, align_corners=False), IMAGE, (4, 32, 32, 2)
    ),
    "bmm": Operator(torch.bmm, (4, 32, 32), (4, 32, 32)),
    "einsum": Operator(lambda a, b: torch.einsum("bij,bjk->bik", a, b), (4, 64, 32), (4, 32, 64)),
    "cdist": Operator(torch.cdist, (64, 16), (128, 16)),
    "index": Operator(lambda a: a[torch.arange(0, 64, 2, device=a.device)], MATRIX),
    "index, long": Operator(lambda a, i: a[i], (1000, 64), indices=((8192,), 1000)),
    "gather": Operator(lambda a, i: a.gather(1, i), MATRIX, indices=((64, 4), 64)),
    "scatter_add": Operator(lambda a, i: a.scatter_add(0, i, a * 2), MATRIX, indices=(MATRIX, 64)),
    "index_add": Operator(lambda a, i: a.index_add(0, i, a * 2), MATRIX, indices=((64,), 64)),
    "index_put": Operator(
        lambda a, b, i: a.index_put((i,), b, accumulate=True),
        (1000, 32),
        (8192, 32),
        indices=((8192,), 1000),
    ),
    "topk": Operator(lambda a: a.topk(4)[0], MATRIX),
    "sort": Operator(lambda a: a.sort()[0], MATRIX),
    "sort, long": Operator(lambda a: a.sort(0)[0], LONG),
    "median": Operator(lambda a: a.median(-1)[0], MATRIX),
    "median of columns": Operator(lambda a: a.median(0)[0], LARGE),
    "median of all": Operator(torch.median, LARGE),
    "kthvalue": Operator(lambda a: a.kthvalue(3)[0], MATRIX),
    "cumsum": Operator(lambda a: a.cumsum(0), MATRIX),
    "cumprod": Operator(lambda a: a.cumprod(0), MATRIX),
    "prod": Operator(lambda a: a.prod(0), MATRIX),
    "sum of columns": Operator(lambda a: (a * 2).sum(0), LONG),
    "norm of columns": Operator(lambda a: torch.linalg.vector_norm(a, dim=0), LONG),
    "var of columns": Operator(lambda a: a.var(0), LONG),
    "max of columns": Operator(lambda a: a.max(0)[0], LONG),
    "logsumexp": Operator(lambda a: a.logsumexp(0), MATRIX),
    "logsumexp, long": Operator(lambda a: a.logsumexp(0), LONG),
    "square": Operator(lambda a: torch.tanh(a) ** 2, MATRIX),
    "used twice": Operator(lambda a: torch.tanh(a) * torch.tanh(a).exp() + a, MATRIX),
    "where": Operator(lambda a: torch.where(a > 0, a, a * 2), LARGE),
    "clamp": Operator(lambda a: a.clamp(-1, 1), LARGE),
    "roll": Operator(lambda a: a.roll((3, 3), (0, 1)), LARGE),
    "flip": Operator(lambda a: a.flip(0), LARGE),
    "repeat": Operator(lambda a: a.repeat(2, 2), LARGE),
    "triu": Operator(torch.triu, LARGE),
    "tril of a batch": Operator(torch.tril, BATCH),
    "transposed": Operator(lambda a: a.t().contiguous() * 2, LARGE),
    "rot90": Operator(torch.rot90, LARGE),
    "diff": Operator(torch.diff, LARGE),
    "sinc": Operator(torch.sinc, LARGE),
    "aminmax": Operator(lambda a: a.aminmax(dim=0)[0], LONG),
    "std of columns": Operator(lambda a: a.std(0), LONG),
    "logcumsumexp": Operator(lambda a: a.logcumsumexp(0), MATRIX),
    "take": Operator(torch.take, LARGE, indices=((64, 32), 512 * 512)),
    "bernoulli": Operator(lambda a: a * torch.bernoulli(a.detach().sigmoid()), LARGE),
    "rrelu": Operator(lambda a: F.rrelu(a, training=True), LARGE),
    "count_nonzero": Operator(lambda a: a * a.count_nonzero(0), LARGE),
    "isin": Operator(lambda a, b: a * torch.isin(a.detach(), b.detach()), LONG, (2000,)),
    "masked_scatter": Operator(lambda a, b: a.masked_scatter(a.detach() > 0, b), MATRIX, MATRIX),
    "index_reduce": Operator(
        lambda a, i: a.index_reduce(0, i, a * 2, "amax"), MATRIX, indices=((64,), 64)
    ),
    "scatter_reduce": Operator(
        lambda a, i: a.scatter_reduce(0, i, a * 2, "mean"), MATRIX, indices=(MATRIX, 64)
    ),
    "mse_loss": loss(F.mse_loss),
    "l1_loss": loss(F.l1_loss),
    "huber_loss": loss(F.huber_loss),
    "kl_div": loss(F.kl_div),
    "binary_cross_entropy": Operator(
        lambda a, b: F.binary_cross_entropy(a.sigmoid(), b.detach().sigmoid()), LARGE, LARGE
    ),
    "binary_cross_entropy_with_logits": loss(F.binary_cross_entropy_with_logits),
    "poisson_nll_loss": loss(F.poisson_nll_loss),
    "cosine_similarity": loss(F.cosine_similarity),
    "cross_entropy": Operator(F.cross_entropy, LARGE, indices=((512,), 512)),
    "multi_margin_loss": Operator(F.multi_margin_loss, LARGE, indices=((512,), 512)),
    "linalg.inv": square(torch.linalg.inv),
    "linalg.solve": square(lambda a: torch.linalg.solve(a, a)),
    "linalg.cholesky": square(torch.linalg.cholesky),
    "linalg.qr": square(torch.linalg.qr),
    "linalg.eigh": square(torch.linalg.eigh),
    "linalg.svd": square(torch.linalg.svd),
    "linalg.svdvals": square(torch.linalg.svdvals),
    "linalg.det": square(torch.linalg.det),
    "linalg.pinv": square(torch.linalg.pinv),
    "matrix_exp": square(torch.linalg.matrix_exp),
    "matrix_exp of a batch": Operator(torch.linalg.matrix_exp, (4, 32, 32)),
    "linalg.householder_product": Operator(torch.linalg.householder_product, MATRIX, (64,)),
    "cholesky_solve": Operator(lambda a, b: torch.cholesky_solve(b, a.tril()), MATRIX, MATRIX),
    "mm of conjugates": Operator(
        lambda a, b: (a.conj() @ b.conj()).abs(), MATRIX, MATRIX, dtype=COMPLEX
    ),
    "mm of adjoints": Operator(lambda a, b: (a.mH @ b.mH).abs(), MATRIX, MATRIX, dtype=COMPLEX),
    "bmm of adjoints": Operator(
        lambda a, b: torch.bmm(a.mH, b.conj()).abs(), BATCH, BATCH, dtype=COMPLEX
    ),
    "hfftn": Operator(torch.fft.hfftn, MATRIX),
    "ifft": Operator(lambda a: torch.fft.ifft(a).abs(), LARGE),
    "fft": Operator(lambda a: torch.fft.rfft(a).abs(), MATRIX),
    "fft2": Operator(lambda a: torch.fft.fft2(a).real, LARGE),
    "irfft": Operator(lambda a: torch.fft.irfft(torch.fft.rfft(a)), LARGE),
    "stft": Operator(
        lambda a: torch.stft(
            a, 64, 16, window=torch.ones(64, device=a.device), return_complex=True
        ).abs(),
        (4, 4096),
    ),
}


def programs() -> dict[str, Program]:
    """Each operator for both devices."""
    steps = {name: operator.step for name, operator in OPERATORS.items()}
    on_cuda = {f"{name}, for CUDA": Program(step, "cuda") for name, step in steps.items()}
    return {name: Program(step) for name, step in steps.items()} | on_cuda


if __name__ == "__main__":
    compare(programs(), __file__, "Operators estimated, beside what they measure", apart=False)
