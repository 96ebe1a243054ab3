"""Programs with rare habits: tools that listen, imports of odd kinds, objects that stay open."""

from __future__ import annotations

import functools
import gc
import inspect
import sys
import types

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
def swaps_the_code_of_a_function():
    def first(x):
        return x + 1

    def second(x):
        return x * 3

    before = first(torch.ones(2))
    first.__code__ = second.__code__
    return before, first(torch.ones(2)), types.FunctionType(second.__code__, {})(torch.ones(1))


# --- references -------------------------------------------------------------------------------


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
