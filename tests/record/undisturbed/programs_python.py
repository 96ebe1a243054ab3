"""Programs that use Python's own machinery around torch."""

from __future__ import annotations

import ast
import asyncio
import atexit
import contextlib
import contextvars
import cProfile
import ctypes
import gc
import importlib
import io
import multiprocessing
import os
import pdb
import pstats
import queue
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
import tracemalloc
import types
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.record.undisturbed.state import nightly, prepared, program


def work(size=4):
    x = torch.ones(size, requires_grad=True)
    (x * 2).sum().backward()
    return x.grad


@program
def generates():
    def parts():
        with torch.no_grad():
            for n in range(3):
                yield torch.ones(n + 1) * 2

    made = parts()
    first = next(made)
    made.close()
    return first, list(parts()), torch.is_grad_enabled(), sum(torch.ones(2) for _ in range(3))


@program
def awaits():
    async def one(n):
        await asyncio.sleep(0)
        return torch.ones(n) * n

    async def all_of_them():
        async with asyncio.timeout(30) if hasattr(asyncio, "timeout") else contextlib.nullcontext():
            return await asyncio.gather(*(one(n) for n in range(3)))

    return asyncio.run(all_of_them())


@program
def awaits_a_thread():
    async def ask():
        return await asyncio.get_running_loop().run_in_executor(None, sum, [1, 2])

    return asyncio.run(ask())


@program
def sets_context_variables():
    variable = contextvars.ContextVar("of the body", default=0)
    context = contextvars.copy_context()
    context.run(variable.set, 5)
    return variable.get(), context[variable], context.run(work)


@program
def raises():
    raise KeyError("mine")


@program
def raises_in_a_module():
    class Broken(nn.Module):
        def forward(self, x):
            raise ValueError(tuple(x.shape))

    try:
        nn.Sequential(nn.Linear(2, 2), Broken())(torch.ones(1, 2))
    except ValueError as error:
        frames = traceback.extract_tb(error.__traceback__)
        return error, [f.name for f in frames], error.__context__
    return None


@program
def raises_a_group_of_errors():
    try:
        try:
            raise ValueError("first")
        except ValueError as error:
            raise TypeError("second") from error
    except TypeError as error:
        return error, error.__cause__, "".join(traceback.format_exception(error)).count("File")


@program
def recurses_too_deep():
    def deeper(n):
        return deeper(n + 1) + 1

    try:
        deeper(0)
    except RecursionError as error:
        return type(error), work()
    return None


@program
def knows_its_own_depth():
    frame: types.FrameType | None = sys._getframe()
    names = []
    while frame is not None and "pytest" not in frame.f_code.co_filename:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names[:1], [f.function for f in __import__("inspect").stack()][:1]


@program
def exits():
    try:
        sys.exit(3)
    except SystemExit as error:
        return error.code


@program
def is_interrupted():
    try:
        signal.raise_signal(signal.SIGINT)
        time.sleep(0.01)
    except KeyboardInterrupt:
        return work()
    return None


@program
def handles_signals():
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        work()
    finally:
        signal.signal(signal.SIGUSR1, before)
    return seen


def works_until_a_timer_rings(timer, signal_of_it):
    seen = []
    before = signal.signal(signal_of_it, lambda number, _: seen.append(number))
    try:
        signal.setitimer(timer, 0.01)
        until = time.monotonic() + 30
        while not seen and time.monotonic() < until:
            work()
    finally:
        signal.setitimer(timer, 0)
        signal.signal(signal_of_it, before)
    return seen


@program
def sets_an_alarm():
    return works_until_a_timer_rings(signal.ITIMER_REAL, signal.SIGALRM)


@program
def counts_its_processor_time():
    return works_until_a_timer_rings(signal.ITIMER_PROF, signal.SIGPROF)


@program
def looks_at_the_collector():
    return gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > 1000, gc.get_debug()


@program
def looks_at_the_collector_after_a_while():
    until = time.thread_time() + 0.2
    seen = set()
    while time.thread_time() < until:
        torch.ones(4) + 1
        seen.add(gc.get_threshold())
    return sorted(seen)


@program
def switches_the_collector_off():
    gc.disable()
    try:
        for _ in range(3):
            cycle: list[object] = [torch.ones(4)]
            cycle.append(cycle)
        return gc.isenabled(), work()
    finally:
        gc.enable()


@program
def tunes_the_collector():
    before = gc.get_threshold()
    gc.set_threshold(50, 2, 2)
    try:
        made = [[[]] for _ in range(200)]
        return gc.get_threshold(), len(made)
    finally:
        gc.set_threshold(*before)


@program
def leaves_the_collector_tuned():
    gc.set_threshold(701, 10, 10)
    return gc.get_threshold()


@program
def freezes_objects():
    gc.freeze()
    try:
        return gc.get_freeze_count() > 0, work()
    finally:
        gc.unfreeze()


@program
def listens_to_the_collector():
    seen = []

    def note(phase, facts):
        seen.append((phase, facts["generation"]))

    gc.callbacks.append(note)
    try:
        cycle: list[object] = [torch.ones(3)]
        cycle.append(cycle)
        del cycle
        gc.collect()
    finally:
        gc.callbacks.remove(note)
    return seen[-2:]


@program
def collects_cycles():
    class Node:
        def __init__(self):
            self.me, self.tensor = self, torch.ones(4)

    node = Node()
    gone = weakref.ref(node.tensor)
    del node
    before = gone() is None
    gc.collect()
    return before, gone() is None


@program
def counts_references():
    x = torch.ones(3)
    layer = nn.Linear(2, 2)
    return sys.getrefcount(x), sys.getrefcount(layer), sys.getrefcount(layer.weight)


@prepared
def counts_references_of_before():
    x, layer = torch.ones(3), nn.Linear(2, 2)
    x_too = x

    def run():
        return sys.getrefcount(x), sys.getrefcount(x_too), sys.getrefcount(layer.weight)

    return run


@program
def starts_threads():
    found, lock = [], threading.Lock()

    def compute(n):
        value = torch.ones(n).sum()
        with lock:
            found.append(value)

    threads = [threading.Thread(target=compute, args=(n,)) for n in (1, 2)]
    for thread in threads:
        thread.start()
        thread.join()
    return found


@program
def trains_on_a_thread():
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(work, [2, 3]))


@prepared
def asks_a_pool_of_before():
    pool = ThreadPoolExecutor(1)
    pool.submit(int).result()

    def run():
        try:
            return pool.submit(work, 3).result()
        finally:
            pool.shutdown()

    return run


@program
def keeps_data_of_threads():
    local, found = threading.local(), []
    local.value = torch.ones(1)
    thread = threading.Thread(target=lambda: found.append(hasattr(local, "value")))
    thread.start()
    thread.join()
    return found, local.value


@program
def imports_while_a_thread_lives():
    stop = threading.Event()
    other = threading.Thread(target=stop.wait)
    other.start()
    try:
        importlib.reload(importlib.import_module("colorsys"))
        return work()
    finally:
        stop.set()
        other.join()


@program
def looks_at_profile_functions_of_a_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(sys.getprofile()))
    thread.start()
    thread.join()
    return found, threading.getprofile(), threading.gettrace()


@program
def profiles_its_threads():
    seen = []

    def note(frame, event, _):
        if frame.f_code is work.__code__:
            seen.append(event)

    threading.setprofile(note)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    finally:
        threading.setprofile(None)
    return [event for event in seen if event in ("call", "return")]


@program
def hands_over_with_a_queue():
    box = queue.Queue()
    thread = threading.Thread(target=lambda: [box.put(n) for n in range(3)])
    thread.start()
    thread.join()
    return [box.get() for _ in range(3)]


@program
def traces_itself():
    seen = []

    def note(frame, event, _):
        if frame.f_code is work.__code__:
            seen.append(event)
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        work()
    finally:
        sys.settrace(before)
    return seen


@program
def profiles_itself_with_a_function():
    seen = []

    def note(frame, event, _):
        if frame.f_code is work.__code__ and event in ("call", "return"):
            seen.append(event)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return seen


@program
def profiles_itself():
    profile = cProfile.Profile()
    work()
    with profile:
        work()
    names = {name for _, _, name in pstats.Stats(profile).stats}  # type: ignore[attr-defined]
    return "work" in names


@program
def looks_at_allocations_of_python():
    tracemalloc.start()
    try:
        kept = [bytearray(1000) for _ in range(3)]
        return tracemalloc.is_tracing(), tracemalloc.get_traced_memory()[0] > 3000, len(kept)
    finally:
        tracemalloc.stop()


@program
def debugs_itself():
    script = io.StringIO("n\nc\n")
    debugger = pdb.Pdb(stdin=script, stdout=io.StringIO(), nosigint=True, readrc=False)
    debugger.use_rawinput = False
    try:
        return debugger.runcall(work)
    finally:
        sys.settrace(None)


@program
def warns():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn("mine", stacklevel=1)
        torch.ones(2, requires_grad=True).sum().backward(create_graph=False)
        torch.range(0, 2)
    return [str(w.message)[:20] for w in caught], len(caught)


@program
def changes_its_surroundings():
    with tempfile.TemporaryDirectory() as folder:
        here = Path.cwd()
        os.chdir(folder)
        os.environ["UNDISTURBED"] = "1"
        try:
            torch.save(torch.ones(2), "x.pt")
            return torch.load("x.pt"), sorted(p.name for p in Path().iterdir())
        finally:
            os.chdir(here)
            del os.environ["UNDISTURBED"]


@program
def forks():
    x = torch.ones(4)
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.write(write, b"%d" % int(x.add_(1).sum()))
        os._exit(7)
    os.close(write)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said = os.read(read, 9)
    os.close(read)
    return status, said, x


def _add(box, count):
    box.put(float(torch.ones(count).sum()))


@program
def forks_a_child_of_multiprocessing():
    context = multiprocessing.get_context("fork")
    box = context.SimpleQueue()
    child = context.Process(target=_add, args=(box, 5))
    child.start()
    child.join(60)
    return box.get(), child.exitcode


no_such_name = None


@program
def executes_sources():
    names = {"torch": torch}
    exec(compile("def f(x): return x * 2\ny = f(torch.ones(2))", "<made>", "exec"), names)
    tree = ast.parse("torch.ones(3).sum()", mode="eval")
    return names["y"], eval(compile(tree, "<tree>", "eval"), names)


@program
def executes_code_whose_file_is_no_text():
    names: dict[str, Any] = {"torch": torch}
    exec(compile("def f(x): return x * 2\ny = f(torch.ones(2))", "<\udcff>", "exec"), names)
    return names["f"](names["y"]), names["f"].__code__.co_filename


@program
def calls_through_other_languages():
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)
    seen = []

    def call(n):
        seen.append(work(n))
        return n + 1

    return kind(call)(3), seen, sorted([2, 1], key=lambda n: float(torch.tensor(n)))


@program
def finalises():
    seen = []

    class Noted:
        def __del__(self):
            seen.append(float(torch.ones(2).sum()))

    noted = Noted()
    del noted
    return seen


@program
def registers_for_the_end():
    seen = []
    function = atexit.register(seen.append, 1)
    atexit.unregister(function)
    return seen


@program
def hooks_exceptions_that_nobody_catches():
    seen, before = [], sys.unraisablehook

    class Broken:
        def __del__(self):
            raise ValueError("lost")

    sys.unraisablehook = lambda said: seen.append(str(said.exc_value))
    try:
        broken = Broken()
        del broken
    finally:
        sys.unraisablehook = before
    return seen


@program
def patches_names_of_torch():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "ones", torch.zeros)
        patch.setattr(torch.Tensor, "sum", lambda self: "patched")
        patch.setattr(torch.nn.Linear, "forward", lambda self, x: x)
        found = torch.ones(2), torch.rand(2).sum(), nn.Linear(2, 3)(torch.zeros(1, 2))
    return found, torch.ones(2).sum()


@program
def patches_what_is_measured_with():
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        enter = torch.autograd.profiler.record_function.__enter__

        def noted(self):
            seen.append(self.name)
            return enter(self)

        patch.setattr(torch.autograd.profiler.record_function, "__enter__", noted)
        patch.setattr(time, "time_ns", lambda: 0)
        patch.setattr(torch.nn.Module, "__setstate__", lambda self, state: None)
        with torch.autograd.profiler.record_function("mine"):
            found = work()
    return found, seen


@program
def draws_random_numbers_of_all_kinds():
    return random.random(), np.random.rand(2), torch.rand(2), os.urandom(0)


# `looks_at_the_collector_after_a_while` is recorded as long, and cut as often.
@nightly
@program
def runs_for_a_while():
    x, until, steps = torch.zeros(4), time.thread_time() + 0.2, 0
    while time.thread_time() < until:
        x = x + 1
        steps += 1
    return bool((x == steps).all())
