"""A small GPT that learns the Python standard library's own sources, byte by byte."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256
TEXT_BYTES = 2**20


@dataclass(frozen=True)
class Config:
    """Sizes of the model; the defaults train on a laptop."""

    context: int = 128
    width: int = 192
    heads: int = 6
    layers: int = 4


def read_text(size_bytes: int = TEXT_BYTES) -> Tensor:
    """Return the first ``size_bytes`` of the standard library's sources: uint8, shape (N,).

    The length is the same for every Python version, so that memory does not depend on it. Raises
    `FileNotFoundError` where the sources are not installed.
    """
    text = bytearray()
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += file.read_bytes()
        if len(text) >= size_bytes:
            return torch.frombuffer(text[:size_bytes], dtype=torch.uint8)
    raise FileNotFoundError("this Python comes without the sources of its standard library")


def sample_batch(text: Tensor, size: int, context: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return tokens and the token that follows each: int64, shape (size, context) both."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - context - 1, (size, 1), generator=generator)
    window = text[starts + torch.arange(context + 1)].long()
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = (batch, length, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(x).view(shape).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm_2 = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    logits = model(tokens)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor
) -> float:
    """Take one step and return its loss, as a number that keeps nothing alive."""
    loss = next_token_loss(model, tokens, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@torch.inference_mode()
def generate(model: GPT, tokens: Tensor, count: int) -> Tensor:
    """Append the ``count`` most likely tokens to each row of ``tokens``."""
    context = model.position.num_embeddings
    for _ in range(count):
        logits = model(tokens[:, -context:])
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], dim=1)
    return tokens
