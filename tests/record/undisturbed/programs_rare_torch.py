"""Programs with rare habits around torch, such as in the middle of a backward pass."""

from __future__ import annotations

import ctypes
import gc
import io
import os
import signal
import sys
import threading
import weakref
from multiprocessing import shared_memory
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.autograd import graph
from torch.autograd.function import once_differentiable
from torch.utils import benchmark

from tests.record.undisturbed.state import nightly, program


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def with_hook(act):
    """Run a backward pass with something in the middle; return the gradient."""
    x = leaf(3)
    y = x * 2
    y.register_hook(lambda gradient: act())
    (y * 3).sum().backward()
    return x.grad


# --- in the middle of a backward pass ---------------------------------------------------------


@program
def forks_in_a_backward_pass():
    codes = []

    def fork():
        if (child := os.fork()) == 0:
            os._exit(int(torch.ones(3).sum()))
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    return with_hook(fork), codes


@program
def is_interrupted_in_a_backward_pass():
    try:
        with_hook(lambda: signal.raise_signal(signal.SIGINT))
    except KeyboardInterrupt as error:
        return type(error), with_hook(lambda: None)
    return None


@program
def collects_and_drops_in_a_backward_pass():
    kept: list[Any] = [leaf(8), nn.Linear(2, 2)]
    gone = [weakref.ref(thing) for thing in kept]

    def drop():
        kept.clear()
        gc.collect()

    return with_hook(drop), [reference() is None for reference in gone]


@program
def starts_a_thread_in_a_backward_pass():
    found = []

    def start():
        thread = threading.Thread(target=lambda: found.append(with_hook(lambda: None)))
        thread.start()
        thread.join()

    return with_hook(start), found


@program
def profiles_in_a_backward_pass():
    seen, before = [], sys.getprofile()

    def note(frame, event, _):
        if frame.f_code is leaf.__code__:
            seen.append(event)

    def listen():
        sys.setprofile(note)
        leaf(2)
        sys.setprofile(before)

    return with_hook(listen), [event for event in seen if event in ("call", "return")]


@program
def registers_modules_in_a_backward_pass():
    parent, seen = nn.Sequential(), []

    def add():
        parent.add_module(str(len(parent)), nn.Linear(2, 2))
        seen.append(sum(p.numel() for p in parent.parameters()))

    return with_hook(add), with_hook(add), seen


# --- the graph --------------------------------------------------------------------------------


class Parts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, count):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(None, x)
        ctx.count = count
        return x * count, x + count, "no tensor"

    @staticmethod
    @once_differentiable
    def backward(ctx, first, second, _):
        nothing, x = ctx.saved_tensors
        assert nothing is None
        return (first * ctx.count if second is None else second * x), None


@program
def returns_more_than_tensors():
    x = leaf(3)
    product, total, text = Parts.apply(x, 3)
    (first,) = torch.autograd.grad(product.sum(), x, retain_graph=True)
    (second,) = torch.autograd.grad(total.sum(), x, retain_graph=True)
    try:
        torch.autograd.grad(product.sum(), x, create_graph=True)[0].sum().backward()
    except RuntimeError as error:
        return first, second, text, str(error)[:40]
    return first, second, text


@program
def goes_along_edges():
    x, seen = leaf(3), []
    y = x.exp()
    edge = graph.get_gradient_edge(y)
    handles = [
        edge.node.register_prehook(lambda gradients: seen.append("before")),
        edge.node.register_hook(lambda inputs, outputs: seen.append("after")),
    ]
    z = (y * 2).sum()
    (gradient,) = torch.autograd.grad(z, edge, retain_graph=True)
    torch.autograd.backward(z, inputs=[x])
    for handle in handles:
        handle.remove()
    return gradient, x.grad, seen


@program
def runs_backward_on_one_thread():
    with torch.autograd.set_multithreading_enabled(False):
        return with_hook(lambda: None), torch.autograd.is_multithreading_enabled()


@program
def nests_saving():
    seen, x = [], leaf(3)

    def pair(name):
        return graph.saved_tensors_hooks(
            lambda t: seen.append((name, "pack")) or t, lambda t: seen.append((name, "unpack")) or t
        )

    with pair("outer"):
        y = x.exp()
        with pair("inner"):
            z = y.sin()
        loss = (z * y).sum()
    loss.backward()
    return seen, x.grad


# --- the system -------------------------------------------------------------------------------


@program
def raises_in_another_thread():
    found, ready = [], threading.Event()

    def spin():
        try:
            ready.set()
            while True:
                torch.ones(2) + 1
        except InterruptedError:
            found.append("raised")

    thread = threading.Thread(target=spin)
    thread.start()
    ready.wait()
    number, error = ctypes.c_ulong(thread.ident or 0), ctypes.py_object(InterruptedError)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(number, error)
    thread.join()
    return found


@program
def waits_for_a_signal():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        x = with_hook(lambda: None)
        pending = signal.sigpending()
        return int(signal.sigwait({signal.SIGUSR1})), pending, x
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@program
def shares_memory_by_name():
    memory = shared_memory.SharedMemory(create=True, size=64)
    try:
        array = np.ndarray((4,), np.float32, memory.buf)
        array[:] = 0
        torch.from_numpy(array).add_(2)
        found = array.copy()
        del array
        return found
    finally:
        memory.close()
        memory.unlink()


@program
def exits_on_a_thread():
    def leave():
        with_hook(lambda: None)
        sys.exit(3)

    timer = threading.Timer(0.001, leave)
    timer.start()
    timer.join()
    return timer.is_alive()


@program
def looks_at_all_frames():
    frames = sys._current_frames()
    here = frames[threading.get_ident()]
    return here.f_code.co_name, len(frames) == threading.active_count()


@program
def asks_for_too_much():
    try:
        torch.empty(1 << 60, dtype=torch.uint8)
    except RuntimeError as error:
        return str(error).partition(":")[2][:60], with_hook(lambda: None)
    return None


@program
def sees_errors_that_nobody_catches():
    seen, before = [], sys.unraisablehook
    sys.unraisablehook = lambda said: seen.append((type(said.exc_value), str(said.exc_value)))

    def fail(*_):
        raise ValueError("dropped")

    try:
        x = torch.ones(2)
        reference = weakref.ref(x, fail)
        del x
        gc.callbacks.append(fail)
        gc.collect(0)
        gc.callbacks.remove(fail)
    finally:
        sys.unraisablehook = before
    return seen, reference()


# --- torch's tools ----------------------------------------------------------------------------


@program
def scripts_what_is_around_it():
    def helper(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @torch.jit.script
    def scripted(x: torch.Tensor) -> torch.Tensor:
        return helper(x) + 1

    return scripted(torch.ones(2)), str(scripted.code).count("helper")


@program
def rewrites_a_graph():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            return torch.relu(self.layer(x)) + torch.relu(x)

    def before(x):
        return torch.relu(x)

    def after(x):
        return torch.sigmoid(x)

    traced: Any = fx.symbolic_trace(Net())
    matches = fx.replace_pattern(traced, before, after)
    return traced.code, len(matches), traced(torch.ones(1, 2))


@program
def times_operators():
    timer = benchmark.Timer("x + 1", globals={"x": torch.ones(4)}, num_threads=1)
    measured = timer.timeit(5)
    return measured.number_per_run, len(measured.times), torch.get_num_threads()


@program
def keeps_generators_of_its_own():
    generator = torch.Generator().manual_seed(3)
    first = torch.rand(2, generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        inside = torch.rand(2)
    again = generator.clone_state()
    return first, inside, torch.rand(2), torch.rand(1, generator=again), generator.initial_seed()


@program
def asks_about_a_gpu():
    if torch.cuda.is_available():
        return None
    try:
        torch.ones(1, device="cuda")
    except (AssertionError, RuntimeError) as error:
        return str(error)[:30], torch.cuda.is_initialized(), torch.cuda.memory_allocated()
    return None


@program
def loads_in_every_way():
    file = io.BytesIO()
    torch.save({"x": torch.ones(3), "kept": slice(1, 2)}, file)
    file.seek(0)
    with torch.serialization.safe_globals([slice]):
        loaded = torch.load(file, weights_only=True)
    file.seek(0)
    mapped = torch.load(file, map_location=lambda storage, _: storage, weights_only=False)
    return loaded["x"], mapped["kept"] == slice(1, 2)


@program
def chunks_a_map():
    rows = torch.randn(6, 3)
    by_two = torch.func.vmap(lambda r: r.sin().sum(), chunk_size=2)(rows)
    return by_two, torch._foreach_add([rows, rows], 1.0)[1]


@nightly
@program
def compiled_with_hints_of_its_own():
    seen = []

    @torch.compiler.allow_in_graph
    def opaque(x):
        seen.append("ran")
        return x * 2

    function = torch.compile(lambda x: opaque(x).sin(), backend="eager", fullgraph=True)
    return function(torch.ones(2)), function(torch.ones(2)), seen
