"""The residual blocks that several examples train: large enough to measure, and quick on a CPU."""

import torch
from torch import nn

TOKENS, WIDTH = 256, 64
ROW_BYTES = TOKENS * WIDTH * 4
"""What one tensor between two blocks takes, in fp32."""


class Block(nn.Module):
    """``x + narrow(gelu(wide(x)))``: what autograd keeps of it is 9 times its input."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(nn.functional.gelu(self.wide(x)))


def inputs(device: str) -> torch.Tensor:
    return torch.ones(TOKENS, WIDTH, device=device)
