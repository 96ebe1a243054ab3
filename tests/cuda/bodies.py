"""What programs do on a GPU, in small; and how a body is run there, bare and recorded."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytest_torchmem import MiB
from pytest_torchmem.measuring.body_measurement import BodyMeasurement
from pytest_torchmem.record.torch_api import autograd

Body = Callable[[torch.device], object]
BODIES: dict[str, Body] = {}


def body(function: Body) -> Body:
    BODIES[function.__name__] = function
    return function


@body
def training(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        model(torch.randn(64, 256, device=device)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@body
def autocast_and_scaler(device: torch.device) -> None:
    model = nn.Linear(512, 512, device=device)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(torch.randn(64, 512, device=device)).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


@body
def checkpointed(device: torch.device) -> None:
    block = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).to(device)
    x = torch.randn(128, 256, device=device, requires_grad=True)
    checkpoint(
        block, checkpoint(block, x, use_reentrant=False), use_reentrant=False
    ).sum().backward()


@body
def attention(device: torch.device) -> None:
    q = torch.randn(2, 4, 128, 64, device=device, dtype=torch.float16, requires_grad=True)
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()


@body
def embedding_and_loss(device: torch.device) -> None:
    table = nn.Embedding(1000, 256, device=device)
    tokens = torch.zeros(16, 64, dtype=torch.long, device=device)
    logits = table(tokens).flatten(0, 1) @ table.weight.T
    nn.functional.cross_entropy(logits, tokens.flatten()).backward()


@body
def sorting(device: torch.device) -> None:
    x = torch.randn(1 << 18, device=device)
    torch.sort(x)
    torch.topk(x, 100)
    torch.cumsum(x, 0)


@body
def normalised(device: torch.device) -> None:
    norm = nn.LayerNorm(1024, device=device)
    norm(torch.randn(512, 1024, device=device)).sum().backward()


@body
def per_sample_gradients(device: torch.device) -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() ** 2).sum()

    torch.func.vmap(torch.func.grad(loss))(torch.randn(64, 1024, device=device))


@body
def jacobian(device: torch.device) -> None:
    torch.func.jacrev(lambda x: x.sin().cos())(torch.randn(64, device=device))


@body
def two_streams(device: torch.device) -> None:
    side = torch.cuda.Stream(device)
    a = torch.ones(4 * MiB, device=device)
    with torch.cuda.stream(side):
        doubled = a * 2
        torch.cuda._sleep(20_000_000)
    a.record_stream(side)
    del a
    # Until the other stream is done the block still counts as requested: that depends on times.
    torch.cuda.synchronize(device)
    again = torch.ones(4 * MiB, device=device)
    del doubled, again


@body
def captured_graph(device: torch.device) -> None:
    graph, x = torch.cuda.CUDAGraph(), torch.ones(MiB, device=device)
    with torch.cuda.graph(graph):
        x * 2 + 1
    graph.replay()


@body
def private_pool(device: torch.device) -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        a = torch.ones(3 * MiB, device=device)
    b = a * 2
    del a, b


@body
def given_back(device: torch.device) -> None:
    large = torch.ones(20 * MiB, device=device)
    del large
    torch.cuda.empty_cache()
    torch.ones(MiB, device=device)


@body
def out_of_memory(device: torch.device) -> None:
    kept = torch.ones(MiB, device=device)
    with contextlib.suppress(torch.cuda.OutOfMemoryError):
        torch.empty(1 << 50, dtype=torch.uint8, device=device)
    del kept


@body
def from_the_host(device: torch.device) -> None:
    torch.ones(MiB).pin_memory().to(device, non_blocking=True)


@body
def another_thread(device: torch.device) -> None:
    def work() -> None:
        x = torch.ones(3 * MiB, device=device)
        x * 2

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


# --- how they are run ----------------------------------------------------------------------------


def run_bare(run: Body, device: torch.device) -> int:
    """The largest sum of requested bytes above what was there, and nothing of ours around it."""
    settle()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    run(device)
    torch.cuda.synchronize(device)
    return int(torch.cuda.memory_stats(device)["requested_bytes.all.peak"]) - before


def record(run: Body, device: torch.device) -> BodyMeasurement:
    """Measure a body; the measurement is over and has everything."""
    measurement = BodyMeasurement(str(device))
    measurement.start()
    run(device)
    measurement.stop()
    return measurement


def settle() -> None:
    gc.collect()
    torch.cuda.synchronize()
    autograd.await_engine(torch.device("cuda:0"))
    torch._C._cuda_clearCublasWorkspaces()
