"""Programs of other kinds for an estimate, each for the CPU and for CUDA.

Optimizers, losses, attention, layers of pictures and volumes, recurrent layers, linear algebra,
models of transformers, and torch's ways to compute gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils import checkpoint
from workloads_estimated import Program, Step, mlp, training

_Loss = Callable[[torch.Tensor], torch.Tensor]


def layers(
    device: str, *modules: nn.Module, shape: tuple[int, ...], loss: _Loss | None = None
) -> Step:
    """Train modules, one after the other, on an input of a shape."""
    model = nn.Sequential(*modules).to(device)
    x = torch.randn(shape, device=device)
    loss_of = loss or (lambda out: out.square().mean())
    return training(device, model, lambda: loss_of(model(x)))


# Optimizers.


def by_optimizer(device: str, kind: str, **how: Any) -> Step:
    model, x = mlp(device)
    optimizer = getattr(torch.optim, kind)(model.parameters(), **how)
    return training(device, model, lambda: model(x).square().mean(), optimizer=optimizer)


def long_sums(device: str) -> Step:
    """Few features of very many rows, whose gradients are sums over all rows."""
    return layers(device, nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16), shape=(65_536, 64))


# Losses.


def classified(device: str, **how: Any) -> Step:
    model = nn.Linear(128, 1000).to(device)
    x, labels = torch.randn(256, 128, device=device), torch.randint(0, 1000, (256,), device=device)
    weight = torch.rand(1000, device=device) if how.pop("weighted", False) else None

    def loss_of() -> torch.Tensor:
        return functional.cross_entropy(model(x), labels, weight, **how)

    return training(device, model, loss_of)


def in_chunks(device: str) -> Step:
    """The logits of a part of the rows at a time, computed again for the backward."""
    model = nn.Linear(128, 4000).to(device)
    x = torch.randn(512, 128, device=device, requires_grad=True)
    labels = torch.randint(0, 4000, (512,), device=device)

    def part(rows: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(rows), wanted, reduction="sum")

    def loss_of() -> torch.Tensor:
        parts = zip(x.chunk(4), labels.chunk(4), strict=True)
        return sum(checkpoint.checkpoint(part, *p, use_reentrant=False) for p in parts) / 512

    return training(device, model, loss_of)


def aligned(device: str) -> Step:
    model = nn.Linear(32, 20).to(device)
    x = torch.randn(50, 16, 32, device=device)
    wanted = torch.randint(1, 20, (16, 30), device=device)
    lengths = torch.full((16,), 50), torch.full((16,), 30)

    def loss_of() -> torch.Tensor:
        return functional.ctc_loss(model(x).log_softmax(-1), wanted, *lengths)

    return training(device, model, loss_of)


def compared(device: str, loss: Callable[..., torch.Tensor]) -> Step:
    model = nn.Linear(256, 256).to(device)
    x, y = torch.randn(2, 256, 256, device=device)
    return training(device, model, lambda: loss(model(x), y))


def contrasted(device: str) -> Step:
    """Two towers whose rows are told apart, as CLIP has it."""
    image, text = nn.Linear(512, 128), nn.Linear(256, 128)
    model = nn.ModuleList([image, text]).to(device)
    x, y = torch.randn(256, 512, device=device), torch.randn(256, 256, device=device)
    labels = torch.arange(256, device=device)

    def loss_of() -> torch.Tensor:
        a, b = functional.normalize(image(x), dim=-1), functional.normalize(text(y), dim=-1)
        logits = a @ b.t() * 10
        both = (
            functional.cross_entropy(logits, labels),
            functional.cross_entropy(logits.t(), labels),
        )
        return sum(both) / 2

    return training(device, model, loss_of)


# Attention.


def attending(device: str, dtype: torch.dtype = torch.float32, **how: Any) -> Step:
    model = nn.Linear(256, 768).to(device, dtype)
    x = torch.randn(2, 512, 256, device=device, dtype=dtype)
    masked, grouped = how.pop("masked", False), how.get("enable_gqa", False)
    mask = torch.ones(512, 512, device=device, dtype=torch.bool).tril() if masked else None

    def loss_of() -> torch.Tensor:
        parts = model(x).view(2, 512, 12, 64).transpose(1, 2).split(4, 1)
        query, key, value = (parts[0], *(p[:, :2] if grouped else p for p in parts[1:]))
        out = functional.scaled_dot_product_attention(query, key, value, mask, **how)
        return out.transpose(1, 2).flatten(2).float().square().mean()

    return training(device, model, loss_of)


def decoder(device: str) -> Step:
    layer = nn.TransformerDecoderLayer(128, 4, 256, batch_first=True, dropout=0.1)
    model = nn.TransformerDecoder(layer, 2).to(device)
    x, memory = torch.randn(4, 64, 128, device=device), torch.randn(4, 32, 128, device=device)
    mask = nn.Transformer.generate_square_subsequent_mask(64, device=device)
    return training(device, model, lambda: model(x, memory, mask).square().mean())


# Pictures and volumes.


def shuffled(device: str) -> Step:
    up = [nn.Conv2d(16, 64, 3, padding=1), nn.PixelShuffle(2), nn.PReLU(), nn.ReflectionPad2d(1)]
    return layers(device, *up, nn.Conv2d(16, 3, 3), shape=(2, 16, 32, 32))


def separable(device: str) -> Step:
    block = [
        nn.Conv2d(32, 32, 3, padding=1, groups=32),
        nn.BatchNorm2d(32),
        nn.ReLU6(),
        nn.Conv2d(32, 64, 1),
        nn.BatchNorm2d(64),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ]
    return layers(device, *block, shape=(4, 32, 28, 28))


def resized(device: str, mode: str) -> Step:
    return layers(
        device, nn.Conv2d(3, 8, 1), nn.Upsample(scale_factor=3, mode=mode), shape=(2, 3, 40, 40)
    )


def sampled(device: str) -> Step:
    model = nn.Conv2d(3, 8, 1).to(device)
    x, grid = torch.randn(2, 3, 64, 64, device=device), torch.rand(2, 96, 96, 2, device=device)

    def loss_of() -> torch.Tensor:
        return functional.grid_sample(model(x), grid, align_corners=False).square().mean()

    return training(device, model, loss_of)


def windows(device: str) -> Step:
    """Windows that are shifted by half, as Swin has it."""
    model = nn.Linear(64, 64).to(device)
    x = torch.randn(2, 32, 32, 64, device=device)

    def loss_of() -> torch.Tensor:
        moved = torch.roll(model(x), (-4, -4), (1, 2)).view(2, 4, 8, 4, 8, 64)
        return moved.permute(0, 1, 3, 2, 4, 5).reshape(-1, 64, 64).softmax(-1).square().mean()

    return training(device, model, loss_of)


def unfolded(device: str) -> Step:
    model = nn.Conv2d(3, 16, 1).to(device)
    x = torch.randn(2, 3, 32, 32, device=device)
    return training(device, model, lambda: functional.unfold(model(x), 3).square().mean())


# Tables, graphs and routes.


def long_texts(device: str) -> Step:
    """More indices than CUDA adds up at once."""
    rows = nn.Embedding(2000, 64).to(device)
    ids = torch.randint(0, 2000, (16, 512), device=device)
    return training(device, rows, lambda: rows(ids).square().mean())


def messages(device: str) -> Step:
    """A layer over a graph: rows are gathered along edges, and added up where these end."""
    model = nn.Linear(64, 64).to(device)
    x, edges = (
        torch.randn(1000, 64, device=device),
        torch.randint(0, 1000, (2, 8000), device=device),
    )

    def loss_of() -> torch.Tensor:
        sent = model(x)[edges[0]]
        return torch.zeros(1000, 64, device=device).index_add(0, edges[1], sent).square().mean()

    return training(device, model, loss_of)


def averaged_over_edges(device: str) -> Step:
    model = nn.Linear(64, 64).to(device)
    x, ends = torch.randn(4000, 64, device=device), torch.randint(0, 500, (4000, 1), device=device)

    def loss_of() -> torch.Tensor:
        empty = torch.zeros(500, 64, device=device)
        ends_of_all = ends.expand(-1, 64)
        return empty.scatter_reduce(0, ends_of_all, model(x), "mean").square().mean()

    return training(device, model, loss_of)


def routed(device: str) -> Step:
    """Tokens are sorted by their expert, in parts of a known size."""
    experts, router = nn.Parameter(torch.randn(4, 64, 64)), nn.Linear(64, 4)
    model = nn.Module()
    model.experts, model.router = experts, router
    model.to(device)
    x = torch.randn(2048, 64, device=device)

    def loss_of() -> torch.Tensor:
        order = model.router(x).argmax(-1).argsort()
        parts = x[order].view(4, 512, 64)
        return torch.bmm(parts, model.experts).square().mean()

    return training(device, model, loss_of)


# Recurrent layers and linear algebra.


def gated(device: str) -> Step:
    model = nn.GRU(32, 64, 2, bidirectional=True, batch_first=True).to(device)
    x = torch.randn(8, 24, 32, device=device)
    return training(device, model, lambda: model(x)[0].square().mean())


def scanned(device: str) -> Step:
    """A selective state space, step by step."""
    model = nn.Linear(64, 3 * 64).to(device)
    x = torch.randn(4, 32, 64, device=device)

    def loss_of() -> torch.Tensor:
        decay, inner, gate = model(x).chunk(3, -1)
        state, states = torch.zeros(4, 64, device=device), []
        for step in range(32):
            state = state * torch.sigmoid(decay[:, step]) + inner[:, step]
            states.append(state)
        return (torch.stack(states, 1) * functional.silu(gate)).square().mean()

    return training(device, model, loss_of)


def algebra(device: str, function: _Loss) -> Step:
    weight = nn.Parameter(torch.eye(64, device=device).repeat(4, 1, 1))
    model = nn.ParameterList([weight])

    def loss_of() -> torch.Tensor:
        return function(weight @ weight.mT + torch.eye(64, device=device)).square().mean()

    return training(device, model, loss_of)


# Gradients.


def saved_some(device: str) -> Step:
    """A checkpoint that keeps what products make."""
    model, x = mlp(device)
    x.requires_grad_()
    kept = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    choose = partial(checkpoint.create_selective_checkpoint_contexts, kept)

    def loss_of() -> torch.Tensor:
        again = checkpoint.checkpoint(model, x, use_reentrant=False, context_fn=choose)
        return again.square().mean()

    return training(device, model, loss_of)


def tangents(device: str) -> Step:
    model, x = mlp(device)
    return lambda: torch.func.jvp(model, (x,), (torch.ones_like(x),))[1]


def many_gradients(device: str) -> Step:
    model, x = mlp(device, 64)
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(given: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, given, (row,)).square().mean()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0))
    return lambda: each(weights, x)


def half_precision(device: str) -> Step:
    """Weights of 16 bits, with a copy of 32 for the optimizer."""
    model, x = mlp(device)
    model.bfloat16()
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters)

    def step() -> None:
        model(x.bfloat16()).float().square().mean().backward()
        for own, master in zip(model.parameters(), masters, strict=True):
            master.grad, own.grad = own.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for own, master in zip(model.parameters(), masters, strict=True):
                own.copy_(master)

    return step


def clipped(device: str) -> Step:
    model, x = mlp(device)
    clip = partial(nn.utils.clip_grad_norm_, model.parameters(), 1.0)
    return training(device, model, lambda: model(x).square().mean(), lambda _: clip())


# Models of transformers.


def modelled(device: str, kind: str, sizes: dict[str, Any], **inputs: tuple[int, ...]) -> Step:
    import transformers

    config = getattr(transformers, f"{kind.partition('For')[0].removesuffix('Model')}Config")(
        **sizes
    )
    model = getattr(transformers, kind)(config).to(device)
    given = {
        name: torch.randint(0, 100, shape, device=device)
        if name in ("input_ids", "labels")
        else torch.randn(shape, device=device)
        for name, shape in inputs.items()
    }

    def loss_of() -> torch.Tensor:
        out = model(**given)
        return out.loss if "labels" in given else out[0].square().mean()

    return training(device, model, loss_of)


_SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}
_ON_BOTH: dict[str, Callable[[str], Step]] = {
    **{
        kind: partial(by_optimizer, kind=kind, lr=0.01)
        for kind in ("RAdam", "NAdam", "ASGD", "Rprop", "Adamax", "Adadelta")
    },
    "SGD, foreach": partial(by_optimizer, kind="SGD", lr=0.1, momentum=0.9, foreach=True),
    "Adam, amsgrad": partial(by_optimizer, kind="Adam", amsgrad=True),
    "sums over many rows": long_sums,
    "label smoothing, weighted": partial(classified, label_smoothing=0.1, weighted=True),
    "loss in chunks": in_chunks,
    "CTC": aligned,
    "KL": partial(compared, loss=lambda a, b: functional.kl_div(a.log_softmax(-1), b.softmax(-1))),
    "BCE with logits": partial(
        compared, loss=lambda a, b: functional.binary_cross_entropy_with_logits(a, b.sigmoid())
    ),
    "triplets": partial(
        compared, loss=lambda a, b: functional.triplet_margin_loss(a, b, b.roll(1, 0))
    ),
    "cosines": partial(compared, loss=lambda a, b: 1 - functional.cosine_similarity(a, b).mean()),
    "smooth L1": partial(compared, loss=functional.smooth_l1_loss),
    "two towers": contrasted,
    "attention, masked": partial(attending, masked=True),
    "attention, causal": partial(attending, is_causal=True),
    "attention, grouped, bf16": partial(
        attending, dtype=torch.bfloat16, enable_gqa=True, is_causal=True
    ),
    "decoder": decoder,
    "PixelShuffle": shuffled,
    "separable convolutions": separable,
    "bicubic": partial(resized, mode="bicubic"),
    "bilinear": partial(resized, mode="bilinear"),
    "grid_sample": sampled,
    "shifted windows": windows,
    "unfold": unfolded,
    "embedding of long texts": long_texts,
    "graph": messages,
    "graph, means": averaged_over_edges,
    "routed by sorting": routed,
    "GRU, both ways": gated,
    "state space": scanned,
    "Cholesky": partial(algebra, function=torch.linalg.cholesky),
    "inverse": partial(algebra, function=torch.linalg.inv),
    "determinant": partial(algebra, function=lambda a: torch.linalg.slogdet(a)[1]),
    "eigenvalues": partial(algebra, function=torch.linalg.eigvalsh),
    "prod": partial(algebra, function=lambda a: a.prod(-1)),
    "selective checkpoint": saved_some,
    "jvp": tangents,
    "gradient of each sample": many_gradients,
    "master weights": half_precision,
    "clipping": clipped,
    "ViT": partial(
        modelled,
        kind="ViTModel",
        sizes={**_SMALL, "image_size": 32, "patch_size": 8},
        pixel_values=(4, 3, 32, 32),
    ),
    "Whisper": partial(
        modelled,
        kind="WhisperForConditionalGeneration",
        sizes={
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "vocab_size": 200,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
            "max_source_positions": 100,
            "num_mel_bins": 40,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
        input_features=(2, 40, 200),
        labels=(2, 16),
    ),
    "Mamba": partial(
        modelled,
        kind="MambaForCausalLM",
        sizes={"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 200, "state_size": 8},
        input_ids=(2, 16),
        labels=(2, 16),
    ),
    "Qwen2": partial(
        modelled,
        kind="Qwen2ForCausalLM",
        sizes={**_SMALL, "vocab_size": 200, "num_key_value_heads": 2},
        input_ids=(2, 32),
        labels=(2, 32),
    ),
}
VARIED = {
    **{name: Program(build) for name, build in _ON_BOTH.items()},
    **{f"{name}, for CUDA": Program(build, "cuda") for name, build in _ON_BOTH.items()},
}
