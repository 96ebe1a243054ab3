"""What training and sampling the GPT of gpt.py may cost."""

import pytest
import torch
from gpt import GPT, Config, generate, next_token_loss, read_text, sample_batch, train_step

from pytest_torchmem import MiB

BATCH = 8
CONFIG = Config()


@pytest.fixture(scope="module")
def text():
    return read_text()


@pytest.fixture
def model(torchmem):
    torch.manual_seed(0)
    return GPT(CONFIG).to(torchmem.device)


@pytest.fixture
def optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-4)


@pytest.fixture
def batches(text, torchmem):
    """Four batches on the device, each a pair of tokens and targets."""
    pairs = [sample_batch(text, BATCH, CONFIG.context, seed) for seed in range(4)]
    return [(tokens.to(torchmem.device), targets.to(torchmem.device)) for tokens, targets in pairs]


@pytest.mark.memory_budget("128MiB", growth="0B", warmup=1)
@pytest.mark.memory_baseline
def test_training_fits_its_budget_and_does_not_grow(torchmem, model, optimizer, batches):
    losses = [train_step(model, optimizer, *batches[step]) for step in torchmem.steps(4)]
    assert losses[-1] < losses[0]


@pytest.mark.memory_budget(activation="64MiB")
def test_forward_and_backward_each_have_a_baseline(torchmem, model, batches):
    tokens, targets = batches[0]
    with torchmem.measure("forward") as forward:
        loss = next_token_loss(model, tokens, targets)
    with torchmem.measure("backward") as backward:
        loss.backward()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    assert backward.retained.gradient == weights
    assert forward.retained.activation > 20 * MiB
    torchmem.check(forward)
    torchmem.check(backward)


@pytest.mark.memory_budget(temporary="8MiB", activation=None)
@pytest.mark.memory_baseline(tolerance="1%", floor="64KiB")
def test_generation_keeps_one_layer_at_a_time(torchmem, model, batches):
    prompt = batches[0][0][:, :16]
    assert generate(model, prompt, count=8).shape == (BATCH, 24)
