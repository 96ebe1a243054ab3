"""Programs that use Python's own machinery around torch."""

from __future__ import annotations

import cProfile
import ctypes
import gc
import os
import pstats
import random
import signal
import sys
import threading
import time
import traceback
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.record.undisturbed.state import prepared, program


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


@program
def looks_at_the_collector():
    return gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > 1000, gc.get_debug()


@program
def switches_the_collector_off():
    gc.disable()
    try:
        for _ in range(3):
            cycle: list[object] = [torch.ones(4)]
            cycle.append(cycle)
        return work(), gc.isenabled()
    finally:
        gc.enable()


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
def looks_at_profile_functions_of_a_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(sys.getprofile()))
    thread.start()
    thread.join()
    return found, threading.getprofile(), threading.gettrace()


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
def profiles_itself():
    profile = cProfile.Profile()
    work()
    with profile:
        work()
    names = {name for _, _, name in pstats.Stats(profile).stats}  # type: ignore[attr-defined]
    return "work" in names


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
