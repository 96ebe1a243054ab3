"""An estimate for a GPU of a program that keeps some of its tensors on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import grad, vmap
from torch.nn import functional

from pytest_torchmem import estimate
from pytest_torchmem.analysis.estimated.static import largest_possible
from pytest_torchmem.record.torch_api import fake_tensors

SCALARS = 512

model = nn.Linear(64, 256)
buffer = torch.randn(4000, 64)
episodes = [torch.randn(64) for _ in range(500)]


@pytest.fixture(autouse=True)
def _for_a_gpu_that_is_not_there():
    if not fake_tensors.lacks_device("cuda"):
        pytest.skip("there is a CUDA device, so nothing stands in for it")


def step(batch):
    model.zero_grad()
    model(batch).square().mean().backward()


def rows_of_a_buffer():
    step(buffer[torch.randint(0, 4000, (128,))].to("cpu"))


def stacked_episodes():
    step(torch.stack(episodes[:128]).to(device="cpu"))


def cast_as_it_is_moved():
    step(torch.stack(episodes[:128]).double().to("cpu", torch.float32))


@pytest.mark.parametrize(
    ("program", "elsewhere"),
    [
        (rows_of_a_buffer, buffer.nbytes),
        (stacked_episodes, 128 * 64 * 4),
        (cast_as_it_is_moved, 128 * 64 * 4),
    ],
)
def test_what_a_moved_tensor_is_made_of_is_in_the_upper_end_alone(program, elsewhere):
    there = estimate(step, torch.empty(128, 64), device="cuda", backward=False)
    result = estimate(program, device="cuda", backward=False)
    assert abs(result.peak.total - there.peak.total) <= SCALARS
    assert abs(largest_possible(result.run) - there.peak.total - elsewhere) <= SCALARS
    assert any("what the program moves to its device" in words for words in result.blind_spots)


def test_what_parameters_made_is_on_the_device_already():
    def program():
        return model(buffer).detach().to("cpu").square()

    result = estimate(program, device="cuda", backward=False)
    assert largest_possible(result.run) == result.peak.total
    assert result.peak.total >= buffer.nbytes


def test_bags_on_a_gpu_know_which_bag_each_row_is_of():
    bags, rows = nn.EmbeddingBag(100, 8, mode="sum"), torch.arange(6400) % 100
    offsets = torch.arange(0, 6400, 64)

    def made(device):
        run = estimate(lambda: bags(rows, offsets), device=device, backward=False).run
        return sum(storage.size_bytes for storage in run.graph.storages)

    # The CPU alone has the row of the largest for each bag, for sums as well.
    assert made("cuda") - made("cpu") == rows.nbytes - offsets.nbytes


def test_attention_of_16_bits_with_a_mask_is_an_interval():
    x = torch.randn(2, 4, 64, 64, dtype=torch.bfloat16, requires_grad=True)
    mask = torch.ones(64, 64, dtype=torch.bool).tril()

    def program():
        functional.scaled_dot_product_attention(x, x, x, attn_mask=mask).sum().backward()

    result = estimate(program, device="cuda", backward=False)
    assert largest_possible(result.run) > result.peak.total * 1.05


def test_a_tensor_within_a_transform_is_moved_as_any_other():
    def loss_of(row):
        return row.to("cpu", torch.float64).square().sum()

    x = torch.randn(16, 64)
    here, there = (
        estimate(lambda: vmap(grad(loss_of))(x), device=device, backward=False).peak.total
        for device in ("cpu", "cuda")
    )
    assert abs(there - here) <= SCALARS
