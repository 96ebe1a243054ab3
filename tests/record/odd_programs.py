"""Small programs that do with tensors what few others do; see peaks_unprofiled.py."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad, grad_and_value, jvp, vmap
from torch.utils.checkpoint import checkpoint

functional = nn.functional


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))


def checkpoints_within_checkpoints() -> None:
    inner, outer = mlp(), mlp()

    def both(x: torch.Tensor) -> torch.Tensor:
        kept: torch.Tensor = outer(checkpoint(inner, x, use_reentrant=False))
        return kept

    x = torch.ones(16, 64, requires_grad=True)
    checkpoint(both, x, use_reentrant=False).sum().backward()
    checkpoint(mlp(), x, use_reentrant=True).sum().backward()


def sparse_tensors() -> None:
    indices = torch.arange(200).view(2, 100)
    values = torch.ones(100, requires_grad=True)
    matrix = torch.sparse_coo_tensor(indices, values, (200, 200)).coalesce()
    torch.sparse.mm(matrix, torch.ones(200, 32)).sum().backward()
    (torch.eye(200).to_sparse_csr() @ torch.ones(200, 30)).sum()


def a_sparse_gradient() -> None:
    table = nn.Embedding(500, 16, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    table(torch.arange(32) % 20).sum().backward()
    optimizer.step()


def jagged_tensors() -> None:
    parts = [torch.ones(length, 32) for length in (3, 50, 17)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    torch.relu(nn.Linear(32, 64)(nested)).values().sum().backward()
    (torch.nested.nested_tensor(parts) * 2).to_padded_tensor(0.0)


class _KeepsAStorage(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.storage, ctx.others = (x * 3).untyped_storage(), [x.exp()]
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        scale: torch.Tensor = torch.empty(0).set_(ctx.storage)[:1]
        result: torch.Tensor = gradient * scale + ctx.others[0]
        return result


def a_function_that_keeps_a_storage() -> None:
    x = torch.ones(3000, requires_grad=True)
    _KeepsAStorage.apply(x).sum().backward()


def complex_numbers() -> None:
    x = torch.ones(64, 64, requires_grad=True)
    waves = torch.fft.rfft2(x)
    torch.fft.irfft2(waves * waves.conj()).sum().backward()


def optimizers_of_all_kinds() -> None:
    model = mlp()
    kinds: tuple[Callable[[Any], torch.optim.Optimizer], ...] = (
        lambda p: torch.optim.Adam(p, foreach=True, amsgrad=True),
        lambda p: torch.optim.AdamW(p, fused=True),
        lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
        torch.optim.Adafactor,
    )
    for kind in kinds:
        optimizer = kind(model.parameters())
        for _ in range(2):
            model(torch.ones(4, 64)).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


def a_step_within_the_backward_pass() -> None:
    model = mlp()
    handles = []
    for weight in model.parameters():
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)

        def step(_: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        handles.append(weight.register_post_accumulate_grad_hook(step))
    for _ in range(2):
        model(torch.ones(8, 64)).sum().backward()
    for handle in handles:
        handle.remove()


class _Subclass(torch.Tensor):
    pass


def a_subclass() -> None:
    x = torch.ones(5000).as_subclass(_Subclass).requires_grad_()
    (x * 2).relu().sum().backward()


def storages_that_move() -> None:
    x = torch.ones(5000)
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(20_000)
    other = torch.empty(0).set_(x.untyped_storage())
    other.fill_(1)
    x.set_(torch.ones(100))  # type: ignore[call-overload]
    model = mlp()
    kept = [weight.detach().clone() for weight in model.parameters()]
    for weight in model.parameters():
        weight.untyped_storage().resize_(0)
    for weight, copied in zip(model.parameters(), kept, strict=True):
        weight.untyped_storage().resize_(copied.nbytes)
        weight.data.copy_(copied)


def files_and_copies() -> None:
    buffer = io.BytesIO()
    torch.save(mlp().state_dict(), buffer)
    buffer.seek(0)
    model = mlp()
    model.load_state_dict(torch.load(buffer), assign=True)
    copy.deepcopy(model)(torch.ones(2, 64))
    numbers = torch.ones(5000).numpy()
    numbers += 1


def functions_without_state() -> None:
    model, x = mlp(), torch.ones(8, 64)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    slopes, _ = grad_and_value(lambda w: functional_call(model, w, (x,)).square().mean())(weights)
    weights = {name: weight - slopes[name] for name, weight in weights.items()}
    vmap(grad(lambda row: functional_call(model, weights, (row[None],)).sum()))(x)
    jvp(model, (x,), (x,))


def saved_tensors_elsewhere() -> None:
    pack: tuple[Callable[[Any], Any], Callable[[Any], Any]] = (
        torch.Tensor.half,
        torch.Tensor.float,
    )
    with torch.autograd.graph.saved_tensors_hooks(*pack):
        mlp()(torch.ones(16, 64)).sum().backward()
    with torch.autograd.graph.save_on_cpu():
        mlp()(torch.ones(16, 64)).sum().backward()


def modules_from_nothing() -> None:
    with torch.device("meta"):
        model = mlp()
    model.to_empty(device="cpu")
    for weight in model.parameters():
        nn.init.zeros_(weight)
    lazy = nn.Sequential(nn.LazyLinear(64), nn.LazyBatchNorm1d())
    lazy(model(torch.ones(4, 64))).sum().backward()


def converted_modules() -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        mlp().double()(torch.ones(2, 64, dtype=torch.double)).sum().backward()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


warnings.filterwarnings("ignore", message=".*(Sparse CSR|nested tensors|prototype).*")

ODD_PROGRAMS: tuple[Callable[[], None], ...] = (
    checkpoints_within_checkpoints,
    sparse_tensors,
    a_sparse_gradient,
    jagged_tensors,
    a_function_that_keeps_a_storage,
    complex_numbers,
    optimizers_of_all_kinds,
    a_step_within_the_backward_pass,
    a_subclass,
    storages_that_move,
    files_and_copies,
    functions_without_state,
    saved_tensors_elsewhere,
    modules_from_nothing,
    converted_modules,
)
