"""Programs that start others, listen to Python's tools, and hold odd objects."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import faulthandler
import gc
import itertools
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import warnings
import weakref

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.module_tracker import ModuleTracker

from tests.record.undisturbed.state import prepared, program


def step():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


# --- tasks and processes ----------------------------------------------------------------------


@program
def closes_a_generator_of_tasks():
    closed = []

    async def batches():
        try:
            for _ in range(5):
                await asyncio.sleep(0)
                yield step()[0]
        finally:
            closed.append(step()[0])

    async def main():
        found = []
        async with contextlib.aclosing(batches()) as waiting:
            async for batch in waiting:
                found.append(batch)
                if len(found) == 2:
                    break
        return found, await asyncio.to_thread(lambda: len(step()))

    return asyncio.run(main(), debug=True), closed


@program
def runs_contexts_in_a_pool():
    variable = contextvars.ContextVar("variable", default=0)

    def work(number):
        variable.set(number)
        step()
        return variable.get()

    with concurrent.futures.ThreadPoolExecutor(
        2, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        context = contextvars.copy_context
        return [pool.submit(context().run, work, n).result() for n in range(4)], variable.get()


def _seeded(number):
    torch.manual_seed(number)
    torch.set_num_threads(1)
    return [part.tolist() for part in step()]


@program
def trains_in_a_pool_of_processes():
    method = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=method) as pool:
        return [pool.submit(_seeded, number).result(timeout=60) for number in range(2)]


def _exit_code_of(child):
    if (process := os.fork()) == 0:
        code = 8
        with contextlib.suppress(BaseException):
            child()
            code = 7
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


@program
def forks_after_a_backward_pass():
    step()
    return _exit_code_of(lambda: _seeded(0))


@program
def forks_on_a_thread():
    found = []

    def work():
        step()
        found.append(_exit_code_of(lambda: _seeded(0)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found


# --- signals and descriptors ------------------------------------------------------------------


@program
def is_woken_by_signals():
    read, write = os.pipe()
    os.set_blocking(write, False)
    found = []
    handler = signal.signal(signal.SIGUSR1, lambda *_: found.append(step()[0]))
    woken = signal.set_wakeup_fd(write)
    try:
        for _ in range(3):
            signal.raise_signal(signal.SIGUSR1)
            step()
    finally:
        signal.set_wakeup_fd(woken)
        signal.signal(signal.SIGUSR1, handler)
    numbers = os.read(read, 10)
    os.close(read)
    os.close(write)
    return found, numbers


@program
def writes_to_another_file_than_standard_error():
    with tempfile.TemporaryFile("w+b") as file:
        original = os.dup(2)
        os.dup2(file.fileno(), 2)
        written, end = 0, time.process_time() + 0.2
        try:
            while time.process_time() < end:
                torch.ones(3) + 1
                written += os.write(2, b"x")
        finally:
            os.dup2(original, 2)
            os.close(original)
        file.seek(0)
        return file.read() == b"x" * written


# --- Python's tools ---------------------------------------------------------------------------


@program
def dumps_its_frames():
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback_later(60, file=file)
        step()
        faulthandler.cancel_dump_traceback_later()
        faulthandler.dump_traceback(file, all_threads=False)
        file.seek(0)
        return faulthandler.is_enabled(), "dumps_its_frames" in file.read().splitlines()[1]


@program
def notes_warnings_of_torch():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        leaf = torch.ones(2, requires_grad=True)
        (leaf * 2).grad  # noqa: B018 - torch warns of it
        torch.optim.lr_scheduler.StepLR(torch.optim.SGD([leaf], 0.1), 1).step()
        torch.tensor(leaf.detach())
        step()
    return [(str(warning.message), warning.category.__name__, warning.lineno) for warning in seen]


# --- objects ----------------------------------------------------------------------------------


@program
def works_when_a_tensor_is_gone():
    found = []
    tensor, module = torch.ones(8, requires_grad=True), nn.Linear(2, 2)
    reference = weakref.ref(tensor, lambda _: found.append(step()[0]))
    weakref.finalize(module, lambda: found.append(torch.ones(3).sum()))
    (tensor * 2).sum().backward()
    del tensor, module
    gc.collect()
    return found, reference()


class Unfriendly(nn.Module):
    """Raises whatever it is asked."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def __eq__(self, other):
        raise RuntimeError("==")

    __hash__ = object.__hash__

    def __bool__(self):
        raise RuntimeError("bool")

    def __len__(self):
        raise RuntimeError("len")

    def __repr__(self):
        raise RuntimeError("repr")

    def forward(self, x):
        return self.layer(x)


@prepared
def calls_modules_that_answer_nothing():
    there = Unfriendly()

    def run():
        made = Unfriendly()
        there(made(torch.ones(1, 2))).sum().backward()
        return made.layer.weight.grad, there.layer.weight.grad

    return run


class UnreadableState(dict):
    def __iter__(self):
        raise RuntimeError("iter")

    def items(self):
        raise RuntimeError("items")

    def values(self):
        raise RuntimeError("values")


@program
def keeps_a_state_that_cannot_be_read():
    leaf = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([leaf], 0.1, momentum=0.9)
    (leaf * 2).sum().backward()
    optimizer.step()
    optimizer.state = UnreadableState(optimizer.state)  # type: ignore[assignment]
    return leaf.detach()


# --- torch's own tools ------------------------------------------------------------------------

_numbers = itertools.count()


@program
def defines_an_operator_with_a_gradient():
    name = f"undisturbed_{next(_numbers)}::twice"

    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.__annotations__ = {"x": torch.Tensor, "return": torch.Tensor}
    operator = torch.library.custom_op(name, twice, mutates_args=())
    operator.register_fake(torch.empty_like)
    operator.register_autograd(lambda _, gradient: gradient * 2)
    x = torch.ones(3, requires_grad=True)
    operator(x).sum().backward()
    torch.library.opcheck(operator, (torch.ones(3, requires_grad=True),))
    return x.grad


@program
def tracks_modules():
    seen = []

    class Asks(nn.Module):
        def forward(self, x):
            seen.append(sorted(tracker.parents))
            return x * 2

    with ModuleTracker() as tracker:
        nn.Sequential(Asks(), Asks())(torch.ones(2, requires_grad=True)).sum().backward()
    return seen


@program
def checkpoints_to_the_end():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    x = torch.randn(2, 4, requires_grad=True)
    with set_checkpoint_early_stop(False):
        checkpoint(model, x, use_reentrant=False).sum().backward()
    checkpoint(model, x, use_reentrant=False, debug=True).sum().backward()
    return x.grad


@program
def keeps_what_is_saved_on_the_cpu():
    with torch.autograd.graph.save_on_cpu():
        x = torch.randn(4, 4, requires_grad=True)
        loss = (x.exp() * x).sum()
    loss.backward()
    return x.grad
