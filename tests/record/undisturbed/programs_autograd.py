"""Programs that look into autograd: functions, hooks, transforms, modes and views."""

from __future__ import annotations

import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.autograd import Function, graph
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    vjp,
    vmap,
)
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode

from tests.record.undisturbed.state import prepared, program


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


class Cubed(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.mark_non_differentiable(torch.ones(1))
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 3 * x**2


@program
def runs_backward_twice():
    x = leaf(4)
    (first,) = torch.autograd.grad(Cubed.apply(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    return first, second


class Transformed(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0].cos()

    @staticmethod
    def jvp(ctx, tangent):
        return tangent * ctx.saved_tensors[0].cos()


@program
def transforms_a_function_of_its_own():
    rows = torch.randn(3, 4)
    return vmap(grad(lambda r: Transformed.apply(r).sum()))(rows)


@program
def raises_in_a_backward_pass():
    x = leaf(4)

    def fail(_):
        raise ValueError("in a hook")

    x.register_hook(fail)
    try:
        (x * 2).sum().backward()
    except ValueError as error:
        return error, x.grad
    return None


@program
def runs_global_hooks():
    seen = []
    module = torch.nn.modules.module
    handles = [
        module.register_module_forward_hook(lambda m, *_: seen.append(type(m).__name__)),
        module.register_module_full_backward_hook(lambda m, *_: seen.append("backward")),
        module.register_module_parameter_registration_hook(lambda m, n, p: seen.append(n)),
        module.register_module_module_registration_hook(lambda m, n, c: seen.append(n)),
    ]
    try:
        nn.Sequential(nn.Linear(4, 4), nn.ReLU())(leaf(2, 4)).sum().backward()
    finally:
        for handle in handles:
            handle.remove()
    return seen


@program
def leaves_a_global_hook():
    """What a body registers stays."""
    before = len(nn.modules.module._global_forward_hooks)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    after = len(nn.modules.module._global_forward_hooks)
    handle.remove()
    return after - before


@program
def runs_optimizer_hooks():
    layer, seen = nn.Linear(2, 2), []
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    handles = [
        optimizer.register_step_pre_hook(lambda *_: seen.append("before")),
        optimizer.register_step_post_hook(lambda *_: seen.append("after")),
        register_optimizer_step_post_hook(lambda *_: seen.append("all")),
    ]
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for handle in handles:
        handle.remove()
    return seen


@program
def packs_saved_tensors():
    x, seen = leaf(8, 8), []

    def pack(tensor):
        seen.append(tuple(tensor.shape))
        return tensor.to(torch.float64)

    with graph.saved_tensors_hooks(pack, lambda t: t.to(torch.float32)):
        loss = (x.exp() @ x).tanh().sum()
    loss.backward()
    with graph.save_on_cpu():
        x.exp().sum().backward()
    return seen, x.grad


@program
def forbids_saved_tensors():
    x = leaf(4)
    with graph.disable_saved_tensors_hooks("not here"):
        x.exp().sum().backward()
        hooks = graph.saved_tensors_hooks(lambda t: t, lambda t: t)
        with pytest.raises(RuntimeError, match="not here"), hooks:
            pass
    return x.grad


@program
def looks_at_a_graph():
    x = leaf(4)
    y = (x.exp() * 2).sum()
    names, node = [], y.grad_fn
    while node is not None:
        names.append(type(node).__name__)
        node.metadata["seen"] = True
        node = node.next_functions[0][0] if node.next_functions else None
    saved = y.grad_fn.next_functions[0][0].next_functions[0][0]._saved_result
    return names, saved, y.grad_fn.name()


@program
def detects_an_anomaly():
    x = torch.zeros(1, requires_grad=True)
    with torch.autograd.detect_anomaly(check_nan=True), pytest.raises(RuntimeError) as raised:
        (x / x).sum().backward()
    return raised.value


@program
def transforms_a_model():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(5, 4)
    weights = dict(model.named_parameters())

    def loss(weights, row):
        return functional_call(model, weights, (row[None],)).sum()

    per_sample = vmap(grad(loss), (None, 0))(weights, x)
    return per_sample, grad_and_value(loss)(weights, x[0]), vjp(torch.sin, x)[1](torch.ones(5, 4))


@program
def infers():
    with torch.inference_mode():
        x = torch.randn(3)
        y = x * 2
    try:
        y.requires_grad_()
        (y * y).sum().backward()
    except RuntimeError as error:
        return error, y.is_inference()
    return y.grad


@program
def changes_what_is_saved():
    x = leaf(3)
    y = x.exp()
    y.add_(1)
    try:
        y.sum().backward()
    except RuntimeError as error:
        return str(error)[:60]
    return None


class Noted(Function):
    """Keeps an object in its graph, which tells when that is gone."""

    @staticmethod
    def forward(ctx, x, noted):
        ctx.noted = noted
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2, None


@program
def frees_a_graph():
    class Kept:
        pass

    kept, x = Kept(), leaf(3)
    gone = weakref.ref(kept)
    loss = Noted.apply(x, kept).sum()
    del kept
    before = gone() is None
    loss.backward()
    del loss
    return before, gone() is None


@program
def runs_backward_within_backward():
    x = leaf(3)

    def hook(gradient):
        with torch.enable_grad():
            y = leaf(3)
            (y * 2).sum().backward()
        return gradient + y.grad

    y = x * 2
    y.register_hook(hook)
    y.sum().backward()
    return x.grad


@program
def queues_a_callback():
    x, seen = leaf(3), []

    def hook(gradient):
        torch.autograd.Variable._execution_engine.queue_callback(lambda: seen.append("at the end"))
        return gradient

    x.register_hook(hook)
    (x * 2).sum().backward()
    return seen, x.grad


class Called(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


@program
def warns_in_backward_passes():
    # Filters name the module that the engine is called from.
    def hook(gradient):
        warnings.warn("mine", stacklevel=2)

    x, always = torch.ones(2, requires_grad=True), torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            y = x * x
            y.register_hook(hook)
            y.sum().backward(create_graph=True)
            torch.autograd.grad(y.sum(), x)
    finally:
        torch.set_warn_always(always)
    x.grad = None
    return [(w.filename, w.lineno, str(w.message)) for w in seen]


@prepared
def runs_in_a_mode_of_before():
    mode = Called()

    def run():
        with mode:
            torch.ones(3).add(1)
        return mode.names

    return run


class Logged(torch.Tensor):
    seen = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})


@program
def logs_in_a_subclass():
    Logged.seen.clear()
    x = torch.ones(3).as_subclass(Logged).requires_grad_()
    layer = nn.Linear(3, 2)
    layer(x * 2).sum().backward()
    return list(Logged.seen), type(x.grad).__name__


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = [a.inner if isinstance(a, cls) else a for a in args]
        return cls(func(*plain, **(kwargs or {})))


@program
def wraps_a_tensor():
    return (Wrapper(torch.ones(3)) * 2 + 1).inner
