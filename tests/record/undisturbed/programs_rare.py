"""Programs with rare habits: tools that listen, imports of odd kinds, objects that stay open."""

from __future__ import annotations

import abc
import ast
import asyncio
import bdb
import builtins
import code
import collections
import contextlib
import contextvars
import copyreg
import dis
import doctest
import enum
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
import operator
import os
import pickle
import queue
import runpy
import shelve
import signal
import subprocess
import sys
import tempfile
import threading
import time
import trace
import traceback
import tracemalloc
import types
import typing
import unittest
import warnings
import weakref
import zipfile
import zipimport
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from tests.record.undisturbed.programs_python import imported_by
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


@program
def counts_lines():
    tracer = trace.Trace(count=True, trace=False)
    before = sys.gettrace()
    try:
        tracer.runfunc(work)
    finally:
        sys.settrace(before)
    counts = tracer.results().counts
    return sorted(n for (file, _), n in counts.items() if file == __file__)


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
def traces_opcodes():
    seen = []

    def note(frame, event, _):
        frame.f_trace_opcodes = True
        if frame.f_code is work.__code__:
            seen.append(event)
            return note
        return None

    before = sys.gettrace()
    sys.settrace(note)
    try:
        work()
    finally:
        sys.settrace(before)
    return collections.Counter(seen)


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
def imports_from_an_archive():
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "archive.zip"))
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("zipped_by_a_body.py", MODULE)
        sys.path.insert(0, path)
        try:
            module = importlib.import_module("zipped_by_a_body")
            return module.f(), isinstance(module.__loader__, zipimport.zipimporter)
        finally:
            sys.path.remove(path)
            sys.modules.pop("zipped_by_a_body", None)
            sys.path_importer_cache.pop(path, None)


@program
def imports_what_runs_later():
    with folder_of(lazy_in_a_body=MODULE):
        spec: Any = importlib.util.find_spec("lazy_in_a_body")
        loader = importlib.util.LazyLoader(spec.loader)
        spec.loader = loader
        module = importlib.util.module_from_spec(spec)
        sys.modules["lazy_in_a_body"] = module
        loader.exec_module(module)
        before = type(module).__name__
        return before, module.f(), type(module).__name__


@program
def imports_in_a_circle():
    first = "import torch\nimport circle_b\ndef f(): return circle_b.Y\nX = torch.ones(2)\n"
    with folder_of(circle_a=first, circle_b="import circle_a\nY = hasattr(circle_a, 'X')\n"):
        return importlib.import_module("circle_a").f(), sys.modules["circle_b"].Y


@program
def imports_a_name_that_is_made():
    text = "import torch\ndef __getattr__(name):\n    return torch.ones(len(name))\n"
    with folder_of(made_names=text):
        module = importlib.import_module("made_names")
        from made_names import abc as made

        return made, module.longer, "abc" in vars(module)


@program
def imports_what_fails():
    with folder_of(fails_in_a_body="import torch\nX = torch.ones(3)\nraise KeyError('no')\n"):
        try:
            importlib.import_module("fails_in_a_body")
        except KeyError as error:
            # An import has two or three frames more of the kind that Python has by itself.
            frames = traceback.extract_tb(error.__traceback__)
            names = [f.name for f in frames if f.filename != "<frozen importlib._bootstrap>"]
            return names, "fails_in_a_body" in sys.modules
    return None


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


@program
def runs_a_file_and_a_module():
    with folder_of(run_by_a_body=MODULE + "NAME = __name__\n") as folder:
        by_path = runpy.run_path(str(folder / "run_by_a_body.py"), run_name="mine")
        by_name = runpy.run_module("run_by_a_body", alter_sys=True)
        return by_path["X"], by_path["NAME"], by_name["NAME"], by_name["f"]()


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


class TransformingFinder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "transformed_in_a_body":
            return None
        return importlib.util.spec_from_loader(name, Transforming())


@program
def rewrites_what_it_imports():
    return imported_by("transformed_in_a_body", TransformingFinder()).x


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
def leaves_a_loop_open():
    loop = asyncio.new_event_loop()

    async def part(n):
        await asyncio.sleep(0)
        return work(n)

    found = [loop.run_until_complete(part(n)) for n in (1, 2)]
    task = loop.create_task(part(3))
    loop.run_until_complete(asyncio.sleep(0))
    task.cancel()
    loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    loop.close()
    return found, task.cancelled()


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


@program
def talks_to_a_process():
    async def main():
        made = await asyncio.create_subprocess_exec(
            "cat", stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        said, _ = await made.communicate(b"abc")
        for thread in threading.enumerate():
            if "waitpid" in thread.name:
                thread.join()
        return said, work()

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
def reads_bytecode():
    out = io.StringIO()
    dis.dis(work, file=out)
    return out.getvalue(), work.__code__.co_consts, list(dis.findlinestarts(work.__code__))


@program
def talks_to_a_console():
    out = io.StringIO()
    console = code.InteractiveConsole({"torch": torch})
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        more = [console.push(line) for line in ("x = torch.ones(2)", "print(x.sum())", "1 +", "y")]
    return more, out.getvalue()


@program
def tests_its_docstrings():
    source = ">>> import torch\n>>> torch.ones(2).sum()\ntensor(2.)\n>>> torch.zeros(1)\n0\n"
    test = doctest.DocTestParser().get_doctest(source, {}, "made", None, 0)
    out = io.StringIO()
    return tuple(doctest.DocTestRunner(verbose=False).run(test, out=out.write)), out.getvalue()


@program
def runs_tests_of_its_own():
    class Case(unittest.TestCase):
        def test_passes(self):
            work()

        def test_fails(self):
            with self.subTest(n=1):
                self.assertEqual(float(torch.ones(2).sum()), 3)  # noqa: PT009

    out = io.StringIO()
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(Case)
    found = unittest.TextTestRunner(stream=out).run(suite)
    return found.testsRun, len(found.failures), "AssertionError: 2.0 != 3" in out.getvalue()


@program
def dispatches_by_type():
    @functools.singledispatch
    def name(thing):
        return "other"

    name.register(torch.Tensor)(lambda x: "tensor")
    name.register(nn.Module)(lambda x: "module")
    return name(torch.ones(1)), name(nn.ReLU()), name(3), len(name.registry)


@program
def makes_classes_of_odd_kinds():
    made: list[object] = []

    class Base(abc.ABC):
        @abc.abstractmethod
        def run(self): ...

        def __init_subclass__(cls, **options):
            made.append((cls.__name__, options))

    class Slotted(Base, size=3):
        __slots__ = ("x",)

        def run(self):
            self.x = work(3)
            return self.x

    class Descriptor:
        def __set_name__(self, owner, name):
            made.append(name)

        def __get__(self, thing, kind=None):
            return torch.ones(2)

    class Has(nn.Module):
        value = Descriptor()

    return Slotted().run(), Has().value, made


class Mode(enum.IntFlag):
    FAST = 1
    EXACT = 2


@program
def registers_how_to_pickle():
    class Odd:
        def __init__(self, x):
            self.x = x

    copyreg.pickle(Odd, lambda odd: (operator.add, (odd.x, 1)))
    try:
        return pickle.loads(pickle.dumps(Odd(torch.ones(2)))), Mode.FAST | Mode.EXACT
    finally:
        copyreg.dispatch_table.pop(Odd)


@program
def keeps_tensors_on_a_shelf():
    with tempfile.TemporaryDirectory() as folder:
        with shelve.open(str(Path(folder, "kept"))) as shelf:
            shelf["x"] = torch.ones(3)
        with shelve.open(str(Path(folder, "kept"))) as shelf:
            return shelf["x"], list(shelf)


@program
def resolves_hints():
    def f(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
        return layer(x)

    hints = typing.get_type_hints(f, {**globals()})
    return hints["x"] is torch.Tensor, str(inspect.signature(f))


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
def counts_who_asks_for_the_time():
    clock = time.thread_time
    until = clock() + 0.1
    with contextlib.ExitStack() as mocks:
        mocked = [
            mocks.enter_context(mock.patch(name, side_effect=RuntimeError)) for name in MOCKED
        ]
        step()
        while clock() < until:
            torch.ones(3) + 1
        with torch.profiler.record_function("part"):
            torch.ones(3) + 1
        torch.func.grad(lambda x: x.sum())(torch.ones(3))
        return [thing.call_count for thing in mocked]


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


@program
def recurses_in_a_repr():
    class Loop:
        def __repr__(self):
            work()
            return f"<{vars(self)['inner']!r}>"

    loop: Any = Loop()
    loop.inner = loop
    try:
        repr(loop)
    except RecursionError as error:
        return type(error), work()
    return None


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
def asks_what_can_be_overridden():
    functions = torch.overrides.get_overridable_functions()
    return len(functions), torch.overrides.resolve_name(torch.Tensor.add), len(functions[torch])


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
