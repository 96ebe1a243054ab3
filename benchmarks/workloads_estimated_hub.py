"""Small models of transformers that differ in how they attend, for an estimate, on both devices."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from workloads_estimated import Step, on_both, training

_SIZES = {
    "vocab_size": 200,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}


def of_text(device: str, kind: str, head: str, sizes: Mapping[str, Any]) -> Step:
    import transformers

    model = getattr(transformers, f"{kind}{head}")(getattr(transformers, f"{kind}Config")(**sizes))
    model.to(device)
    text = torch.randint(10, 200, (2, 48), device=device)
    seen = torch.ones_like(text)
    return training(
        device, model, lambda: model(input_ids=text, attention_mask=seen, labels=text).loss
    )


def of_pictures(device: str, kind: str, sizes: Mapping[str, Any]) -> Step:
    import transformers

    model = getattr(transformers, f"{kind}ForImageClassification")(
        getattr(transformers, f"{kind}Config")(**sizes)
    ).to(device)
    x, labels = torch.randn(2, 3, 32, 32, device=device), torch.zeros(2, dtype=int, device=device)
    return training(device, model, lambda: model(pixel_values=x, labels=labels).loss)


def clip(device: str) -> Step:
    import transformers

    sizes = {name: size for name, size in _SIZES.items() if name != "vocab_size"}
    config = transformers.CLIPConfig(
        text_config={**_SIZES, "max_position_embeddings": 32},
        vision_config={**sizes, "image_size": 32, "patch_size": 8},
        projection_dim=32,
    )
    model = transformers.CLIPModel(config).to(device)
    x, text = torch.randn(4, 3, 32, 32, device=device), torch.randint(10, 190, (4, 16))
    text = text.to(device)
    return training(
        device, model, lambda: model(input_ids=text, pixel_values=x, return_loss=True).loss
    )


_TEXT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "DistilBERT": (
        "DistilBert",
        "ForMaskedLM",
        {"vocab_size": 200, "dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4},
    ),
    "ALBERT": ("Albert", "ForMaskedLM", {**_SIZES, "embedding_size": 32}),
    "DeBERTa": ("DebertaV2", "ForMaskedLM", {**_SIZES, "relative_attention": True}),
    "Gemma": ("Gemma", "ForCausalLM", {**_SIZES, "num_key_value_heads": 1, "head_dim": 16}),
    "Phi": ("Phi", "ForCausalLM", _SIZES),
    "Mistral, a window": (
        "Mistral",
        "ForCausalLM",
        {**_SIZES, "num_key_value_heads": 2, "sliding_window": 16},
    ),
    "Bloom": (
        "Bloom",
        "ForCausalLM",
        {"vocab_size": 200, "hidden_size": 64, "n_layer": 2, "n_head": 4},
    ),
    "OPT": ("OPT", "ForCausalLM", {**_SIZES, "ffn_dim": 128, "word_embed_proj_dim": 64}),
    "GPT-NeoX": ("GPTNeoX", "ForCausalLM", _SIZES),
    "Falcon": ("Falcon", "ForCausalLM", _SIZES),
    "ELECTRA": ("Electra", "ForMaskedLM", {**_SIZES, "embedding_size": 32}),
    "RoFormer": ("RoFormer", "ForMaskedLM", _SIZES),
}
_PICTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Swin": (
        "Swin",
        {
            "image_size": 32,
            "patch_size": 2,
            "embed_dim": 24,
            "depths": [1, 1],
            "num_heads": [2, 4],
            "window_size": 4,
        },
    ),
    "BEiT": (
        "Beit",
        {**_SIZES, "image_size": 32, "patch_size": 8, "use_relative_position_bias": True},
    ),
    "PoolFormer": ("PoolFormer", {"depths": [1, 1, 1, 1], "hidden_sizes": [16, 32, 32, 48]}),
}
HUB = on_both(
    {
        **{name: partial(of_text, kind=k, head=h, sizes=s) for name, (k, h, s) in _TEXT.items()},
        **{name: partial(of_pictures, kind=k, sizes=s) for name, (k, s) in _PICTURES.items()},
        "CLIP": clip,
    }
)
