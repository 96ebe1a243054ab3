"""Programs about tensors themselves: kinds, layouts, storages, files, sharing."""

from __future__ import annotations

import copy
import mmap
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import dlpack

from tests.record.undisturbed.state import prepared, program


@program
def multiplies_sparse_matrices():
    matrix = torch.sparse_coo_tensor(
        torch.tensor([[0, 1, 1], [2, 0, 2]]), torch.ones(3), (2, 3)
    ).coalesce()
    values = matrix.values().requires_grad_()
    again = torch.sparse_coo_tensor(matrix.indices(), values, (2, 3))
    torch.sparse.mm(again, torch.ones(3, 2)).sum().backward()
    return matrix, values.grad, matrix.to_sparse_csr() @ torch.ones(3, 2)


@program
def nests_tensors():
    parts = [torch.ones(n, 4) for n in (2, 3)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    (jagged * 2).values().sum().backward()
    strided = torch.nested.nested_tensor(parts)
    return jagged.grad.values(), strided.to_padded_tensor(0.0)


@program
def shares_with_numpy():
    array = np.arange(6.0)
    tensor = torch.from_numpy(array)
    tensor += 1
    array *= 2
    other = torch.zeros(3)
    other.numpy()[:] = 7
    return array, tensor, other, np.asarray(torch.ones(2)), np.sin(torch.ones(2).numpy())


@program
def exchanges_with_dlpack():
    x = torch.arange(4.0)
    y = torch.from_dlpack(x)
    y += 1
    capsule = dlpack.to_dlpack(x)
    return x, dlpack.from_dlpack(capsule), np.from_dlpack(x)


@program
def maps_a_file():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.bin")
        path.write_bytes(np.arange(8, dtype=np.float32).tobytes())
        x = torch.from_file(str(path), shared=True, size=8)
        x.mul_(2)
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
            y = torch.frombuffer(bytearray(mapped), dtype=torch.float32)
        return x.clone(), y


@program
def saves_and_loads():
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.pt")
        x = torch.randn(4)
        torch.save([x, x[1:], nn.Parameter(x.clone())], path)
        a, b, c = torch.load(path, mmap=True)
        return (
            a.clone(),
            b.clone(),
            c.detach().clone(),
            a.untyped_storage().data_ptr() == (b.untyped_storage().data_ptr()),
        )


@program
def copies():
    x = torch.randn(3, requires_grad=True)
    twin, same = copy.deepcopy([x, x])
    layer = copy.deepcopy(nn.BatchNorm1d(3))
    return copy.copy(x), twin is same, layer.state_dict(), torch.empty_like(x).shape


@program
def shares_between_processes():
    x = torch.ones(4).share_memory_()
    x += 1
    return x, x.is_shared()


@program
def moves_storages():
    x = torch.arange(6.0)
    other = torch.empty(0).set_(x.untyped_storage(), 2, (2, 2), (2, 1))
    x.untyped_storage().resize_(64)
    x.data = torch.ones(2)
    y = torch.zeros(3)
    y.set_(torch.ones(5))  # type: ignore[call-overload]
    y.resize_(2, 2)
    return other.clone(), x, y, x.untyped_storage().nbytes()


@program
def swaps_tensors():
    a, b = torch.ones(2), torch.zeros(3)
    torch.utils.swap_tensors(a, b)
    return a, b


@program
def swaps_the_weights_of_a_module():
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layer = nn.Linear(2, 2)
        held = layer.weight
        layer.double()
        return held is layer.weight, layer.state_dict()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@program
def makes_meta_and_lazy_modules():
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    model = model.to_empty(device="cpu")
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    lazy = nn.LazyLinear(2)
    return lazy(model(torch.ones(1, 4))), lazy.in_features


@program
def fakes_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        x = torch.ones(4, 4)
        y = (x @ x).sum(0)
    return tuple(y.shape), mode.from_tensor(torch.ones(2)).shape


@prepared
def reads_what_was_there():
    kept = [torch.arange(8.0), torch.ones(2, 2, requires_grad=True)]
    return lambda: (kept[0].view(2, 4).t() @ torch.ones(2, 1), kept.pop().exp(), len(kept))


@program
def fails_in_operators():
    wrong = (
        lambda: torch.ones(2) @ torch.ones(3),
        lambda: torch.ones(2).view(3),
        lambda: torch.ones(1)[5],
        lambda: torch.tensor("x"),
        lambda: torch.empty(1 << 62),
        lambda: torch.ones(2, device="cuda:99"),
    )
    return [_first_line(call) for call in wrong]


def _first_line(call):
    try:
        call()
    except Exception as error:
        return type(error), str(error).splitlines()[0]


@program
def copies_when_it_is_written():
    x = torch.ones(4)
    y = torch._lazy_clone(x)
    is_shared: Any = vars(torch._C)["_is_cow_tensor"]
    y.sum()
    before = is_shared(y)
    y.add_(1)
    return before, is_shared(y), x
