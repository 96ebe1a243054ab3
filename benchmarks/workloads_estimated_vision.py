"""Programs of vision for an estimate, each for the CPU and for CUDA.

Pictures, volumes, video and scenes: classifiers, segmentation, detection, generators, flow.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from workloads_estimated import Step, on_both, training


class _ConvNext(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        h = self.scale * self.down(functional.gelu(self.up(h)))
        kept = torch.rand(len(x), 1, 1, 1, device=x.device).lt(0.9)
        return x + h.permute(0, 3, 1, 2) * kept / 0.9


def conv_next(device: str) -> Step:
    parts = [nn.Conv2d(3, 48, 4, 4), _ConvNext(48), _ConvNext(48), nn.AdaptiveAvgPool2d(1)]
    model = nn.Sequential(*parts, nn.Flatten(), nn.Linear(48, 100)).to(device)
    x, labels = torch.randn(8, 3, 64, 64, device=device), torch.randint(100, (8,), device=device)
    return training(
        device, model, lambda: functional.cross_entropy(model(x), labels, label_smoothing=0.1)
    )


class _Unet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = self._block(3, width), self._block(width, 2 * width)
        self.middle = self._block(2 * width, 4 * width)
        self.up_second = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.up_first = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.back_second = self._block(4 * width, 2 * width)
        self.back_first = self._block(2 * width, width)
        self.head = nn.Conv2d(width, 1, 1)

    @staticmethod
    def _block(inner: int, outer: int) -> nn.Module:
        layers = [nn.Conv2d(inner, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer)]
        again = [nn.Conv2d(outer, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer)]
        return nn.Sequential(*layers, nn.ReLU(inplace=True), *again, nn.ReLU(inplace=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        second = self.second(functional.max_pool2d(first, 2))
        h = self.up_second(self.middle(functional.max_pool2d(second, 2)))
        h = self.up_first(self.back_second(torch.cat([h, second], 1)))
        return self.head(self.back_first(torch.cat([h, first], 1)))


def segmented(device: str) -> Step:
    model = _Unet().to(device)
    x = torch.randn(4, 3, 64, 64, device=device)
    wanted = torch.randint(2, (4, 1, 64, 64), device=device).float()

    def loss_of() -> torch.Tensor:
        out = model(x)
        chances = out.sigmoid()
        shared = (chances * wanted).sum((1, 2, 3))
        dice = 1 - (2 * shared + 1) / ((chances + wanted).sum((1, 2, 3)) + 1)
        return functional.binary_cross_entropy_with_logits(out, wanted) + dice.mean()

    return training(device, model, loss_of)


def detected(device: str) -> Step:
    """A head of RetinaNet on levels of a pyramid, with the focal loss."""
    backbone = nn.ModuleList(nn.Conv2d(c, 32, 3, stride=2, padding=1) for c in (3, 32, 32))
    lateral = nn.ModuleList(nn.Conv2d(32, 32, 1) for _ in range(3))
    tower = [nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU()]
    head = nn.Sequential(*tower, nn.Conv2d(32, 3 * (10 + 4), 3, padding=1))
    model = nn.ModuleList([backbone, lateral, head]).to(device)
    x = torch.randn(2, 3, 128, 128, device=device)
    count = 3 * (64**2 + 32**2 + 16**2)
    labels = torch.zeros(2, count, 10, device=device)
    labels[:, ::50, 3] = 1
    boxes, of_object = torch.randn(2, count, 4, device=device), labels.amax(-1)

    def loss_of() -> torch.Tensor:
        levels, h = [], x
        for layer in backbone:
            h = layer(h).relu()
            levels.append(h)
        found, above = [], None
        for layer, level in reversed(list(zip(lateral, levels, strict=True))):
            here = layer(level)
            if above is not None:
                here = here + functional.interpolate(above, scale_factor=2, mode="nearest")
            above = here
            found.append(head(here).permute(0, 2, 3, 1).reshape(2, -1, 14))
        out = torch.cat(found[::-1], 1)
        scores, places = out.split([10, 4], -1)
        each = functional.binary_cross_entropy_with_logits(scores, labels, reduction="none")
        chances = scores.sigmoid()
        right = chances * labels + (1 - chances) * (1 - labels)
        focal = (0.25 * (1 - right) ** 2 * each).sum() / of_object.sum().clamp(min=1)
        near = functional.smooth_l1_loss(places, boxes, reduction="none", beta=0.1).sum(-1)
        return focal + (near * of_object).sum() / of_object.sum().clamp(min=1)

    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=1e-4)
    return training(device, model, loss_of, optimizer=optimizer)


class _Deformable(nn.Module):
    """A convolution that reads where it is told to, by ``grid_sample``."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.offsets, self.scales = nn.Conv2d(inner, 18, 3, padding=1), nn.Conv2d(inner, 9, 1)
        self.weight = nn.Conv2d(9 * inner, outer, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, _, height, width = x.shape
        rows, columns = torch.meshgrid(
            torch.linspace(-1, 1, height, device=x.device),
            torch.linspace(-1, 1, width, device=x.device),
            indexing="ij",
        )
        base = torch.stack([columns, rows], -1)
        moves = self.offsets(x).view(batch, 9, 2, height, width).permute(1, 0, 3, 4, 2)
        scales = self.scales(x).sigmoid().unbind(1)
        read = [
            functional.grid_sample(x, base + move / width, align_corners=True) * scale[:, None]
            for move, scale in zip(moves, scales, strict=True)
        ]
        return self.weight(torch.cat(read, 1))


def deformed(device: str) -> Step:
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), _Deformable(16, 32)).to(device)
    x = torch.randn(4, 3, 32, 32, device=device)
    return training(device, model, lambda: model(x).relu().mean())


def video(device: str) -> Step:
    """Convolutions over space, then over time."""

    def both(inner: int, outer: int) -> list[nn.Module]:
        space = nn.Conv3d(inner, outer, (1, 3, 3), padding=(0, 1, 1), bias=False)
        time = nn.Conv3d(outer, outer, (3, 1, 1), padding=(1, 0, 0), bias=False)
        return [space, nn.BatchNorm3d(outer), nn.ReLU(), time, nn.BatchNorm3d(outer), nn.ReLU()]

    pool, end = nn.MaxPool3d((1, 2, 2)), nn.AdaptiveAvgPool3d(1)
    layers = [*both(3, 16), pool, *both(16, 32), end, nn.Flatten(), nn.Dropout(0.5)]
    model = nn.Sequential(*layers, nn.Linear(32, 20)).to(device)
    x, labels = torch.randn(2, 3, 8, 32, 32, device=device), torch.randint(20, (2,), device=device)
    return training(device, model, lambda: functional.cross_entropy(model(x), labels))


def _generator(device: str) -> nn.Module:
    layers: list[nn.Module] = [nn.ConvTranspose2d(32, 32, 4, 1, 0), nn.BatchNorm2d(32), nn.ReLU()]
    layers += [nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*layers, nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Tanh()).to(device)


def adversarial(device: str) -> Step:
    make = _generator(device)
    judge = nn.Sequential(
        parametrizations.spectral_norm(nn.Conv2d(3, 32, 4, 2, 1)),
        nn.LeakyReLU(0.2, inplace=True),
        parametrizations.spectral_norm(nn.Conv2d(32, 64, 4, 2, 1)),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Flatten(),
        nn.Linear(1024, 1),
    ).to(device)
    of_make = torch.optim.Adam(make.parameters(), 2e-4, betas=(0.5, 0.999))
    of_judge = torch.optim.Adam(judge.parameters(), 2e-4, betas=(0.5, 0.999))
    real, loss = torch.randn(16, 3, 16, 16, device=device), nn.BCEWithLogitsLoss()

    def step() -> None:
        fake = make(torch.randn(16, 32, 1, 1, device=device))
        of_judge.zero_grad(set_to_none=True)
        ones, zeros = torch.ones(16, 1, device=device), torch.zeros(16, 1, device=device)
        (loss(judge(real), ones) + loss(judge(fake.detach()), zeros)).backward()
        of_judge.step()
        of_make.zero_grad(set_to_none=True)
        loss(judge(fake), ones).backward()
        of_make.step()

    return step


def penalized(device: str) -> Step:
    """A critic of pictures whose gradient is near one, and a generator every step."""
    make = _generator(device)
    layers = [nn.Conv2d(3, 16, 3, 2, 1), nn.SiLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.SiLU()]
    critic = nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 1)).to(device)
    of_make = torch.optim.Adam(make.parameters(), 1e-4)
    of_critic = torch.optim.Adam(critic.parameters(), 1e-4)
    real = torch.randn(8, 3, 16, 16, device=device)

    def step() -> None:
        with torch.no_grad():
            fake = make(torch.randn(8, 32, 1, 1, device=device))
        share = torch.rand(8, 1, 1, 1, device=device)
        mixed = (share * real + (1 - share) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        penalty = (slope.flatten(1).norm(2, dim=1) - 1).square().mean()
        of_critic.zero_grad()
        (critic(fake).mean() - critic(real).mean() + 10 * penalty).backward()
        of_critic.step()
        of_make.zero_grad()
        (-critic(make(torch.randn(8, 32, 1, 1, device=device))).mean()).backward()
        of_make.step()

    return step


class _Squeezed(nn.Module):
    """An inverted residual block of EfficientNet."""

    def __init__(self, width: int) -> None:
        super().__init__()
        wide = 4 * width
        self.widen = nn.Sequential(
            nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.SiLU(inplace=True)
        )
        self.each = nn.Sequential(
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.SiLU(inplace=True),
        )
        self.less, self.more = nn.Conv2d(wide, wide // 16, 1), nn.Conv2d(wide // 16, wide, 1)
        self.narrow = nn.Sequential(nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.each(self.widen(x))
        scale = functional.adaptive_avg_pool2d(h, 1)
        scale = self.more(functional.silu(self.less(scale), inplace=True)).sigmoid()
        return x + self.narrow(h * scale)


def efficient_net(device: str) -> Step:
    parts = [nn.Conv2d(3, 16, 3, 2, 1), _Squeezed(16), _Squeezed(16), nn.AdaptiveAvgPool2d(1)]
    model = nn.Sequential(*parts, nn.Flatten(), nn.Linear(16, 10)).to(device)
    x, labels = torch.randn(8, 3, 64, 64, device=device), torch.randint(10, (8,), device=device)
    optimizer = torch.optim.RMSprop(model.parameters(), 0.01, alpha=0.9, eps=1e-3, momentum=0.9)
    return training(
        device, model, lambda: functional.cross_entropy(model(x), labels), optimizer=optimizer
    )


def masked_patches(device: str) -> Step:
    """An autoencoder that sees a quarter of the patches, in an order of its own."""
    patch, layer = nn.Linear(48, 64), nn.TransformerEncoderLayer
    encoder = nn.TransformerEncoder(layer(64, 4, 128, 0.0, batch_first=True), 2)
    decoder = nn.TransformerEncoder(layer(64, 4, 128, 0.0, batch_first=True), 1)
    model = nn.ModuleList([patch, encoder, decoder, nn.Linear(64, 48)]).to(device)
    token = nn.Parameter(torch.zeros(1, 1, 64, device=device))
    places = nn.Parameter(torch.randn(1, 64, 64, device=device))
    x = torch.randn(8, 3, 32, 32, device=device)
    optimizer = torch.optim.AdamW([*model.parameters(), token, places], 1e-3, betas=(0.9, 0.95))

    def loss_of() -> torch.Tensor:
        parts = x.reshape(8, 3, 8, 4, 8, 4).permute(0, 2, 4, 3, 5, 1).reshape(8, 64, 48)
        order = torch.rand(8, 64, device=device).argsort(1)
        back = order.argsort(1)
        h = patch(parts) + places
        seen = h.gather(1, order[:, :16, None].expand(-1, -1, 64))
        h = torch.cat([encoder(seen), token.expand(8, 48, 64)], 1)
        h = h.gather(1, back[..., None].expand(-1, -1, 64)) + places
        hidden = torch.ones(8, 64, device=device)
        hidden[:, :16] = 0
        hidden = hidden.gather(1, back)
        each = (model[3](decoder(h)) - parts).square().mean(-1)
        return (each * hidden).sum() / hidden.sum()

    return training(device, model, loss_of, optimizer=optimizer)


def matched(device: str) -> Step:
    """DETR: queries that are matched to boxes by costs, one after the other."""
    layer = nn.TransformerDecoderLayer(64, 4, 128, batch_first=True)
    decoder, head = nn.TransformerDecoder(layer, 2), nn.Linear(64, 4 + 11)
    queries = nn.Embedding(20, 64)
    model = nn.ModuleList([decoder, head, queries]).to(device)
    memory, boxes = torch.randn(2, 49, 64, device=device), torch.rand(2, 5, 4, device=device)
    labels = torch.randint(10, (2, 5), device=device)

    def loss_of() -> torch.Tensor:
        asked = queries.weight.expand(2, -1, -1)
        places, scores = head(decoder(asked, memory)).split([4, 11], -1)
        costs = torch.cdist(places.sigmoid(), boxes, p=1).detach()
        costs = costs - scores.detach().softmax(-1).gather(2, labels[:, None].expand(-1, 20, -1))
        chosen = []
        for wanted in range(5):
            best = costs[:, :, wanted].argmin(1)
            costs = costs.scatter(1, best[:, None, None].expand(-1, 1, 5), float("inf"))
            chosen.append(best)
        found = torch.stack(chosen, 1)
        near = places.sigmoid().gather(1, found[..., None].expand(-1, -1, 4))
        classes = torch.full((2, 20), 10, device=device).scatter(1, found, labels)
        weight = torch.ones(11, device=device)
        weight[10] = 0.1
        loss = functional.cross_entropy(scores.transpose(1, 2), classes, weight)
        return loss + 5 * functional.l1_loss(near, boxes)

    return training(device, model, loss_of)


def dilated(device: str) -> Step:
    """DeepLab: rates beside each other, a pooled picture, and labels that are ignored."""
    stem = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU())
    rates = nn.ModuleList(
        nn.Sequential(nn.Conv2d(32, 16, 3, padding=r, dilation=r, bias=False), nn.BatchNorm2d(16))
        for r in (1, 2, 4)
    )
    pooled, head = nn.Conv2d(32, 16, 1), nn.Conv2d(64, 21, 1)
    model = nn.ModuleList([stem, rates, pooled, head]).to(device)
    x = torch.randn(2, 3, 64, 64, device=device)
    labels = torch.randint(21, (2, 64, 64), device=device)
    labels[:, :4] = 255

    def loss_of() -> torch.Tensor:
        h = stem(x)
        whole = pooled(h.mean((2, 3), keepdim=True)).expand(-1, -1, 32, 32)
        h = torch.cat([*(rate(h).relu() for rate in rates), whole], 1)
        out = functional.interpolate(head(h), 64, mode="bilinear", align_corners=False)
        return functional.cross_entropy(out, labels, ignore_index=255)

    return training(device, model, loss_of)


def styled(device: str) -> Step:
    """A picture is what is trained, by Gram matrices of features that are frozen."""
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)]
    features = nn.ModuleList(layers).to(device).requires_grad_(False).eval()
    picture = torch.randn(1, 3, 64, 64, device=device, requires_grad=True)
    optimizer = torch.optim.Adam([picture], 0.05)

    def grams(x: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for layer in features:
            x = layer(x).relu()
            rows = x.flatten(2)
            found.append(rows @ rows.transpose(1, 2) / rows.shape[-1])
        return found

    style = grams(torch.randn(1, 3, 64, 64, device=device))

    def step() -> None:
        optimizer.zero_grad()
        near = sum(functional.mse_loss(a, b) for a, b in zip(grams(picture), style, strict=True))
        rough = (picture.diff(dim=2).abs().mean() + picture.diff(dim=3).abs().mean()) * 0.1
        (near + rough).backward()
        optimizer.step()
        with torch.no_grad():
            picture.clamp_(-2, 2)

    return step


class _Dense(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(width + 8 * i, 8, 3, padding=1) for i in range(3))
        self.end = nn.Conv2d(width + 24, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = [x]
        for layer in self.layers:
            found.append(functional.leaky_relu(layer(torch.cat(found, 1)), 0.2, inplace=True))
        return x + 0.2 * self.end(torch.cat(found, 1))


def enlarged(device: str) -> Step:
    """Super-resolution with a loss of frozen features."""
    parts = [nn.Conv2d(3, 16, 3, padding=1), _Dense(16), _Dense(16)]
    model = nn.Sequential(*parts, nn.Conv2d(16, 12, 3, padding=1), nn.PixelShuffle(2)).to(device)
    seen = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)).to(device)
    seen.requires_grad_(False)
    x, wanted = torch.randn(4, 3, 24, 24, device=device), torch.randn(4, 3, 48, 48, device=device)

    def loss_of() -> torch.Tensor:
        out = model(x)
        with torch.no_grad():
            other = seen(wanted)
        return functional.l1_loss(out, wanted) + functional.mse_loss(seen(out), other)

    return training(device, model, loss_of)


def optical_flow(device: str) -> Step:
    """RAFT: all pairs of places, looked up where the flow leads, and a gated update."""
    features, hidden = nn.Conv2d(3, 32, 8, 8), nn.Conv2d(3, 32, 8, 8)
    gates = nn.ModuleList(nn.Conv2d(32 + 9 + 2 + 32, 32, 3, padding=1) for _ in range(3))
    model = nn.ModuleList([features, hidden, gates, nn.Conv2d(32, 2, 3, padding=1)]).to(device)
    one, two = torch.randn(2, 1, 3, 96, 96, device=device)
    wanted = torch.randn(1, 2, 12, 12, device=device)

    def looked_up(pairs: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        near = torch.stack(torch.meshgrid(*[torch.arange(-1, 2, device=device)] * 2, indexing="xy"))
        where = places.permute(0, 2, 3, 1).reshape(144, 1, 1, 2) + near.permute(1, 2, 0)
        found = functional.grid_sample(pairs, where / 5.5 - 1, align_corners=True)
        return found.view(1, 12, 12, 9).permute(0, 3, 1, 2)

    def loss_of() -> torch.Tensor:
        a, b = features(one), features(two)
        pairs = torch.einsum("nchw,ncij->nhwij", a, b).view(144, 1, 12, 12) / math.sqrt(32)
        h, x = hidden(one).tanh(), hidden(one).relu()
        rows = torch.arange(12.0, device=device)
        base = torch.stack(torch.meshgrid(rows, rows, indexing="xy"))[None]
        flow, loss = torch.zeros_like(base), torch.zeros((), device=device)
        for turn in range(3):
            flow = flow.detach()
            given = torch.cat([h, looked_up(pairs, base + flow), flow, x], 1)
            update, reset = gates[0](given).sigmoid(), gates[1](given).sigmoid()
            given = torch.cat([reset * h, given[:, 32:]], 1)
            h = (1 - update) * h + update * gates[2](given).tanh()
            flow = flow + model[3](h)
            loss = loss + 0.8 ** (2 - turn) * (flow - wanted).abs().mean()
        return loss

    return training(device, model, loss_of)


def hashed_grid(device: str) -> Step:
    """Instant-NGP: corners of cells at several levels are looked up by their hash."""
    table = nn.Parameter(torch.rand(4, 4096, 2, device=device) * 1e-4)
    head = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3)).to(device)
    corners = torch.tensor([[i >> 2 & 1, i >> 1 & 1, i & 1] for i in range(8)], device=device)
    primes = torch.tensor([1, 2654435761, 805459861], device=device)
    optimizer = torch.optim.Adam([table, *head.parameters()], 1e-2, eps=1e-15)
    wanted = torch.rand(1024, 3, device=device)

    def loss_of() -> torch.Tensor:
        x, found = torch.rand(1024, 3, device=device), []
        for level in range(4):
            scaled = x * (16 * 2**level)
            cell = scaled.floor()
            share = (scaled - cell)[:, None]
            at = cell.long()[:, None] + corners
            mixed = at * primes
            places = (mixed[..., 0] ^ mixed[..., 1] ^ mixed[..., 2]) % 4096
            weight = torch.where(corners.bool(), share, 1 - share).prod(-1)
            found.append((table[level][places] * weight[..., None]).sum(1))
        return functional.huber_loss(head(torch.cat(found, -1)).sigmoid(), wanted)

    return training(device, head, loss_of, optimizer=optimizer)


def splatted(device: str) -> Step:
    """Gaussians that are painted on a picture, from the front to the back."""
    parts = {
        "places": torch.rand(200, 3, device=device) * 32,
        "scales": torch.zeros(200, 2, device=device),
        "colors": torch.rand(200, 3, device=device),
        "opacity": torch.zeros(200, device=device),
    }
    given = {name: nn.Parameter(value) for name, value in parts.items()}
    optimizer = torch.optim.Adam([{"params": [p], "lr": 1e-2} for p in given.values()])
    wanted = torch.rand(32, 32, 3, device=device)
    rows = torch.arange(32.0, device=device)
    pixels = torch.stack(torch.meshgrid(rows, rows, indexing="ij"), -1).view(-1, 1, 2)

    def step() -> None:
        order = given["places"][:, 2].argsort()
        places, colors = given["places"][order], given["colors"][order]
        scales, opacity = given["scales"][order].exp(), given["opacity"][order].sigmoid()
        apart = (pixels - places[:, :2]) / scales
        alpha = (opacity * torch.exp(-0.5 * apart.square().sum(-1))).clamp(max=0.99)
        left = torch.cumprod(1 - alpha, 1)
        weight = alpha * torch.cat([torch.ones_like(left[:, :1]), left[:, :-1]], 1)
        loss = (torch.einsum("pg,gc->pc", weight, colors).view(32, 32, 3) - wanted).abs().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


def byol(device: str) -> Step:
    def tower() -> nn.Sequential:
        layers = [nn.Conv2d(3, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(3600, 64), nn.BatchNorm1d(64), nn.ReLU())

    online = tower().to(device)
    behind = copy.deepcopy(online).requires_grad_(False)
    guess = nn.Linear(64, 64).to(device)
    x, y = torch.randn(2, 16, 3, 32, 32, device=device)
    optimizer = torch.optim.SGD([*online.parameters(), *guess.parameters()], 0.1, momentum=0.9)

    def loss_of() -> torch.Tensor:
        with torch.no_grad():
            a, b = behind(x), behind(y)
        one = functional.cosine_similarity(guess(online(x)), b, dim=-1)
        two = functional.cosine_similarity(guess(online(y)), a, dim=-1)
        return (4 - 2 * one - 2 * two).mean()

    @torch.no_grad()
    def follow(_: torch.Tensor) -> None:
        for kept, learned in zip(behind.parameters(), online.parameters(), strict=True):
            kept.mul_(0.99).add_(learned, alpha=0.01)

    return training(device, online, loss_of, follow, optimizer)


def queued(device: str) -> Step:
    """MoCo: keys of batches before are in a queue."""
    online = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 64)).to(device)
    behind = copy.deepcopy(online).requires_grad_(False)
    queue = functional.normalize(torch.randn(64, 1024, device=device), dim=0)
    place = torch.zeros(1, dtype=torch.long)
    x, y = torch.randn(2, 128, 256, device=device)

    def loss_of() -> torch.Tensor:
        asked = functional.normalize(online(x), dim=1)
        with torch.no_grad():
            for kept, learned in zip(behind.parameters(), online.parameters(), strict=True):
                kept.data = kept.data * 0.999 + learned.data * 0.001
            key = functional.normalize(behind(y), dim=1)
        right = torch.einsum("nc,nc->n", asked, key)[:, None]
        wrong = torch.einsum("nc,ck->nk", asked, queue.clone().detach())
        logits = torch.cat([right, wrong], 1) / 0.07
        loss = functional.cross_entropy(logits, torch.zeros(128, dtype=torch.long, device=device))
        begin = int(place)
        queue[:, begin : begin + 128] = key.t()
        place[0] = (begin + 128) % 1024
        return loss

    return training(device, online, loss_of)


def decorrelated(device: str) -> Step:
    """VICReg: variance, invariance and covariance."""
    layers = [nn.Linear(128, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 256)]
    model = nn.Sequential(*layers).to(device)
    x, y = torch.randn(2, 64, 128, device=device)

    def loss_of() -> torch.Tensor:
        found = [model(part) for part in (x, y)]
        loss = 25 * functional.mse_loss(*found)
        for part in found:
            rows = part - part.mean(0)
            loss = loss + 25 * functional.relu(1 - (rows.var(0) + 1e-4).sqrt()).mean() / 2
            shared = rows.t() @ rows / 63
            off = shared.flatten()[:-1].view(255, 257)[:, 1:].flatten()
            loss = loss + off.square().sum() / 256
        return loss

    return training(device, model, loss_of)


_BUILT = {
    "ConvNeXt": conv_next,
    "U-Net, Dice": segmented,
    "RetinaNet": detected,
    "deformable convolution": deformed,
    "video": video,
    "GAN, spectral norms": adversarial,
    "WGAN of pictures": penalized,
    "EfficientNet": efficient_net,
    "masked autoencoder": masked_patches,
    "DETR": matched,
    "DeepLab": dilated,
    "style of a picture": styled,
    "super-resolution": enlarged,
    "optical flow": optical_flow,
    "hashed grid": hashed_grid,
    "splatting": splatted,
    "BYOL": byol,
    "MoCo": queued,
    "VICReg": decorrelated,
}
VISION = on_both(_BUILT)
