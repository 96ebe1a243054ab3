"""Programs that compile: dynamo, inductor, export, FX, TorchScript; first runs and warm ones."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

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


def saves_in_another_way(model, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t):
        return model(x).exp().sum()


def trained(model, function, **changes):
    x = torch.randn(2, 4)

    def run():
        with torch._dynamo.config.patch(**changes):
            function(x).sum().backward()
        return [p.grad for p in model.parameters()]

    return run


def the_backward_pass_too():
    model = Layers()
    return trained(model, compiled(model), compiled_autograd=True)


def with_hooks_that_come_and_go():
    model, x = Layers(), torch.randn(3, 4)
    function = compiled(model)

    def run():
        found = [function(x)]
        for register in (
            model.register_forward_hook,
            nn.modules.module.register_module_forward_hook,
        ):
            handle = register(lambda module, inputs, output: output * 2)
            try:
                found.append(function(x))
            finally:
                handle.remove()
        return found

    return run


def ignore(*_):
    """Is a hook that does nothing."""


REGISTER = (
    nn.modules.module.register_module_module_registration_hook,
    nn.modules.module.register_module_parameter_registration_hook,
    register_optimizer_step_pre_hook,
)


def steps():
    model, x = Layers(), torch.randn(2, 4)
    optimizer = torch.optim.AdamW(model.layers[:2].parameters(), foreach=True)
    function, step = compiled(model), compiled(optimizer.step)

    def run():
        function(x).sum().backward()
        step()
        optimizer.zero_grad()
        return model.state_dict()

    return run


@nightly
@prepared
def runs_compiled_beside_hooks_of_the_users():
    handles = [register(ignore) for register in REGISTER]
    run = steps()
    run(), run()

    def again():
        try:
            with torch._dynamo.config.patch(error_on_recompile=True):
                return counted(run())
        finally:
            for handle in handles:
                handle.remove()

    return again


@nightly
@prepared
def runs_compiled_beside_hooks_that_come_and_go():
    """Dynamo guards on the number of a hook, and each registration has its own: bare, too."""
    run = steps()

    def with_hooks():
        handles = [register(ignore) for register in REGISTER]
        try:
            return run()
        finally:
            for handle in handles:
                handle.remove()

    with_hooks(), with_hooks()
    before = counts()
    return lambda: (before, counted(with_hooks()))


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.sin else out


def in_a_mode():
    function = compiled(lambda x: torch.sin(x) + 1)

    def run():
        with Doubling():
            return function(torch.ones(3))

    return run


def on_a_thread():
    function = compiled(lambda x: x.sin() + 1)

    def run():
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(function, torch.ones(3)).result()

    return run


def has_side_effects():
    # To name such a function imports the compiler.
    @torch.compiler.disable(recursive=False)
    def as_it_is(x):
        return x * 2

    @torch.compiler.assume_constant_result
    def a_constant():
        return 3

    model, x, kept = Layers(), torch.randn(2, 4), []

    def step():
        model.count = 1 + model.count % 2
        kept.append(model(x).sum())
        y = kept.pop()
        return as_it_is(y) * a_constant() + len(kept)

    return compiled(step)


KINDS = {
    "module": a_module(),
    "hooks": a_function(with_hooks),
    "autograd_function": a_function(lambda m, x: Cubed.apply(m(x))),
    "inductor_module": a_module(backend="inductor"),
    "side_effects": has_side_effects,
    "saving": a_function(saves_in_another_way),
    "backward": the_backward_pass_too,
    "other_hooks": with_hooks_that_come_and_go,
    "mode": in_a_mode,
    "thread": on_a_thread,
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
