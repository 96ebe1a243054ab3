"""Programs with rare habits around torch, such as in the middle of a backward pass."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
import weakref
from typing import Any

import torch
from torch import nn
from torch.autograd import graph

from tests.record.undisturbed.state import program


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
def registers_modules_in_a_backward_pass():
    parent, seen = nn.Sequential(), []

    def add():
        parent.add_module(str(len(parent)), nn.Linear(2, 2))
        seen.append(sum(p.numel() for p in parent.parameters()))

    return with_hook(add), with_hook(add), seen


# --- the graph --------------------------------------------------------------------------------


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
def looks_at_all_frames():
    frames = sys._current_frames()
    here = frames[threading.get_ident()]
    return here.f_code.co_name, len(frames), threading.active_count()


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
