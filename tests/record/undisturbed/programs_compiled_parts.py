"""Programs that compile with more than a function: loops, operators and backends of their own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from tests.record.undisturbed.programs_compiled import (
    Layers,
    a_function,
    compiled,
    counted,
    first_and_warm,
)
from tests.record.undisturbed.state import counts, nightly, prepared


def loops(_, x):
    from torch._higher_order_ops.while_loop import while_loop

    return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (torch.tensor(0), x))


def scans(model, x):
    from torch._higher_order_ops.scan import scan

    def step(carry, row):
        return carry + row, carry * row

    last, rows = scan(step, torch.zeros(4), model(x))
    return last.sum() + rows.sum()


def trains_with_a_scan(wrapped):
    def make():
        model = Layers()
        return trained(model, wrapped(lambda x: scans(model, x)))

    return make


def attends(_, x):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def near(batch, head, query, key):
        return query - key < 3

    def later(score, batch, head, query, key):
        return score + query - key

    mask = create_block_mask(near, None, None, 16, 16, device="cpu")
    x = x.repeat(8, 4).view(1, 2, 16, 8)
    return flex_attention(x, x, x, score_mod=later, block_mask=mask)


def as_written(function):
    def make():
        x = torch.randn(2, 4)
        return lambda: function(None, x)

    return make


@torch.library.custom_op("undisturbed::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, gradient: gradient * 2)


def saves_in_another_way(model, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t):
        return model(x).exp().sum()


def hooks_a_tensor(model, x):
    y = model(x)
    y.register_hook(lambda gradient: gradient * 2)
    return y.sum()


def trained(model, function, **changes):
    x = torch.randn(2, 4)

    def run():
        with torch._dynamo.config.patch(**changes):
            function(x).sum().backward()
        return [p.grad for p in model.parameters()]

    return run


def each_layer_by_itself():
    model = Layers()
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    return trained(model, model)


def the_backward_pass_too():
    model = Layers()
    return trained(model, compiled(model), compiled_autograd=True)


def by_a_backend_of_its_own():
    from torch._dynamo.backends.common import aot_autograd

    model = Layers()
    backend = aot_autograd(fw_compiler=lambda graph, _: graph)
    return trained(model, torch.compile(model, backend=backend))


def with_hooks_of_before():
    model, seen = Layers(), []
    model.layers[0].register_full_backward_hook(lambda *_: seen.append("module"))
    weight = model.layers[1].get_parameter("weight")
    weight.register_post_accumulate_grad_hook(lambda _: seen.append("parameter"))
    run = trained(model, compiled(model))
    return lambda: (run(), list(seen))


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


def in_every_stance():
    function = compiled(lambda x: x.sin() + 1)

    def run():
        found = [function(torch.ones(2))]
        for stance in ("force_eager", "fail_on_recompile"):
            with torch.compiler.set_stance(stance):
                found.append(function(torch.ones(2)))
        return found

    return run


def with_marked_sizes():
    function = compiled(Layers())
    x = torch.ones(5, 4)
    torch._dynamo.mark_dynamic(x, 0)
    return lambda: [function(x), function(torch.ones(7, 4))]


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


def counts_what_it_is_given():
    seen = []

    def backend(graph, inputs):
        seen.append((len(graph.graph.nodes), len(inputs)))
        return graph.forward

    model = Layers()
    run = trained(model, torch.compile(model, backend=backend))
    return lambda: (run(), list(seen))


def within_another():
    model = Layers()
    inner = compiled(lambda x: model(x).sin())
    return trained(model, compiled(lambda x: inner(x) + inner(x * 2)))


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


def draws_by_numpy(_, x):
    array = x.numpy()
    return torch.from_numpy(array * 2 + array.sum())


def rolls_out(model, x):
    def batches(count):
        for _ in range(count):
            yield model(x)

    return sum(batches(3)).sum()


def patched_while_it_runs():
    model = Layers()
    run = trained(model, compiled(model), specialize_float=True)
    with torch._dynamo.config.patch(specialize_float=True):
        run()
    return run


def raises_and_goes_on(model, x):
    try:
        if x.shape[0] == 2:
            raise ValueError(model.count)
    except ValueError as error:
        return model(x) * len(error.args)
    return x


def changes_its_weights():
    model, x = Layers(), torch.randn(2, 4)
    function, weight = compiled(model), model.layers[0].get_parameter("weight")

    def run():
        found = [function(x)]
        with torch.no_grad():
            weight.mul_(0.5)
        found.append(function(x))
        weight.requires_grad_(False)
        found.append(function(x))
        weight.requires_grad_(True)
        return found

    return run


def a_gradient_of_a_gradient():
    model, x = Layers(), torch.randn(2, 4)
    function = compiled(lambda x: (x.sin() * x).sum(), backend="eager")

    def run():
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(function(leaf), leaf, create_graph=True)
        first.sum().backward()
        return leaf.grad, model(x)

    return run


def per_sample():
    model, x = Layers(), torch.randn(3, 4)
    weights = dict(model.named_parameters())

    def loss(weights, row):
        return torch.func.functional_call(model, weights, (row[None],)).sum()

    function = compiled(torch.func.vmap(torch.func.grad(loss), (None, 0)))
    return lambda: function(weights, x)


KINDS = {
    "counted": counts_what_it_is_given,
    "nested": within_another,
    "side_effects": has_side_effects,
    "array": a_function(draws_by_numpy),
    "generator": a_function(rolls_out),
    "patched": patched_while_it_runs,
    "exception": a_function(raises_and_goes_on),
    "weights": changes_its_weights,
    "second_order": a_gradient_of_a_gradient,
    "per_sample": per_sample,
    "loop": a_function(loops),
    "scan": trains_with_a_scan(compiled),
    "scan_as_written": trains_with_a_scan(lambda function: function),
    "attention": a_function(attends, backend="inductor"),
    "attention_as_written": as_written(attends),
    "operator": a_function(lambda model, x: doubled(model(x))),
    "saving": a_function(saves_in_another_way),
    "tensor_hook": a_function(hooks_a_tensor),
    "layers": each_layer_by_itself,
    "backward": the_backward_pass_too,
    "backend": by_a_backend_of_its_own,
    "earlier_hooks": with_hooks_of_before,
    "other_hooks": with_hooks_that_come_and_go,
    "stances": in_every_stance,
    "marked": with_marked_sizes,
    "mode": in_a_mode,
    "thread": on_a_thread,
}
for name, make in KINDS.items():
    first_and_warm(name, make)
