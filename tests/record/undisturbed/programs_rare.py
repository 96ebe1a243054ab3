"""Programs with rare habits: tools that listen, imports of odd kinds, objects that stay open."""

from __future__ import annotations

import ast
import asyncio
import bdb
import builtins
import contextlib
import contextvars
import functools
import gc
import importlib.abc
import importlib.util
import inspect
import io
import linecache
import logging
import logging.handlers
import marshal
import os
import queue
import signal
import sys
import tempfile
import threading
import tracemalloc
import types
import warnings
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tests.record.undisturbed.state import prepared, program


def work(size=4):
    x = torch.ones(size, requires_grad=True)
    (x * 2).sum().backward()
    return x.grad


def step():
    layer = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return layer.state_dict()


# --- listeners --------------------------------------------------------------------------------


class Debugger(bdb.Bdb):
    def __init__(self):
        super().__init__(skip=["torch*", "pytest_torchmem*"])
        self.seen = []

    def user_line(self, frame):
        if frame.f_code.co_filename == __file__:
            self.seen.append((frame.f_code.co_name, frame.f_lineno))

    def user_return(self, frame, value):
        if frame.f_code.co_filename == __file__:
            self.seen.append((frame.f_code.co_name, str(value)))


@program
def steps_through_itself():
    debugger, before = Debugger(), sys.gettrace()
    try:
        debugger.runcall(work)
    finally:
        sys.settrace(before)
    return debugger.seen


@program
def jumps_over_a_line():
    def jumped():
        seen = [1]
        seen.append(2)
        seen.append(3)
        return seen

    def note(frame, event, _):
        if frame.f_code is jumped.__code__:
            if event == "line" and frame.f_lineno == jumped.__code__.co_firstlineno + 2:
                frame.f_lineno += 1
            return note
        return None

    before = sys.gettrace()
    sys.settrace(note)
    try:
        return jumped(), work()
    finally:
        sys.settrace(before)


@program
def traces_a_frame_above():
    seen, before = [], sys.gettrace()

    def note(frame, event, _):
        seen.append((frame.f_code.co_name, event))

    frame = sys._getframe()
    sys.settrace(lambda *_: None)
    frame.f_trace = note
    work()
    del frame.f_trace
    sys.settrace(before)
    return seen


@program
def profiles_threads_that_live():
    if sys.version_info < (3, 12):
        return None
    seen: list[str] = []
    go, worked, stop = threading.Event(), threading.Event(), threading.Event()

    def run():
        go.wait()
        work()
        worked.set()
        stop.wait()

    def note(frame, event, _):
        if frame.f_code is work.__code__:
            seen.append(event)

    thread = threading.Thread(target=run)
    thread.start()
    threading.setprofile_all_threads(note)
    go.set()
    worked.wait()
    threading.setprofile_all_threads(None)
    stop.set()
    thread.join()
    return seen


@program
def compares_allocations_of_python():
    tracemalloc.start(3)
    try:
        before = tracemalloc.take_snapshot()
        kept = [bytes(10_000) for _ in range(5)]
        work()
        found = tracemalloc.take_snapshot().compare_to(before, "lineno")
        mine = [s for s in found if s.traceback[0].filename == __file__ and s.size_diff > 40_000]
        return len(mine), len(kept), tracemalloc.get_object_traceback(kept[0]) is not None
    finally:
        tracemalloc.stop()


_audited: list[str] = []
_audits = [False]


def _audit(event, _):
    if _audits[0] and event.startswith(("undisturbed", "exec", "compile")):
        _audited.append(event)


@functools.cache
def _install_audit():
    sys.addaudithook(_audit)


@program
def audits_itself():
    _install_audit()
    _audited.clear()
    _audits[0] = True
    try:
        sys.audit("undisturbed.here", 1)
        exec("x = 1", {})
        work()
    finally:
        _audits[0] = False
    return list(_audited)


@program
def logs_where_it_is():
    records = queue.Queue()
    logger = logging.getLogger("undisturbed.place")
    logger.propagate = False
    handler = logging.handlers.QueueHandler(records)
    logger.addHandler(handler)
    try:
        logger.warning("x", stack_info=True)
        nn.Linear(2, 2).register_forward_hook(lambda *_: logger.warning("in a hook"))
        layer = nn.Linear(2, 2)
        layer.register_forward_hook(lambda *_: logger.warning("in a hook"))
        layer(torch.ones(1, 2))
    finally:
        logger.removeHandler(handler)
    found = [records.get() for _ in range(records.qsize())]
    return [(r.funcName, r.lineno, r.threadName, r.levelname) for r in found]


@program
def shows_warnings_by_itself():
    seen, before = [], warnings.showwarning
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = lambda m, c, file, line, *_: seen.append((file, line, str(m)))
            warnings.warn("mine", stacklevel=2)
            torch.range(0, 2)
            torch.nn.functional.sigmoid(torch.ones(2))
    finally:
        warnings.showwarning = before
    return [(Path(file).name, *rest) for file, *rest in seen if "pytest" not in file]


@program
def hooks_the_end_of_a_thread():
    seen, before = [], threading.excepthook
    threading.excepthook = lambda said: seen.append((said.exc_type, str(said.exc_value)))

    def fail():
        work()
        raise ValueError("on a thread")

    try:
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
    finally:
        threading.excepthook = before
    return seen


# --- imports ----------------------------------------------------------------------------------


@contextlib.contextmanager
def folder_of(**files):
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            Path(folder, f"{name}.py").write_text(text)
        sys.path.insert(0, folder)
        try:
            yield Path(folder)
        finally:
            sys.path.remove(folder)
            for name in [n for n in sys.modules if n.partition(".")[0] in files]:
                del sys.modules[name]
            sys.path_importer_cache.pop(folder, None)
            linecache.checkcache()


MODULE = "import torch\nX = torch.ones(3)\ndef f(): return X * 2\n"


@program
def imports_on_threads_at_once():
    slow = "import time\ntime.sleep(0.02)\nimport torch\nX = torch.ones(3)\n"
    with folder_of(slow_in_a_body=slow):
        found = []

        def load():
            found.append(importlib.import_module("slow_in_a_body").X)

        threads = [threading.Thread(target=load) for _ in range(3)]
        for thread in threads:
            thread.start()
        load()
        for thread in threads:
            thread.join()
        return found, all(x is found[0] for x in found)


class Transforming(importlib.abc.SourceLoader):
    def get_filename(self, name):
        return f"<{name}>"

    def get_data(self, path):
        return b"import torch\nx = 1 + 2\n"

    def source_to_code(self, data, path, *, _optimize=-1):
        tree = ast.parse(data)
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, int):
                node.value *= 10
        return compile(tree, path, "exec", dont_inherit=True)


@program
def loads_code_that_was_marshalled():
    made = compile("import torch\ny = torch.ones(2) + 1\n", "<kept>", "exec")
    names = {}
    exec(marshal.loads(marshal.dumps(made)), names)
    return names["y"], made.co_filename


# --- what stays open --------------------------------------------------------------------------


_open: list[object] = []


@program
def leaves_a_generator_open():
    def batches():
        x = torch.ones(3)
        try:
            while True:
                yield x
                x = x + 1
        finally:
            seen.append("closed")

    seen, there = [], batches()
    found = [next(there), next(there)]
    _open[:] = [there]
    frame = there.gi_frame.f_lineno - batches.__code__.co_firstlineno
    _open.clear()
    del there
    return found, frame, seen


@program
def throws_into_a_generator():
    def accumulates():
        total = torch.zeros(2)
        while True:
            try:
                total = total + (yield total)
            except ValueError:
                total = work(2)

    there = accumulates()
    next(there)
    return there.send(torch.ones(2)), there.throw(ValueError()), there.send(torch.ones(2))


@program
def leaves_a_block_through_a_generator():
    def within():
        with torch.no_grad():
            yield torch.is_grad_enabled()

    there = within()
    found = next(there), torch.is_grad_enabled()
    there.close()
    return found, torch.is_grad_enabled()


@program
def runs_tasks_side_by_side():
    name = contextvars.ContextVar("name", default="none")

    async def part(n):
        name.set(str(n))
        x = torch.ones(n, requires_grad=True)
        await asyncio.sleep(0)
        (x * 2).sum().backward()
        await asyncio.sleep(0)
        return x.grad, name.get()

    async def main():
        found = await asyncio.gather(*(part(n) for n in (1, 2, 3)))
        try:
            await asyncio.wait_for(asyncio.sleep(10), 0.01)
        except TimeoutError:
            found.append("late")
        return found

    return asyncio.run(main()), name.get()


@program
def hears_signals_in_a_loop():
    async def main():
        loop, heard = asyncio.get_running_loop(), asyncio.Event()
        loop.add_signal_handler(signal.SIGUSR2, heard.set)
        try:
            os.kill(os.getpid(), signal.SIGUSR2)
            await asyncio.wait_for(heard.wait(), 10)
        finally:
            loop.remove_signal_handler(signal.SIGUSR2)
        return work()

    return asyncio.run(main())


# --- the language -----------------------------------------------------------------------------


@program
def inspects_its_stack():
    def inner():
        return [f.function for f in inspect.stack()[:2]], sys._getframe(1).f_code.co_name

    layer, seen = nn.Linear(2, 2), []
    layer.register_forward_hook(lambda *_: seen.append(sys._getframe(1).f_code.co_name))
    layer(torch.ones(1, 2))
    return inner(), seen, inspect.getsource(work)


@program
def changes_the_builtins():
    seen, original = [], builtins.isinstance
    builtins.isinstance = lambda thing, kind: (seen.append(1), original(thing, kind))[1]
    try:
        found = isinstance(torch.ones(1), torch.Tensor)
        return found, len(seen) > 0
    finally:
        builtins.isinstance = original


MOCKED = (
    *("time.time_ns", "time.monotonic", "time.thread_time", "time.perf_counter_ns"),
    *("gc.enable", "gc.disable", "gc.isenabled", "gc.get_count", "gc.set_threshold"),
    *("gc.get_objects", "gc.get_referents", "gc.get_stats", "weakref.getweakrefs"),
    *("threading.get_ident", "threading.current_thread", "ctypes.byref", "io.open"),
    *("os.stat", "os.getcwd", "os.path.exists", "os.path.realpath", "os.dup", "os.dup2"),
    *("os.close", "os.write", "os.fdopen", "os.fspath", "builtins.open", "pathlib.Path.stat"),
    *("pathlib.Path.exists", "linecache.getlines", "inspect.getsource", "tempfile.TemporaryFile"),
)


@program
def swaps_the_code_of_a_function():
    def first(x):
        return x + 1

    def second(x):
        return x * 3

    before = first(torch.ones(2))
    first.__code__ = second.__code__
    return before, first(torch.ones(2)), types.FunctionType(second.__code__, {})(torch.ones(1))


@program
def raises_at_odd_places():
    seen: list[object] = []
    try:
        try:
            raise ValueError(1)
        finally:
            work()
            seen.append(sys.exc_info()[0])
            torch.ones(2) @ torch.ones(3)
    except RuntimeError as error:
        seen += [type(error.__context__), error.__cause__]
    return seen, sys.exc_info()


# --- references -------------------------------------------------------------------------------


@program
def closes_a_cycle_through_its_frame():
    class Kept:
        pass

    def raises():
        kept = Kept()
        gone.append(weakref.ref(kept))
        try:
            raise ValueError
        except ValueError as error:
            stored = error
            return stored.args

    gone = []
    raises()
    before = gone[0]() is None
    gc.collect()
    return before, gone[0]() is None


@program
def finalises_in_order():
    seen = []

    class Noted:
        def __init__(self, name):
            self.name, self.x = name, torch.ones(2)

        def __del__(self):
            seen.append((self.name, float(self.x.sum())))
            work()

    a: Any = Noted("a")
    b: Any = Noted("b")
    a.other, b.other = b, a
    weakref.finalize(a, seen.append, ("finalised", 0.0)).atexit = False
    del a, b
    gc.collect()
    return sorted(map(str, seen)), len(seen)


@program
def watches_the_collector():
    seen = []

    def note(phase, facts):
        if phase == "stop":
            seen.append((facts["generation"], facts["uncollectable"]))

    gc.callbacks.insert(0, note)
    try:
        for generation in (0, 1, 2):
            gc.collect(generation)
    finally:
        gc.callbacks.remove(note)
    return seen, gc.isenabled()


@program
def looks_at_what_is_tracked():
    layer, x = nn.Linear(2, 2), torch.ones(2)
    found = [gc.is_tracked(thing) for thing in (layer, x, {}, [x], 1)]
    mine = [o for o in gc.get_objects() if isinstance(o, nn.Linear) and o is layer]
    return found, len(mine), len(gc.get_objects(0)) > 0


# --- torch ------------------------------------------------------------------------------------


class Swaps(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.add:
            return torch.sub(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


@prepared
def leaves_a_mode_of_before():
    mode = Swaps()
    mode.__enter__()

    def run():
        found = torch.add(torch.ones(2), 1)
        mode.__exit__(None, None, None)
        return found, torch.add(torch.ones(2), 1)

    return run


@program
def enters_what_another_generator_leaves():
    stack = contextlib.ExitStack()
    stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda x: x * 2, lambda x: x))
    stack.enter_context(torch.enable_grad())
    x = torch.ones(3, requires_grad=True)
    y = x.exp() * x
    stack.close()
    y.sum().backward()
    return x.grad


@program
def exports_with_shapes_of_any_size():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x):
            self.get_buffer("count").add_(1)
            return self.layer(x).relu()

    size = torch.export.Dim("size", min=2, max=64)
    made = torch.export.export(Net(), (torch.ones(4, 3),), dynamic_shapes=({0: size},))
    file = io.BytesIO()
    torch.export.save(made, file)
    file.seek(0)
    again: Any = torch.export.load(file).module()
    return again(torch.ones(7, 3)), again.count, made.graph_signature.buffers_to_mutate


@program
def steps_with_a_closure_and_hooks():
    seen, layer = [], nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    optimizer.register_state_dict_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_load_state_dict_post_hook(lambda *_: seen.append("post"))
    handle = optimizer.register_step_pre_hook(lambda o, a, k: ((o, lambda: work().sum()), k))

    def closure():
        seen.append("closure")

    optimizer.step(closure)
    handle.remove()
    optimizer.load_state_dict(optimizer.state_dict())
    return seen, layer.state_dict()


@program
def counts_versions_and_hooks_by_number():
    layer = nn.Linear(2, 2)
    handles = [layer.register_forward_hook(lambda *_: None) for _ in range(3)]
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        x = torch.ones(2, requires_grad=True)
        y = x * 1
        z = y.exp()
        y.add_(1)
        z.sum().backward()
    found = [handle.id - handles[0].id for handle in handles]
    for handle in handles:
        handle.remove()
    return found, x.grad, y._version
