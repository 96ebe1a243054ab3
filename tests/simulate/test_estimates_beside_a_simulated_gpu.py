"""Estimates for CUDA as on a machine without a GPU, beside what a simulated GPU measures."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from pytest_torchmem import Category, estimate, measure
from pytest_torchmem.record.torch_api import fake_tensors

pytestmark = pytest.mark.usefixtures("gpu")

SCALARS = 512


def gradient_penalty(device):
    """Nodes of second derivatives wait beside those of the forward pass."""
    parts = [nn.Linear(64, 128), nn.LeakyReLU(), nn.Linear(128, 128), nn.LeakyReLU()]
    critic = nn.Sequential(*parts, nn.Linear(128, 1)).to(device)
    real, made = torch.randn(2, 32, 64, device=device)

    def step():
        critic.zero_grad()
        mixed = (real + made).requires_grad_()
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        (critic(made).mean() - critic(real).mean() + slope.norm(dim=1).mean()).backward()

    return step


def bias_by_position(device):
    """The last dimension of the bias has a stride, with which no fused attention reads it."""
    layer, table = nn.Linear(64, 192).to(device), nn.Embedding(95, 4).to(device)
    x = torch.randn(2, 48, 64, device=device)
    places = torch.arange(48, device=device)

    def step():
        layer.zero_grad()
        table.zero_grad()
        query, key, value = layer(x).view(2, 48, 3, 4, 16).permute(2, 0, 3, 1, 4)
        bias = table(places - places[:, None] + 47).permute(2, 0, 1)[None]
        made = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        made.square().sum().backward()

    return step


def physics_informed(device):
    """The backward passes of a step make more nodes than its forward pass.

    So the thread of the GPU has made more, after some steps.
    """
    y = one = torch.ones((), device=device, requires_grad=True)
    for _ in range(20_000 if device == "cuda" else 1):
        y = y * one
    torch.autograd.grad(y, one, create_graph=True)
    parts = [nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)]
    model = nn.Sequential(*parts).to(device)
    points = torch.rand(256, 2, device=device)

    def step():
        model.zero_grad()
        z = points.clone().requires_grad_()
        u = model(z)
        (slope,) = torch.autograd.grad(u.sum(), z, create_graph=True)
        (bend,) = torch.autograd.grad(slope[:, :1].sum(), z, create_graph=True)
        (slope[:, 1:] + u * slope[:, :1] - 0.01 * bend[:, :1]).square().mean().backward()

    return step


def masks_of_lengths(device):
    """Rows of a mask are padded where one does not begin at a multiple of eight numbers."""
    layer, x = nn.Linear(64, 192).to(device), torch.randn(4, 60, 64, device=device)

    def step():
        layer.zero_grad()
        losses = []
        for length in (40, 44, 60):
            query, key, value = layer(x).view(4, 60, 3, 4, 16).permute(2, 0, 3, 1, 4)
            hidden = torch.zeros(4, 1, 60, 60, dtype=torch.bool, device=device)[..., :length]
            # A mask of numbers is laid out anew, and so has rows of its own length.
            given = query, key[:, :, :length], value[:, :, :length]
            made = functional.scaled_dot_product_attention(*given, attn_mask=~hidden)
            losses.append(made.square().sum())
        sum(losses).backward()

    return step


def bags(device):
    """Sums and means have no largest row to keep."""
    layers = nn.ModuleList(nn.EmbeddingBag(50, 8, mode=m) for m in ("sum", "mean", "max"))
    layers.to(device)
    rows = torch.arange(4096, device=device) % 50
    begins = torch.arange(0, 4096, 4, device=device)

    def step():
        layers.zero_grad()
        sum(layer(rows, begins).square().sum() for layer in layers).backward()

    return step


def saved_on_the_host(device):
    """What is saved is nowhere on the GPU until its backward is there."""
    parts = [nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1)]
    model, x = nn.Sequential(*parts).to(device), torch.randn(512, 64, device=device)

    def step():
        model.zero_grad()
        with torch.autograd.graph.save_on_cpu():
            loss = model(x).square().mean()
        loss.backward()

    return step


def preferences(device):
    """The logarithm of a sigmoid keeps nothing beside its input."""
    model, x = nn.Linear(64, 256).to(device), torch.randn(512, 64, device=device)

    def step():
        model.zero_grad()
        functional.logsigmoid(model(x)).mean().backward()

    return step


def one_head_of_keys(device):
    """No fused attention takes keys whose heads are broadcast."""
    layer, x = nn.Linear(64, 96).to(device), torch.randn(4, 60, 64, device=device)

    def step():
        layer.zero_grad()
        query, key, value = layer(x).split([64, 16, 16], -1)
        query = query.view(4, 60, 4, 16).transpose(1, 2)
        made = functional.scaled_dot_product_attention(query, key[:, None], value[:, None])
        made.square().sum().backward()

    return step


PROGRAMS = [
    gradient_penalty,
    bias_by_position,
    physics_informed,
    masks_of_lengths,
    bags,
    one_head_of_keys,
    preferences,
    saved_on_the_host,
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_cpu_stands_for_a_gpu(program, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    step = program("cuda")
    step()
    with measure(device="cuda") as window:
        step()
    peak = window.result.peak
    step = program("cpu")
    step()
    monkeypatch.setattr(fake_tensors, "lacks_device", lambda kind: kind == "cuda")
    estimated = estimate(step, backward=False, device="cuda").peak.total
    assert abs(estimated - peak.total + peak.at_peak[Category.WORKSPACE]) <= SCALARS


def test_the_rules_of_fake_tensors_run_in_the_thread_of_a_gpu_that_is_there():
    model, x = nn.Linear(64, 64).to("cuda"), torch.randn(32, 64, device="cuda")

    def step():
        model.zero_grad()
        model(x).square().mean().backward()

    # Some rules are other operators, which run once in a process.
    fake_tensors.FakeTensorMode.cache_clear()
    estimated = estimate(step, backward=False).peak.by_category
    step()
    with measure(device="cuda") as window:
        step()
    # Workspaces move the moment of the peak; each category's own is where it was.
    measured = window.result.peak.by_category
    for category in set(Category) - {Category.WORKSPACE}:
        assert abs(estimated[category] - measured[category]) <= SCALARS
