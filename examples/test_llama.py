"""What a step and a generation with the Llama of llama.py may cost."""

import pytest
import torch
from llama import CONFIG, build_model, generate, random_tokens, score, training_loss

ROWS, LENGTH = 4, 128


@pytest.fixture
def model(torchmem):
    return build_model().to(torchmem.device)


@pytest.fixture
def tokens(torchmem):
    return random_tokens(ROWS, LENGTH, torchmem.device)


def cache_bytes(length):
    """Keys and values of every layer in bfloat16."""
    heads, width = CONFIG.num_key_value_heads, CONFIG.hidden_size // CONFIG.num_attention_heads
    return 2 * CONFIG.num_hidden_layers * ROWS * heads * length * width * 2


@pytest.mark.memory_budget("96MiB", gradient="10MiB", retained="10MiB")
@pytest.mark.memory_baseline
def test_forward_and_backward(torchmem, model, tokens):
    with torchmem.measure("forward") as forward:
        loss = training_loss(model, tokens)
    with torchmem.measure("backward") as backward:
        loss.backward()
    torchmem.check(forward)
    torchmem.check(backward)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    assert backward.retained.gradient == weights


@pytest.mark.memory_budget("64MiB", growth="0B", warmup=1)
@pytest.mark.memory_baseline
def test_training_steps_do_not_grow(torchmem, model, tokens):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in torchmem.steps(3, warmup=1):
        training_loss(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.memory_budget(temporary="8MiB", unknown="0B", retained="0B")
@pytest.mark.memory_baseline(floor="128KiB")
def test_scoring_keeps_no_logits_but_the_last(model, tokens):
    model.eval()
    assert score(model, tokens).shape == (ROWS, CONFIG.vocab_size)


@pytest.mark.memory_budget(temporary=lambda: 2 * cache_bytes(LENGTH) + 2 * 2**20)
@pytest.mark.memory_baseline(floor="128KiB")
def test_generation_holds_little_more_than_its_cache(model, tokens):
    model.eval()
    prompt = tokens[:, : LENGTH - 24]
    assert generate(model, prompt, 24).shape == (ROWS, LENGTH)
