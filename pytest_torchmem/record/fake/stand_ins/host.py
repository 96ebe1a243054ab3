"""Keeps off the device what waits on the host: where the CPU stands for it, nothing is moved."""

from __future__ import annotations

from collections.abc import Callable

import torch

from pytest_torchmem.record.patches import Installed
from pytest_torchmem.record.torch_api import autograd

_Kept = tuple[torch.device, torch.Tensor]


def save_on_the_host(patches: Installed) -> None:
    """Let what ``save_on_cpu`` keeps be nowhere on the device until the backward asks for it."""

    def without_moving(_: Callable[..., None]) -> Callable[..., None]:
        def init(self: object, *how: object, **named: object) -> None:
            hooks = torch.autograd.graph.saved_tensors_hooks
            hooks.__init__(self, _packed, _unpacked)  # type: ignore[arg-type]

        return init

    patches.replace(autograd.SAVE_ON_CPU, without_moving)


def _packed(tensor: torch.Tensor) -> _Kept:
    return tensor.device, torch.empty_like(tensor, device="meta")


def _unpacked(kept: _Kept) -> torch.Tensor:
    device, shape = kept
    return torch.empty_like(shape, device=device)
