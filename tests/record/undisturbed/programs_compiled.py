"""Programs that compile: dynamo, inductor, export, FX, TorchScript; first runs and warm ones."""

from __future__ import annotations

import copy
import warnings

import torch
from torch import fx, nn
from torch.func import grad, vmap
from torch.utils.checkpoint import checkpoint

from tests.record.undisturbed.state import counts, nightly, prepared, program


class Layers(nn.Module):
    """Slices its layers, as models of transformers do."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.count = 2

    def forward(self, x):
        for layer in self.layers[: self.count]:
            x = layer(x).relu()
        return x


def compiled(function, **options):
    return torch.compile(function, **{"backend": "aot_eager", **options})


def counted(*results):
    """Results with what dynamo has counted until now."""
    return results, counts()


def first_and_warm(name, make):
    """Enter two programs: the first run of compiled code, and a later one."""

    def first():
        run = make()
        return lambda: counted(run(), run())

    def warm():
        run = make()
        run(), run()

        def again():
            with torch._dynamo.config.patch(error_on_recompile=True):
                return counted(run())

        return again

    for kind, entered in (("first", first), ("warm", warm)):
        entered.__name__ = f"runs_compiled_{name}_{kind}"
        prepared(entered)
        # Each takes a second. The tests of compiled regions go through most of these, too.
        if name != "module":
            nightly(entered)


def a_module(**options):
    def make():
        model, x = Layers(), torch.randn(2, 4)
        function = compiled(model, **options)

        def run():
            function(x).sum().backward()
            return [p.grad for p in model.parameters()]

        return run

    return make


def a_function(function, **options):
    def make():
        model, x = Layers(), torch.randn(2, 4)
        return compiled(lambda: function(model, x), **options)

    return make


def broken(model, x):
    y = model(x)
    torch._dynamo.graph_break()
    return y.sum() if float(y.detach().sum()) > 1e9 else model(y)


def an_optimizer(kind):
    def make():
        model, x = Layers(), torch.randn(2, 4)
        optimizer = kind(model.layers[:2].parameters())
        step = compiled(optimizer.step)

        def run():
            model(x).sum().backward()
            step()
            optimizer.zero_grad()
            return model.state_dict()

        return run

    return make


def a_whole_step():
    model, x = Layers(), torch.randn(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @compiled
    def run():
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return run


def many_shapes(**options):
    def make():
        model = Layers()
        function = compiled(model, **options)
        return lambda: [function(torch.ones(n, 4)) for n in (2, 3, 5)]

    return make


def with_hooks(model, x):
    handle = model.layers[0].register_forward_hook(lambda m, i, o: o * 2)
    try:
        return model(x)
    finally:
        handle.remove()


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3 * ctx.saved_tensors[0] ** 2


def annotated(model, x):
    with torch.profiler.record_function("mine"):
        return model(x)


def annotated_in_what_is_not_traced(model, x):
    return torch.compiler.disable(annotated, recursive=False)(model, x)


def without_gradients(model, x):
    with torch.no_grad():
        return model(x)


def in_low_precision(model, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(x).float()


def of_a_conditional(model, x):
    return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))


KINDS = {
    "module": a_module(),
    "fullgraph": a_module(fullgraph=True),
    "module_eagerly": a_module(backend="eager"),
    "module_of_any_shape": many_shapes(dynamic=True),
    "module_of_many_shapes": many_shapes(),
    "function": a_function(lambda m, x: x.sin() + x.cos()),
    "graph_break": a_function(broken),
    "adam": an_optimizer(lambda p: torch.optim.AdamW(p, foreach=True)),
    "sgd": an_optimizer(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
    "step": a_whole_step,
    "hooks": a_function(with_hooks),
    "autograd_function": a_function(lambda m, x: Cubed.apply(m(x))),
    "annotation": a_function(annotated),
    "annotation_not_traced": a_function(annotated_in_what_is_not_traced),
    "inference": a_function(without_gradients),
    "autocast": a_function(in_low_precision),
    "transform": a_function(lambda m, x: vmap(grad(lambda r: (r * r).sum()))(x)),
    "checkpoint": a_function(lambda m, x: checkpoint(m, x, use_reentrant=False)),
    "gradient": a_function(lambda m, x: torch.autograd.grad(m(x).sum(), m.layers[0].weight)),
    "copy": a_function(lambda m, x: copy.deepcopy(m)(x)),
    "disabled": a_function(lambda m, x: torch.compiler.disable(m.forward)(x) + 1),
    "condition": a_function(of_a_conditional),
    "dropout": a_function(lambda m, x: nn.functional.dropout(x, 0.5)),
    "new_module": a_function(lambda m, x: nn.Linear(4, 2)(x)),
    "inductor_function": a_function(lambda m, x: x.sin() + x.cos(), backend="inductor"),
    "inductor_module": a_module(backend="inductor"),
}
for name, make in KINDS.items():
    first_and_warm(name, make)


@program
def fails_to_be_compiled():
    def fail(*_):
        raise ValueError("no backend")

    try:
        torch.compile(lambda x: x + 1, backend=fail)(torch.ones(2))
    except Exception as error:
        return type(error).__name__, "no backend" in str(error)
    return None


@program
def resets_the_compiler_that_compiled():
    function = compiled(lambda x: x * 2)
    function(torch.ones(2))
    torch.compiler.reset()
    return counted(function(torch.ones(2)))


@program
def explains_what_is_compiled():
    found = torch._dynamo.explain(lambda x: x.sin() + 1)(torch.ones(2))
    return found.graph_count, found.graph_break_count


@program
def exports_what_is_not_compiled():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, x):
            return self.linear(x).relu()

    model = Model()
    exported = torch.export.export(model, (torch.ones(2, 4),))
    return exported.module()(torch.ones(2, 4)), [n.name for n in exported.graph.nodes]


@program
def traces_symbolically():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    traced = fx.symbolic_trace(model)
    fx.passes.shape_prop.ShapeProp(traced).propagate(torch.ones(2, 4))
    made = fx.experimental.proxy_tensor.make_fx(lambda x: x.sin() * 2)(torch.ones(2))
    return traced.code, made.code, traced(torch.ones(2, 4))


@program
def interprets_a_graph():
    traced = fx.symbolic_trace(lambda x: x + 1)
    return fx.Interpreter(traced).run(torch.ones(2))


def branches(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if x.sum() > 0 else x - 1


@program
def scripts():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function = torch.jit.script(branches)
        model = torch.jit.script(nn.Sequential(nn.Linear(4, 2), nn.ReLU()))
        return function.code, function(torch.ones(2)), model(torch.ones(1, 4)), model.code


@program
def traces_for_torchscript():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5)).eval()
        traced = torch.jit.trace(model, torch.ones(1, 4))
        frozen = torch.jit.freeze(traced)
        fork = torch.jit.fork(torch.add, torch.ones(2), 1)
        return traced.code, frozen(torch.ones(1, 4)), torch.jit.wait(fork)
