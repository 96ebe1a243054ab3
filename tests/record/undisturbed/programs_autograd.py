"""Programs that look into autograd: functions, hooks, transforms, modes and views."""

from __future__ import annotations

import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.autograd import Function, forward_ad, functional, graph
from torch.func import (
    functional_call,
    functionalize,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

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
def runs_a_function_of_its_own():
    x = leaf(4)
    Cubed.apply(x).sum().backward()
    return x.grad


@program
def runs_backward_twice():
    x = leaf(4)
    (first,) = torch.autograd.grad(Cubed.apply(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    return first, second


class InPlace(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


@program
def changes_an_input_in_a_function():
    x = leaf(4)
    y = x * 1
    InPlace.apply(y)
    y.sum().backward()
    return x.grad, y, y._version


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
def runs_hooks_of_tensors():
    x, seen = leaf(4), []
    y = x * 2
    y.retain_grad()
    handles = [x.register_hook(lambda g: g * 10), y.register_hook(seen.append)]
    x.register_post_accumulate_grad_hook(lambda t: seen.append(t.grad.clone()))
    y.sum().backward()
    for handle in handles:
        handle.remove()
    return x.grad, y.grad, seen, x._backward_hooks


@program
def runs_hooks_of_modules():
    layer, seen = nn.Linear(4, 2), []

    def note(name):
        return lambda *args: seen.append((name, len(args)))

    handles = [
        layer.register_forward_pre_hook(note("before")),
        layer.register_forward_hook(note("after"), always_call=True),
        layer.register_full_backward_pre_hook(note("backward")),
        layer.register_full_backward_hook(note("gradient")),
        layer.register_state_dict_pre_hook(note("state")),
    ]
    layer(leaf(2, 4)).sum().backward()
    layer.state_dict()
    for handle in handles:
        handle.remove()
    return seen, len(layer._forward_hooks)


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
def uses_multi_grad_hooks():
    a, b, seen = leaf(2), leaf(2), []
    with graph.register_multi_grad_hook((a, b), seen.append):
        (a * b).sum().backward()
    return seen


@program
def detects_an_anomaly():
    x = torch.zeros(1, requires_grad=True)
    with torch.autograd.detect_anomaly(check_nan=True), pytest.raises(RuntimeError) as raised:
        (x / x).sum().backward()
    return raised.value


@program
def checks_gradients():
    x = torch.randn(3, dtype=torch.double, requires_grad=True)
    return torch.autograd.gradcheck(Cubed.apply, (x,)), torch.autograd.gradgradcheck(
        Cubed.apply, (x,)
    )


@program
def takes_jacobians():
    x = torch.randn(3)

    def f(x):
        return x.exp() * x.sum()

    return (
        functional.jacobian(f, x),
        functional.hessian(lambda x: f(x).sum(), x),
        functional.vhp(lambda x: f(x).sum(), x, torch.ones(3)),
        jacrev(f)(x),
        jacfwd(f)(x),
        hessian(lambda x: f(x).sum())(x),
    )


@program
def differentiates_forward():
    x, tangent = torch.randn(3), torch.ones(3)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangent)
        out = forward_ad.unpack_dual((dual * dual).sin())
    return out.primal, out.tangent, jvp(torch.sin, (x,), (tangent,))


@program
def transforms_a_model():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), torch.randn(5, 4)
    weights = dict(model.named_parameters())

    def loss(weights, row):
        return functional_call(model, weights, (row[None],)).sum()

    per_sample = vmap(grad(loss), (None, 0))(weights, x)
    return per_sample, grad_and_value(loss)(weights, x[0]), vjp(torch.sin, x)[1](torch.ones(5, 4))


@program
def stacks_models():
    models = [nn.Linear(4, 2) for _ in range(3)]
    weights, buffers = stack_module_state(models)

    def call(weights, buffers, x):
        return functional_call(models[0], (weights, buffers), (x,))

    return vmap(call, (0, 0, None))(weights, buffers, torch.randn(2, 4))


@program
def maps_with_randomness():
    rows = torch.zeros(4, 3)
    different = vmap(lambda r: r + torch.randn(3), randomness="different")(rows)
    same = vmap(lambda r: r + torch.randn(3), randomness="same")(rows)
    try:
        vmap(lambda r: r + torch.randn(3))(rows)
    except RuntimeError as error:
        return different, same, type(error)
    return None


@program
def nests_transforms():
    x = torch.randn(3, 2)
    out, tangents = linearize(torch.sin, x)
    return (
        vmap(vmap(lambda v: v * 2))(x),
        grad(lambda v: grad(lambda w: (w**3).sum())(v).sum())(x),
        functionalize(lambda v: v.clone().add_(1))(x),
        out,
        tangents(torch.ones(3, 2)),
    )


@program
def learns_to_learn():
    weight, data = torch.randn(4), torch.randn(3, 4)

    def inner(weight, row):
        step = grad(lambda w: (w * row).sum().square())(weight)
        return ((weight - 0.1 * step) * row).sum().square()

    return grad(lambda w: vmap(inner, (None, 0))(w, data).mean())(weight)


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
def switches_gradients():
    x = leaf(3)
    seen = []
    with torch.no_grad():
        seen.append((x * 2).requires_grad)
        with torch.enable_grad():
            seen.append((x * 2).requires_grad)
    with torch.set_grad_enabled(False):
        seen.append(torch.is_grad_enabled())
    torch.set_grad_enabled(False)
    try:
        seen.append((x * 2).requires_grad)
    finally:
        torch.set_grad_enabled(True)
    return seen


@program
def leaves_gradients_off():
    """What a body leaves is left; the next program has to begin with it."""
    torch.set_grad_enabled(False)
    result = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    return result


@program
def changes_views_in_place():
    x = leaf(4, 4)
    y = x * 1
    view = y[1:3].t()
    view.mul_(3)
    y[0].zero_()
    y.sum().backward()
    return x.grad, view, y._version, view._is_view(), view._base is y


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


@program
def keeps_a_graph():
    x = leaf(3)
    loss = x.exp().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    try:
        loss.backward()
    except RuntimeError as error:
        return x.grad, type(error)
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


class Dispatched(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", str(func))
        # torch's own tracer looks at the ``.grad`` of each parameter of a module that is called.
        if name != "__get__":
            self.names.append(name)
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


@program
def counts_dispatched_operators():
    layer = nn.Linear(4, 4)
    with Dispatched() as mode:
        layer(torch.ones(2, 4)).relu().sum().backward()
    return mode.names


@program
def counts_functions():
    with Called() as mode:
        layer = nn.Linear(4, 4)
        layer(torch.ones(2, 4)).relu().sum().backward()
        torch.optim.SGD(layer.parameters(), 0.1).step()
    return mode.names


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
        name = getattr(func, "__name__", str(func))
        if name != "__get__":
            cls.seen.append(name)
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
