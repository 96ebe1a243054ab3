"""More shared workloads: ``transformers`` models, compiled models, function transforms.

They cost more to import or to compile than the others, or say by hand what no hook can see.
`all_workloads` returns all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.workloads import (
    BASIC,
    Body,
    Classifier,
    Declarations,
    Workload,
    batch,
    mlp,
    train_step,
)
from benchmarks.workloads_autograd import AUTOGRAD, Checkpointed


def _language_model(see: Declarations, make: Callable[[Any], nn.Module], **inputs: int) -> Body:
    """One AdamW step on random tokens; ``inputs`` gives the length of each input by name."""
    import transformers

    torch.manual_seed(0)
    model = see.model(make(transformers))
    optimizer = see.optimizer(torch.optim.AdamW(model.parameters(), foreach=False))
    tokens = {
        name: see.input(torch.randint(0, 512, (2, length))) for name, length in inputs.items()
    }

    def body() -> None:
        model(**tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return body


def gpt2(see: Declarations) -> Body:
    return _language_model(
        see,
        lambda t: t.GPT2LMHeadModel(
            t.GPT2Config(vocab_size=512, n_positions=64, n_embd=64, n_layer=2, n_head=4)
        ),
        input_ids=64,
        labels=64,
    )


def llama(see: Declarations) -> Body:
    return _language_model(
        see,
        lambda t: t.LlamaForCausalLM(
            t.LlamaConfig(
                vocab_size=512,
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
            )
        ),
        input_ids=64,
        labels=64,
    )


def bert(see: Declarations) -> Body:
    return _language_model(
        see,
        lambda t: t.BertForMaskedLM(
            t.BertConfig(
                vocab_size=512,
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=4,
            )
        ),
        input_ids=64,
        labels=64,
    )


def t5(see: Declarations) -> Body:
    return _language_model(
        see,
        lambda t: t.T5ForConditionalGeneration(
            t.T5Config(
                vocab_size=512,
                d_model=64,
                d_kv=16,
                d_ff=128,
                num_layers=2,
                num_heads=4,
                decoder_start_token_id=0,
            )
        ),
        input_ids=64,
        labels=48,
    )


def _compiled(see: Declarations, backend: str, model: nn.Module, *shape: int) -> Body:
    torch.manual_seed(0)
    torch._dynamo.reset()
    see.model(model)
    compiled: Any = torch.compile(model, backend=backend)
    optimizer = see.optimizer(torch.optim.AdamW(model.parameters(), foreach=False))
    x, y = batch(see, *shape)

    def body() -> None:
        train_step(compiled, optimizer, x, y)

    body()
    return body


def inductor_mlp(see: Declarations) -> Body:
    return _compiled(see, "inductor", mlp(), 64, 128)


def inductor_transformer(see: Declarations) -> Body:
    return _compiled(see, "inductor", Classifier(dropout=0.0), 8, 32, 64)


def inductor_checkpoint(see: Declarations) -> Body:
    return _compiled(see, "inductor", Checkpointed(use_reentrant=False), 256, 128)


def inductor_forward(see: Declarations) -> Body:
    """Inference: compiled code names none of the parameters that it reads."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = see.model(Classifier().eval())
    compiled: Any = torch.compile(model)
    x, _ = batch(see, 8, 32, 64)

    def body() -> None:
        with torch.no_grad():
            compiled(x)

    body()
    return body


def aot_eager_transformer(see: Declarations) -> Body:
    return _compiled(see, "aot_eager", Classifier(dropout=0.0), 8, 32, 64)


def _loss(
    see: Declarations, weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """Two layers by hand: tanh and the matrix products keep their results and their inputs."""
    hidden = see.kept(torch.tanh(x @ weights["w1"]))
    logits = hidden @ weights["w2"]
    # The gradient of log_softmax needs its result.
    log_probabilities = see.kept(functional.log_softmax(logits, dim=-1))
    return functional.nll_loss(log_probabilities, y)


def _weights(see: Declarations) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "w1": see.parameter(torch.randn(128, 256) / 16),
        "w2": see.parameter(torch.randn(256, 10) / 16),
    }


def func_grad(see: Declarations) -> Body:
    weights = _weights(see)
    x, y = batch(see, 64, 128)

    def body() -> None:
        gradients = torch.func.grad(functools.partial(_loss, see))(weights, x, y)
        for gradient in gradients.values():
            see.gradient(gradient)

    return body


def per_sample_gradients(see: Declarations) -> Body:
    """``vmap`` of ``func.grad``: one gradient for each sample."""
    weights = _weights(see)
    x, y = batch(see, 32, 128)

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return _loss(see, weights, x, y)

    def body() -> None:
        gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weights, x, y)
        for gradient in gradients.values():
            see.gradient(gradient)

    return body


MODELS: tuple[Workload, ...] = (gpt2, llama, bert, t5)
COMPILED: tuple[Workload, ...] = (
    inductor_mlp,
    inductor_transformer,
    inductor_checkpoint,
    inductor_forward,
    aot_eager_transformer,
)
# Saved-tensor hooks must not be active in these.
TRANSFORMS: tuple[Workload, ...] = (func_grad, per_sample_gradients)


def all_workloads() -> tuple[Workload, ...]:
    return (*BASIC, *AUTOGRAD, *MODELS, *COMPILED, *TRANSFORMS)
