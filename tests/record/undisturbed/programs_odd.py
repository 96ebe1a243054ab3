"""Programs with odd habits: classes that torch does not expect, replaced functions, listeners."""

from __future__ import annotations

import builtins
import copy
import ctypes
import dataclasses
import gc
import importlib
import io
import os
import pickle
import resource
import signal
import sys
import tempfile
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from tests.record.undisturbed.state import prepared, program


def work(size=4):
    x = torch.ones(size, requires_grad=True)
    (x * 2).sum().backward()
    return x.grad


# --- classes ----------------------------------------------------------------------------------


@dataclasses.dataclass
class WithoutHash(nn.Module):
    width: int

    def __post_init__(self):
        super().__init__()
        self.layer = nn.Linear(self.width, self.width)

    def forward(self, x):
        return self.layer(x)


@prepared
def calls_modules_without_a_hash():
    there = WithoutHash(2)

    def run():
        made = WithoutHash(2)
        there(made(torch.ones(1, 2))).sum().backward()
        return there.layer.weight.grad, made.layer.weight.grad

    return run


class WithoutInit(nn.Module):
    def __init__(self):
        """Forget torch's."""


class OptimizerWithoutInit(torch.optim.Optimizer):
    def __init__(self):
        """Forget torch's."""

    def step(self):
        return 3


@prepared
def forgets_to_initialise():
    there = WithoutInit(), OptimizerWithoutInit()

    def run():
        made = WithoutInit(), OptimizerWithoutInit()
        return [optimizer.step() for _, optimizer in (there, made)], work()

    return run


class WithoutState(torch.optim.SGD):
    @property
    def state(self):
        raise RuntimeError("no state")

    @state.setter
    def state(self, value):
        """Forget it."""


@prepared
def keeps_an_optimizer_whose_property_fails():
    there = WithoutState([torch.ones(2, requires_grad=True)], 0.1)
    return lambda: (work(), there.defaults["lr"])


@program
def calls_through_a_metaclass():
    seen = []

    class Meta(type):
        def __call__(cls, *args):
            seen.append(cls.__name__)
            return super().__call__(*args)

        def __instancecheck__(cls, thing):
            seen.append("instance")
            return type.__instancecheck__(cls, thing)

        def __subclasscheck__(cls, kind):
            seen.append("subclass")
            return type.__subclasscheck__(cls, kind)

    class Model(nn.Linear, metaclass=Meta):
        """Has a class that sees who asks."""

    Model(2, 2)(torch.ones(1, 2)).sum().backward()
    return seen


class WithMethods(nn.Linear):
    seen = []  # noqa: RUF012

    def __deepcopy__(self, memo):
        self.seen.append("copied")
        return pickle.loads(pickle.dumps(self))

    def __getstate__(self):
        self.seen.append("asked")
        return self.__dict__

    def __setstate__(self, state):
        self.seen.append("set")
        super().__setstate__(state)


@program
def copies_by_methods_of_its_own():
    WithMethods.seen.clear()
    layer = WithMethods(2, 2)
    twin = copy.deepcopy(layer)
    return list(WithMethods.seen), twin.state_dict(), copy.copy(layer).weight is layer.weight


@program
def brings_a_tensor_back_to_life():
    kept = []

    class Undead(torch.Tensor):
        def __del__(self):
            kept.append(self)

    x = torch.ones(3).as_subclass(Undead)
    del x
    return len(kept), float(kept[0].sum())


@program
def works_while_a_tensor_dies():
    seen, x = [], torch.ones(3)

    def finish():
        seen.append(work())
        gc.collect()

    weakref.finalize(x, finish)
    del x
    return seen


# --- references -------------------------------------------------------------------------------


@prepared
def looks_for_referrers():
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(layer.parameters())

    def run():
        layer(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        things = layer, layer.weight, layer.weight.grad, optimizer, torch.ones(3)
        return [sorted(type(r).__name__ for r in gc.get_referrers(thing)) for thing in things]

    return run


@program
def refers_weakly_from_maps():
    layer, x = nn.Linear(2, 2), torch.ones(2)
    by_layer = weakref.WeakKeyDictionary({layer: 1})
    by_tensor = WeakTensorKeyDictionary({x: 2})
    storage = x.untyped_storage()
    gone, handle = weakref.ref(storage), storage._weak_ref()
    before = len(by_layer), len(by_tensor), torch.UntypedStorage._expired(handle)
    del layer, x, storage
    after = len(by_layer), len(by_tensor), torch.UntypedStorage._expired(handle), gone() is None
    torch.UntypedStorage._free_weak_ref(handle)
    return before, after


@program
def keeps_what_the_collector_finds():
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        cycle: list[object] = [torch.ones(2)]
        cycle.append(cycle)
        del cycle
        return gc.collect(), [type(thing) for thing in gc.garbage]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


# --- replaced functions -----------------------------------------------------------------------


@program
def replaces_the_import():
    seen, import_ = [], builtins.__import__

    def noted(name, *args, **kwargs):
        seen.append(name)
        return import_(name, *args, **kwargs)

    with mock.patch.object(builtins, "__import__", noted):
        import json

        grad = work()
    return seen, json.dumps([1]), grad


@program
def mocks_torch():
    with (
        mock.patch("torch.nn.Linear.forward", autospec=True, side_effect=lambda _, x: x) as forward,
        mock.patch.object(torch, "relu", wraps=torch.relu) as relu,
        mock.patch("torch.optim.SGD.step") as step,
    ):
        layer = nn.Linear(2, 2)
        layer(torch.relu(torch.ones(2)))
        torch.optim.SGD(layer.parameters(), 0.1).step()
    return forward.call_count, relu.call_count, step.call_count


@program
def replaces_the_engine():
    seen, variable = [], torch.autograd.Variable
    engine = variable._execution_engine

    class Noting:
        def __getattr__(self, name):
            seen.append(name)
            return getattr(engine, name)

    with mock.patch.object(variable, "_execution_engine", Noting()):
        return work(), seen


# --- listeners --------------------------------------------------------------------------------


def backend(graph, inputs):
    return graph.forward


def compiles():
    torch.compiler.reset()
    torch.compile(lambda x: x.sin(), backend=backend)(torch.ones(2))


def imports():
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(sys, "path", [folder]):
        Path(folder, "heard_by_a_body.py").write_text("def f(): return 1\nX = f()\n")
        importlib.import_module("heard_by_a_body")
        del sys.modules["heard_by_a_body"]


def is_heard(code):
    return code is backend.__code__ or code.co_filename.endswith("heard_by_a_body.py")


@program
def monitors_what_is_imported_and_compiled():
    seen = []
    if sys.version_info < (3, 12):
        return seen
    monitoring = sys.monitoring

    def note(code, _):
        if is_heard(code):
            seen.append(code.co_name)

    monitoring.use_tool_id(4, "a body")
    monitoring.register_callback(4, monitoring.events.PY_START, note)
    monitoring.set_events(4, monitoring.events.PY_START)
    try:
        imports()
        compiles()
    finally:
        monitoring.set_events(4, 0)
        monitoring.register_callback(4, monitoring.events.PY_START, None)
        monitoring.free_tool_id(4)
    return seen


# --- the process ------------------------------------------------------------------------------


@program
def has_no_streams():
    with mock.patch.multiple(sys, stdin=None, stdout=None, stderr=None):
        return work()


@program
def counts_file_descriptors():
    folder = "/proc/self/fd"
    return len(os.listdir(folder)) if Path(folder).is_dir() else 0, work()  # noqa: PTH208


@program
def has_few_file_descriptors():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    file = os.dup(0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (file + 1, before[1]))
    try:
        return work()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        os.close(file)


class TooLateError(Exception):
    pass


@program
def is_ended_by_an_alarm():
    def ring(number, frame):
        raise TooLateError

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        # An alarm that was lost must not keep us here.
        for _ in range(10_000):
            work()
        return "nobody rang"
    except TooLateError:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return work()


@program
def forks_and_trains():
    if (child := os.fork()) == 0:
        work()
        nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
        os._exit(0 if sys.getprofile() is None else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), work()


@program
def recurses_too_deep_in_torch():
    def deeper(act):
        act()
        deeper(act)

    def fails(act):
        try:
            deeper(act)
        except RecursionError as error:
            return type(error)
        return None

    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    acts = (nn.ReLU, lambda: layer.add_module("new", None), work, optimizer.step)
    with depth_left(80):
        return [fails(act) for act in acts]


@contextmanager
def depth_left(count: int) -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(sum(1 for _ in traceback.walk_stack(None)) + count)
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


@program
def runs_with_little_depth_left():
    with depth_left(60):
        return work(), nn.Linear(2, 2)(torch.ones(1, 2)).shape


@program
def starts_a_thread_of_the_system():
    system = ctypes.CDLL(None)
    made = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
    seen, thread = [], ctypes.c_ulong()

    @made
    def run(_):
        seen.append(work())

    system.pthread_create(ctypes.byref(thread), None, run, None)
    system.pthread_join(thread, None)
    return seen


# --- torch ------------------------------------------------------------------------------------


class Functions(TorchFunctionMode):
    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@program
def does_everything_in_modes():
    seen, layer = [], nn.Linear(2, 2)
    optimizer = torch.optim.Adam(layer.parameters(), foreach=False)
    x = torch.ones(1, 2)
    with Functions(seen), Operators(seen), Functions(seen):
        layer(x).sum().backward()
        optimizer.step()
        copy.deepcopy(layer)
        torch.func.grad(lambda x: x.sum())(x)
        torch.func.functional_call(layer, dict(layer.named_parameters()), (x,))
        torch.save(layer.state_dict(), io.BytesIO())
    return seen


@program
def checkpoints_within_a_checkpoint():
    checkpoint = torch.utils.checkpoint
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    x = torch.ones(2, 4, requires_grad=True)

    def inner(y):
        return checkpoint.checkpoint(model, y, use_reentrant=False)

    with checkpoint.set_checkpoint_early_stop(False):
        y = checkpoint.checkpoint(inner, x, use_reentrant=False)
    y.sum().backward()
    return x.grad
