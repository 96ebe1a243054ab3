"""A tiny Llama of Hugging Face transformers, built from a configuration: nothing is downloaded."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = LlamaConfig(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=688,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=256,
    attn_implementation="sdpa",
)


def build_model(dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    """Return the model with random weights, the same ones each time."""
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).to(dtype)


def random_tokens(rows: int, length: int, device: str) -> Tensor:
    """Return tokens, int64 of shape (rows, length), the same ones each time."""
    generator = torch.Generator().manual_seed(0)
    shape = (rows, length)
    return torch.randint(CONFIG.vocab_size, shape, generator=generator).to(device)


def training_loss(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """Return the loss of predicting each token from those before it."""
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


@torch.inference_mode()
def score(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """Return the logits of the token after each row: shape (rows, vocabulary)."""
    return model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits[:, -1]


def generate(model: LlamaForCausalLM, tokens: Tensor, count: int) -> Tensor:
    """Return ``tokens`` with exactly ``count`` tokens appended to each row."""
    return model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        min_new_tokens=count,
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )
