"""Small programs in which libraries and kernels of CUDA's take memory for themselves.

``torchmem calibrate`` runs a copy of this file on a GPU and on a simulated one.
"""

import sys

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

_HALF = torch.float16


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, device="cuda", dtype=dtype, requires_grad=True)


def _ends(result: torch.Tensor) -> None:
    result.sum().backward()  # type: ignore[no-untyped-call]


def products() -> None:
    for dtype in (torch.float32, _HALF, torch.bfloat16):
        _ends(_random(256, 384, dtype=dtype) @ _random(384, 128, dtype=dtype))
    _ends(torch.bmm(_random(8, 64, 96), _random(8, 96, 32)))


def linear_with_bias() -> None:
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda()
    _ends(model(_random(64, 512)))
    _ends(model.half()(_random(64, 512, dtype=_HALF)))


def attention() -> None:
    backends = ("MATH", "EFFICIENT_ATTENTION", "FLASH_ATTENTION", "CUDNN_ATTENTION")
    for backend in backends:
        query, key, value = (_random(2, 8, 256, 64, dtype=_HALF) for _ in range(3))
        try:
            with sdpa_kernel(SDPBackend.__members__[backend]):
                attended = functional.scaled_dot_product_attention(
                    query, key, value, is_causal=True
                )
        except RuntimeError:  # no such kernel for this GPU
            continue
        _ends(attended)


def convolutions() -> None:
    for dtype in (torch.float32, _HALF):
        _ends(
            functional.conv2d(
                _random(8, 16, 64, 64, dtype=dtype), _random(32, 16, 3, 3, dtype=dtype)
            )
        )
        image = _random(8, 64, 28, 28, dtype=dtype).to(memory_format=torch.channels_last)
        _ends(functional.conv2d(image, _random(64, 64, 3, 3, dtype=dtype), padding=1))
        _ends(functional.conv_transpose2d(image, _random(64, 32, 2, 2, dtype=dtype), stride=2))
    _ends(functional.conv1d(_random(4, 80, 500), _random(128, 80, 5)))
    _ends(functional.conv3d(_random(2, 4, 16, 32, 32), _random(8, 4, 3, 3, 3)))


def norms() -> None:
    for norm in (nn.BatchNorm2d(32), nn.GroupNorm(4, 32), nn.LayerNorm(28), nn.RMSNorm(28)):
        _ends(norm.cuda()(_random(8, 32, 28, 28)))


def recurrent() -> None:
    for kind in (nn.LSTM, nn.GRU):
        _ends(kind(64, 128, num_layers=2, bidirectional=True).cuda()(_random(20, 8, 64))[0])


def transforms() -> None:
    _ends(torch.fft.rfft2(_random(4, 120, 96)).abs())
    torch.fft.fft(_random(16, 1000).detach())


def linear_algebra() -> None:
    matrix = torch.eye(96, device="cuda") * 2
    for name in ("cholesky", "inv", "qr", "eigh", "svd"):
        getattr(torch.linalg, name)(matrix)
    torch.linalg.solve(matrix, matrix)


def sparse() -> None:
    matrix = torch.eye(64, device="cuda")
    matrix.to_sparse() @ matrix
    matrix.to_sparse_csr() @ matrix


def searches() -> None:
    numbers = torch.arange(100_000, device="cuda").flip(0)
    for name in ("sort", "nonzero", "unique"):
        getattr(numbers, name)()
    numbers.float().topk(100)
    numbers.cumsum(0)
    _ends(functional.embedding(numbers[:4096] % 50, _random(1000, 64)))
    _ends(functional.cross_entropy(_random(512, 1000), numbers[:512] % 1000))


def optimizers() -> None:
    model = nn.Linear(512, 512, device="cuda")
    for fused in (False, True):
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        _ends(model(_random(8, 512)))
        optimizer.step()


def streams_and_graphs() -> None:
    x, weight = torch.ones(64, 256, device="cuda"), torch.ones(256, 256, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        x @ weight
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (x @ weight).relu().sum()
    graph.replay()


def run_programs() -> None:
    torch.manual_seed(0)
    of_libraries = (products, linear_with_bias, attention, convolutions, norms, recurrent)
    more = (transforms, linear_algebra, sparse, searches, optimizers, streams_and_graphs)
    for program in (*of_libraries, *more):
        try:
            program()
            torch.cuda.synchronize()
        except RuntimeError as error:  # a library that is not there: the others have their say
            print(f"{program.__name__} did not end: {error}"[:200], file=sys.stderr)


# Without a GPU whoever started it says so.
if __name__ == "__main__" and torch.cuda.is_available():
    run_programs()
