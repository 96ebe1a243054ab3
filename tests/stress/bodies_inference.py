"""Bodies without a backward pass, and those of ``torch.func``."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch._decomp.decompositions_for_jvp  # else the first forward-mode derivative imports it
import torch._dynamo  # else the first backward under a dispatch mode imports it, in cycles
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

measured = pytest.mark.memory_budget("1GiB")


def mlp(width: int = 32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))


@measured
def test_inference_mode():
    with torch.inference_mode():
        mlp()(torch.ones(16, 32)).softmax(-1)


@measured
@torch.no_grad()
def test_no_grad_around_the_body():
    model = nn.Sequential(mlp(), nn.BatchNorm1d(32), nn.Dropout()).eval()
    model(torch.ones(16, 32))


@measured
def test_attention():
    q, k, v = (torch.ones(2, 4, 32, 16) for _ in range(3))
    scaled_dot_product_attention(q, k, v, is_causal=True)


@measured
def test_a_cache_of_keys_grows_by_concatenation():
    project, keys = nn.Linear(16, 16), torch.empty(0, 16)
    with torch.no_grad():
        for _ in range(5):
            keys = torch.cat([keys, project(torch.ones(1, 16))])


@pytest.fixture(scope="module")
def language_model():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).eval()


@measured
def test_generate(language_model):
    prompt = torch.tensor([[1, 2, 3]])
    language_model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)


@measured
def test_sparse_matrices():
    dense = torch.eye(64)
    rows = dense.to_sparse_coo()
    (rows @ torch.ones(64, 8)).sum()
    (rows + rows).coalesce()


@measured
def test_linear_algebra():
    matrix = torch.ones(32, 32) + torch.eye(32)
    torch.linalg.svd(matrix)
    torch.linalg.solve(matrix, torch.ones(32))
    torch.fft.rfft(matrix)


@measured
def test_data_goes_through_numpy_and_back():
    array = torch.ones(64, 64).numpy() * 2
    torch.from_numpy(array).mul(2).sum()


@measured
def test_a_copy_and_a_file():
    model = mlp()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    copy.deepcopy(model).load_state_dict(torch.load(file))


@measured
def test_storages_that_change_size():
    x = torch.ones(1000)
    x.resize_(5000)
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(20000)
    x.set_(torch.zeros(10))  # type: ignore[call-overload]


@measured
def test_a_view_outlives_its_base():
    kept = [torch.ones(1000)[i : i + 1] for i in range(3)]
    torch.stack(kept)


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@measured
def test_a_dispatch_mode_of_the_users():
    with Counting() as mode:
        x = torch.ones(100, requires_grad=True)
        (x * 2).sum().backward()
    assert mode.count > 3


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@measured
def test_a_function_mode_of_the_users():
    with Doubling():
        torch.ones(100).exp().sum()


@measured
def test_vmap():
    torch.func.vmap(lambda row: row.exp().sum())(torch.ones(16, 32))


@measured
def test_gradients_of_each_sample():
    model = mlp()
    parameters = dict(model.named_parameters())

    def loss(weights, sample):
        return torch.func.functional_call(model, weights, sample).square().sum()

    torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, torch.ones(4, 32))


@measured
def test_forward_and_backward_derivatives():
    x = torch.ones(8)
    torch.func.jacrev(torch.exp)(x)
    torch.func.jacfwd(torch.exp)(x)
    torch.func.hessian(lambda v: v.pow(3).sum())(x)
