"""A convolutional classifier for scikit-learn's bundled 8x8 pictures of handwritten digits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional


def read_pictures(device: str) -> tuple[Tensor, Tensor]:
    """Return 1792 pictures, float32 of shape (1792, 1, 8, 8), and their digits, int64."""
    pictures, digits = load_digits(return_X_y=True)
    images = torch.from_numpy(pictures[:1792]).float().div(16).view(-1, 1, 8, 8)
    return images.to(device), torch.from_numpy(digits[:1792]).long().to(device)


def batches(images: Tensor, digits: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of one size; what does not fill the last one is left out."""
    for start in range(0, len(images) - size + 1, size):
        yield images[start : start + size], digits[start : start + size]


def block(channels_in: int, channels_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
    )


class Classifier(nn.Module):
    def __init__(self, channels: int = 32) -> None:
        super().__init__()
        self.features = nn.Sequential(
            block(1, channels),
            block(channels, channels),
            nn.MaxPool2d(2),
            block(channels, 2 * channels),
            block(2 * channels, 2 * channels),
            nn.AdaptiveAvgPool2d(1),
        )
        self.head = nn.Linear(2 * channels, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).flatten(1))


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, digits: Tensor
) -> float:
    """Take one step and return its loss, as a number that keeps nothing alive."""
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(images), digits)
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.inference_mode()
def accuracy(model: nn.Module, images: Tensor, digits: Tensor, size: int = 256) -> float:
    """Return the share of digits that are recognised; the model is left in evaluation mode."""
    model.eval()
    correct = [(model(x).argmax(1) == y).sum() for x, y in batches(images, digits, size)]
    return sum(count.item() for count in correct) / (len(correct) * size)
