"""A storage that lived before the body leaves its place in the body, while its tensors live on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed._functional_collectives
from torch.distributed.utils import _alloc_storage, _free_storage

from pytest_torchmem import measure

pytestmark = pytest.mark.searches(with_optimizers=True)

KIB = 1024


@pytest.fixture
def device() -> str:
    return "cpu"


def ones(kib: int, device: str | torch.device) -> torch.Tensor:
    return torch.ones(kib * KIB // 4, device=device)


def empty_storage(x: torch.Tensor) -> None:
    x.untyped_storage().resize_(0)


def as_fsdp_does(x: torch.Tensor) -> None:
    _free_storage(x)


def other_storage(x: torch.Tensor) -> None:
    x.set_(torch.empty(0, device=x.device))  # type: ignore[call-overload]


def other_data(x: torch.Tensor) -> None:
    x.data = torch.empty(0, device=x.device)


@pytest.mark.parametrize("free", [empty_storage, as_fsdp_does, other_storage, other_data])
def test_what_was_freed_is_not_there_any_more(free: Callable[..., None], device: str) -> None:
    x = ones(64, device)
    with measure(device=device) as block:
        x.neg_()
        free(x)
        ones(96, device)
    assert block.result.peak.total == 96 * KIB
    assert block.result.retained.total == 0


def test_what_is_gathered_and_freed_again_counts_while_it_is_there(device: str) -> None:
    x = ones(64, device)
    size = x.size()
    _free_storage(x)
    with measure(device=device) as block:
        for _ in range(3):
            _alloc_storage(x, size)
            x.fill_(1)
            _free_storage(x)
            ones(8, device)
    assert block.result.peak.total == 64 * KIB
    assert block.result.retained.total == 0


def resized_storage(x: torch.Tensor) -> None:
    x.untyped_storage().resize_(128 * KIB)


def resized(x: torch.Tensor) -> None:
    x.resize_(128 * KIB // 4)


@pytest.mark.parametrize("resize", [resized_storage, resized])
def test_what_grows_is_copied_and_then_counts_once(
    resize: Callable[..., None], device: str
) -> None:
    x = ones(64, device)
    with measure(device=device) as block:
        x.neg_()
        resize(x)
        ones(32, device)
    assert block.result.peak.total == (64 + 128) * KIB
    assert block.result.retained.total == 128 * KIB
