"""Programs that train what projects are made of: speech, detection, quantised weights."""

from __future__ import annotations

import torch
from torch import nn

from tests.record.undisturbed.state import program

functional = nn.functional


class Speech(nn.Module):
    """Shaped as Whisper: convolutions and positions, an encoder, and a decoder with tied words."""

    def __init__(self, width=16, words=11):
        super().__init__()
        self.first = nn.Conv1d(8, width, 3, padding=1)
        self.second = nn.Conv1d(width, width, 3, stride=2, padding=1)
        self.places: torch.Tensor
        self.register_buffer("places", torch.linspace(0, 1, 6)[:, None].expand(6, width).clone())
        self.encoder = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.1, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(width, 2, 32, dropout=0.1, batch_first=True)
        self.words = nn.Embedding(words, width)

    def forward(self, sound, tokens):
        x = functional.gelu(self.second(functional.gelu(self.first(sound)))).transpose(1, 2)
        heard = self.encoder(x + self.places)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        said = self.decoder(self.words(tokens), heard, tgt_mask=mask, tgt_is_causal=True)
        return said @ self.words.weight.T


@program
def hears_and_writes():
    model = Speech()
    optimizer = torch.optim.AdamW(model.parameters(), fused=False)
    sound, tokens = torch.randn(2, 8, 12), torch.randint(11, (2, 5))
    for _ in range(2):
        said = model(sound, tokens[:, :-1])
        loss = functional.cross_entropy(said.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.inference_mode():
        for _ in range(3):
            said = model(sound, tokens)
            tokens = torch.cat([tokens, said[:, -1:].argmax(-1)], 1)
    return loss, tokens, model.state_dict()


class Detector(nn.Module):
    """Shaped as RetinaNet: a pyramid of features, two heads that all levels share, and anchors."""

    def __init__(self, width=8, kinds=3, anchors=2):
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(size, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU())
            for size in (3, width, width)
        )
        self.lateral = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(3))
        self.kinds = nn.Conv2d(width, kinds * anchors, 3, padding=1)
        self.boxes = nn.Conv2d(width, 4 * anchors, 3, padding=1)
        self.kind_count = kinds

    def forward(self, images):
        levels = []
        for stage in self.stages:
            images = stage(images)
            levels.append(images)
        above, found = None, []
        for lateral, level in zip(reversed(self.lateral), reversed(levels), strict=True):
            merged = lateral(level)
            if above is not None:
                merged = merged + functional.interpolate(above, size=merged.shape[-2:])
            above = merged
            found.append((self.kinds(merged), self.boxes(merged)))
        return (
            torch.cat(
                [k.permute(0, 2, 3, 1).reshape(len(k), -1, self.kind_count) for k, _ in found], 1
            ),
            torch.cat([b.permute(0, 2, 3, 1).reshape(len(b), -1, 4) for _, b in found], 1),
        )


def focal_loss(scores, truth):
    probability = torch.sigmoid(scores)
    right = probability * truth + (1 - probability) * (1 - truth)
    each = functional.binary_cross_entropy_with_logits(scores, truth, reduction="none")
    return (each * (1 - right) ** 2).sum() / truth.sum().clamp(min=1)


@program
def detects_objects():
    model = Detector()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    images = torch.randn(2, 3, 16, 16)
    for _ in range(2):
        scores, boxes = model(images)
        matched = torch.rand(scores.shape[:2]) > 0.8
        truth = torch.zeros_like(scores)
        truth[matched] = functional.one_hot(torch.randint(3, (int(matched.sum()),)), 3).float()
        loss = focal_loss(scores, truth) + functional.smooth_l1_loss(
            boxes[matched], torch.zeros_like(boxes[matched])
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        scores, boxes = model(images)
        best = scores.sigmoid().amax(-1).topk(4, dim=1).indices
    return loss, best, boxes.gather(1, best[..., None].expand(-1, -1, 4)), model.state_dict()


class Narrow(torch.Tensor):
    """Shaped as torchao's weights: integers and scales that stand for a tensor."""

    @staticmethod
    def __new__(cls, integers, scales):
        return torch.Tensor._make_wrapper_subclass(
            cls, integers.shape, dtype=scales.dtype, device=integers.device
        )

    def __init__(self, integers, scales):
        self.integers, self.scales = integers, scales

    @classmethod
    def of(cls, wide):
        scales = wide.abs().amax(1, keepdim=True) / 127
        return cls((wide / scales).round().to(torch.int8), scales)

    def wide(self):
        return self.integers.to(self.scales.dtype) * self.scales

    def __tensor_flatten__(self):
        return ["integers", "scales"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, _, *__):
        return cls(inner["integers"], inner["scales"])

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is functional.linear:
            return functional.linear(args[0], args[1].wide(), *args[2:])
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].integers, args[0].scales)
        wide = [a.wide() if isinstance(a, cls) else a for a in args]
        return function(*wide, **kwargs or {})


@program
def serves_with_narrow_weights():
    first, last = nn.Linear(16, 32), nn.Linear(32, 4)
    model = nn.Sequential(first, nn.ReLU(), last)
    x = torch.randn(8, 16)
    before = model(x).detach()
    for layer in (first, last):
        narrow = Narrow.of(layer.weight.detach())
        layer.weight = nn.Parameter(narrow, requires_grad=False)
    adapter = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(adapter.parameters())
    for _ in range(2):
        loss = functional.mse_loss(adapter(model(x)), before)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    weights = [layer.weight.data for layer in (first, last)]
    kept = [(w.integers, w.scales) for w in weights if isinstance(w, Narrow)]
    return loss, kept, adapter.state_dict()
