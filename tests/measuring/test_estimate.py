"""`estimate`: the eager program, looked at instead of run."""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.checkpoint import checkpoint

from pytest_torchmem import estimate, estimate_graph, estimate_pair
from pytest_torchmem.measuring.body_measurement import BodyMeasurement
from pytest_torchmem.values.contributors import Category, Phase
from pytest_torchmem.values.errors import EstimateError
from pytest_torchmem.values.results import Result


class Mlp(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x) * self.scale)
        return x


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.head = nn.Linear(32, 100)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.block(self.embed(tokens)))


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)
        )

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def measured(step: Callable[[], Any], warmup: Callable[[], Any] = lambda: None) -> Result:
    step()
    warmup()
    body = BodyMeasurement("cpu")
    body.start()
    held = step()
    result = body.stop()
    del held
    return result


def tokens() -> torch.Tensor:
    return torch.randint(0, 100, (4, 16))


MODELS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "mlp": lambda: (Mlp(), torch.randn(32, 64)),
    "transformer with tied weights": lambda: (Encoder(), tokens()),
    "checkpointing": lambda: (
        Checkpointed(reentrant=False),
        torch.randn(32, 64, requires_grad=True),
    ),
    "reentrant checkpointing": lambda: (
        Checkpointed(reentrant=True),
        torch.randn(32, 64, requires_grad=True),
    ),
    "frozen first layer": lambda: (
        nn.Sequential(nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 64)),
        torch.randn(32, 64),
    ),
    "convolutions": lambda: (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        torch.randn(4, 3, 32, 32),
    ),
}

# What C++ wraps Python numbers in, and scratch of convolutions on the CPU.
SCALARS = 512


@pytest.mark.parametrize("name", MODELS)
def test_forward_and_backward_are_what_is_measured(name):
    model, x = MODELS[name]()
    result = estimate(model, x)

    def forget() -> None:
        model.zero_grad()
        x.grad = None

    real = measured(lambda: model(x).sum().backward(), forget)
    assert result.peak.total == pytest.approx(real.peak.total, rel=0.005)
    assert abs(result.peak.total - real.peak.total) <= SCALARS
    assert abs(result.retained.total - real.retained.total) <= SCALARS
    assert result.estimated
    assert not real.estimated


@pytest.mark.parametrize("name", ["mlp", "transformer with tied weights"])
def test_inference_is_what_is_measured(name):
    model, x = MODELS[name]()
    with torch.no_grad():
        result = estimate(model, x, backward=False)
        real = measured(lambda: model(x))
    assert abs(result.peak.total - real.peak.total) <= SCALARS
    assert not result.has_backward
    assert result.peak.activation == 0


@pytest.mark.parametrize("name", ["mlp", "transformer with tied weights"])
def test_categories_at_the_peak_are_those_of_measured_memory(name):
    model, x = MODELS[name]()
    result = estimate(model, x)
    real = measured(lambda: model(x).sum().backward(), model.zero_grad)
    for category in Category:
        assert abs(result.peak.at_peak[category] - real.peak.at_peak[category]) <= 64, category


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adagrad])
def test_optimizer_steps_with_its_state_in_place(optimizer):
    model, x = MODELS["mlp"]()
    result = estimate(model, x, optimizer=optimizer)
    stepping = optimizer(model.parameters())

    def step() -> None:
        model(x).sum().backward()
        stepping.step()

    real = measured(step, stepping.zero_grad)
    assert abs(result.peak.total - real.peak.total) <= SCALARS
    assert result.peak.optimizer_state == real.peak.optimizer_state
    assert any("second training step" in note for note in result.notes)


def test_optimizer_may_be_a_factory_or_an_instance_that_has_stepped():
    model, x = MODELS["mlp"]()
    made = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(x).sum().backward()
    made.step()
    made.zero_grad()
    before = {k: v.clone() for k, v in made.state[model.layers[0].weight].items()}
    peaks = {
        estimate(model, x, optimizer=o).peak.total
        for o in (torch.optim.AdamW, functools.partial(torch.optim.AdamW, lr=0.1), made)
    }
    assert len(peaks) == 1
    after = made.state[model.layers[0].weight]
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert made.param_groups[0]["params"][0] is model.layers[0].weight


def test_checkpointing_trades_activations_for_recomputation():
    plain = Checkpointed(reentrant=False)
    x = torch.randn(512, 64, requires_grad=True)
    with_it = estimate(plain, x)
    without = estimate(nn.Sequential(*plain.blocks), x)
    assert with_it.peak.activation < without.peak.activation / 2
    phases = {c.phase for c in with_it.peak.live if c.category is Category.ACTIVATION}
    assert Phase.RECOMPUTE in phases


def test_frozen_parameters_get_no_gradient():
    model, x = MODELS["frozen first layer"]()
    result = estimate(model, x)
    assert result.retained.gradient == sum(p.nbytes for p in model[1].parameters())


def test_tied_weights_count_once():
    model = Encoder()
    total = sum(p.nbytes for p in model.parameters())
    assert estimate(model, tokens()).peak.at_peak.parameter == total


def test_gradient_accumulation_keeps_one_buffer():
    model, x = MODELS["mlp"]()

    def twice(x):
        model(x).sum().backward()
        model(x).sum().backward()

    result = estimate(twice, x)
    real = measured(lambda: twice(x), model.zero_grad)
    assert abs(result.peak.total - real.peak.total) <= SCALARS
    assert result.retained.gradient == sum(p.nbytes for p in model.parameters())


def test_existing_gradients_are_accumulated_into():
    model, x = MODELS["mlp"]()
    model(x).sum().backward()
    held = sum(p.nbytes for p in model.parameters())
    result = estimate(model, x)
    assert result.peak.gradient == held
    assert result.retained.gradient == 0


class Shared(nn.Module):
    """Gradients of one tensor from several nodes, from one node twice, and into zeros."""

    def forward(self, x):
        y = torch.tanh(x)
        return y * y + y.exp() + torch.where(y > 0, y, y) + y[torch.arange(len(y))]


def test_gradients_are_added_up_in_place_as_with_real_tensors():
    # Autograd does not do so for fake tensors, which are a subclass: that must be seen through.
    model, x = Shared(), torch.randn(1024, 64, requires_grad=True)

    def forget() -> None:
        x.grad = None

    result = estimate(model, x)
    real = measured(lambda: model(x).sum().backward(), forget)
    assert abs(result.peak.total - real.peak.total) <= SCALARS


def test_a_peak_that_depends_on_the_processor_is_an_interval():
    model, x = MODELS["convolutions"]()
    result = estimate(model, x)
    assert (result.at_most or 0) > result.peak.total
    (spot,) = result.blind_spots
    assert "the estimated peak is between" in spot
    assert "aten::convolution" in spot

    def step() -> None:
        model(x).sum().backward()

    real = measured(step, model.zero_grad)
    assert result.peak.total - SCALARS <= real.peak.total <= (result.at_most or 0)


def test_scratch_that_cannot_matter_at_the_peak_is_not_spoken_of():
    layers = [nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 4096), nn.Linear(4096, 1024)]
    # The optimizer's step has the peak.
    x = torch.randn(1, 3, 8, 8)
    result = estimate(nn.Sequential(*layers), x, optimizer=torch.optim.AdamW)
    assert result.peak.total <= (result.at_most or 0) <= result.peak.total + 100 * SCALARS
    assert result.blind_spots == ()


@pytest.mark.parametrize("backward", [False, True])
def test_numbers_in_operations_are_below_the_upper_bound(backward):
    # The CPU makes tensors of them, and autograd keeps some until the backward pass.
    def doubled(x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = 2 * x + 1
        return (0.5 * x / 3).square().sum() * 2.5

    x = torch.ones(64, requires_grad=backward)
    result = estimate(doubled, x, backward=backward)

    def forget() -> None:
        x.grad = None

    real = measured(lambda: doubled(x).backward() if backward else doubled(x), forget)
    assert result.peak.total <= real.peak.total <= (result.at_most or 0)
    assert (result.at_most or 0) <= result.peak.total + 46 * 32 * (1 + backward)


def test_all_that_a_gpu_s_libraries_take_is_left_out_in_one_sentence():
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.layers = nn.Conv1d(8, 8, 3), nn.LSTM(8, 8, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y, _ = self.layers(self.conv(x).mT)
            return torch.linalg.inv(y.mT @ y)

    (spot,) = estimate(Several(), torch.randn(2, 8, 16), device="cuda").blind_spots
    assert spot == (
        "the estimate is a lower bound: it leaves out a workspace of cuBLAS for each stream "
        "(8 MiB, 32 MiB from Hopper on), the workspaces of cuDNN and cuSOLVER and what recurrent "
        "layers of cuDNN keep for the backward"
    )


def test_libraries_of_a_gpu_that_take_unknown_memory_make_a_lower_bound():
    result = estimate(nn.LSTM(4, 4), torch.randn(2, 3, 4), device="cuda")
    assert result.at_most is None
    assert any("cuDNN" in spot for spot in result.blind_spots)
    elementwise = estimate(nn.ReLU(), torch.randn(8, requires_grad=True), device="cuda")
    assert elementwise.blind_spots == ()


# What it works on.


def test_a_model_too_large_for_any_machine_can_be_estimated():
    with torch.device("meta"):
        model, x = nn.Linear(200_000, 200_000, bias=False), torch.empty(1, 200_000)
    result = estimate(model, x, optimizer=torch.optim.AdamW)
    weight = 4 * 200_000**2
    assert result.device == "cpu"
    assert result.peak.parameter == result.peak.gradient == weight
    assert result.peak.optimizer_state >= 2 * weight


def test_real_meta_and_fake_tensors_give_the_same_numbers():
    real = estimate(Mlp(), torch.randn(8, 64))
    with torch.device("meta"):
        on_meta = estimate(Mlp(), torch.randn(8, 64))
    with FakeTensorMode():
        model, x = Mlp(), torch.randn(8, 64)
    assert real.peak.total == on_meta.peak.total == estimate(model, x).peak.total


def test_nothing_is_left_behind():
    model, x = Mlp(), torch.randn(8, 64)
    model.cache = None  # type: ignore[assignment]
    before = dict(model.named_parameters())
    values = {name: t.clone() for name, t in model.state_dict().items()}

    def program(x):
        model.cache = model(x)
        return model.cache

    get_rng_state, rng = torch.get_rng_state, torch.get_rng_state()
    estimate(program, x, optimizer=torch.optim.SGD)
    assert model.cache is None
    assert all(p is before[name] and p.grad is None for name, p in model.named_parameters())
    assert all(torch.equal(values[name], t) for name, t in model.state_dict().items())
    assert torch.get_rng_state is get_rng_state
    assert torch.equal(rng, torch.get_rng_state())
    assert not any(isinstance(o, FakeTensor) for o in model.__dict__.values())
    assert gc.isenabled()


def test_nothing_is_left_behind_when_it_fails():
    model = Mlp()
    weight = model.layers[0].weight

    def program(x):
        y = model(x)
        y.sum().backward()
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        estimate(program, torch.randn(8, 64))
    assert model.layers[0].weight is weight
    assert weight.grad is None
    assert gc.isenabled()


def test_a_function_that_trains_by_itself_is_followed():
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters())

    def train(x):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    result = estimate(train, torch.randn(8, 64))
    state = 2 * sum(p.nbytes for p in model.parameters())
    assert result.has_backward
    assert result.retained.optimizer_state >= state
    assert result.retained.gradient == 0
    assert len(optimizer.state) == 0


@pytest.mark.parametrize("returned", [lambda loss: loss, lambda loss: {"loss": loss * 2}])
def test_a_step_that_returns_its_loss_runs_backward_once(returned):
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters())

    def train(x):
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        return returned(loss)

    x = torch.randn(8, 64)
    result = estimate(train, x)
    kept = estimate(train, x, backward=False)
    assert abs(result.peak.total - kept.peak.total) <= 8
    assert result.retained.gradient == kept.retained.gradient > 0
    assert any("itself runs the backward pass of its output" in n for n in result.notes)
    again = estimate(train, x, optimizer=torch.optim.SGD(model.parameters()))
    assert again.retained.gradient == kept.retained.gradient


def test_a_graph_that_the_program_keeps_or_makes_anew_gets_its_backward():
    model = Mlp()
    forward = estimate(model, torch.randn(8, 64))

    def anew(x):
        model(x).sum().backward()
        model.zero_grad()
        return model(x)

    def penalty(x):
        loss = model(x).pow(2).sum()
        (gradient,) = torch.autograd.grad(loss, [model.layers[0].weight], create_graph=True)  # type: ignore[arg-type]
        return loss + gradient.pow(2).sum()

    for program in (anew, penalty):
        result = estimate(program, torch.randn(8, 64))
        assert result.retained.gradient == forward.retained.gradient > 0
        assert not result.notes


def test_plain_tensors_that_get_gradients_are_parameters():
    captured = torch.randn(16, 16, requires_grad=True)
    given = torch.randn(16, 16, requires_grad=True)
    result = estimate(lambda a, b: a @ b @ captured, torch.randn(4, 16), given)
    assert result.peak.at_peak.parameter == 2 * 16 * 16 * 4
    assert result.peak.at_peak.input == 4 * 16 * 4
    assert captured.grad is None
    assert given.grad is None


def test_the_loss_of_a_model_output_is_differentiated():
    def program(x):
        return {"logits": model(x), "loss": model(x).mean()}

    model = Mlp()
    by_loss = estimate(program, torch.randn(8, 64))
    by_sum = estimate(lambda x: program(x)["loss"], torch.randn(8, 64))
    assert by_loss.retained.gradient == by_sum.retained.gradient > 0


def test_a_forward_without_a_graph_says_that_there_is_no_backward():
    result = estimate(Mlp().requires_grad_(False), torch.randn(8, 64))
    assert not result.has_backward
    assert any("no backward" in note for note in result.notes)


def test_an_input_that_was_computed_can_be_given():
    x = torch.randn(8, 64, requires_grad=True) * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert estimate(Mlp(), x).has_backward


def test_func_transforms_can_be_estimated():
    weight = torch.randn(16, 16)

    def gradient(x):
        return torch.func.grad(lambda w: torch.relu(x @ w).sum())(weight)

    assert estimate(gradient, torch.randn(8, 16), backward=False).peak.total > 2 * 16 * 16 * 4


def test_exported_programs_and_traced_pairs_can_be_estimated():
    model, x = Mlp(), torch.randn(8, 64)
    program = torch.export.export(model, (x,))
    assert estimate(program).peak.total == estimate_graph(program.graph_module).peak.total
    gm = program.graph_module
    assert estimate_pair(gm, gm).estimated


# Where it is said to be.


def test_device_is_the_one_asked_for_without_having_one():
    with torch.no_grad():
        result = estimate(Mlp(), torch.randn(8, 64), backward=False, device="cuda")
    assert result.device == "cuda:0"
    assert result.peak.at_peak.parameter == sum(p.nbytes for p in Mlp().parameters())


def test_fake_tensors_are_moved_to_the_device_asked_for():
    with FakeTensorMode():
        model, x = Mlp(), torch.randn(8, 64)
    with torch.no_grad():
        on_cuda = estimate(model, x, backward=False, device="cuda")
        assert on_cuda.peak.total == estimate(model, x, backward=False).peak.total
    assert on_cuda.device == "cuda:0"
    assert model.layers[0].weight.device.type == "cpu"


def test_a_device_that_nothing_is_on_is_no_reading():
    program = torch.export.export(Mlp(), (torch.randn(8, 64),))
    with pytest.raises(EstimateError, match=r"nothing in the program is on cuda:0.*on cpu"):
        estimate_graph(program, device="cuda")


def test_training_for_cuda_says_that_the_machine_has_none():
    result = estimate(Mlp(), torch.randn(8, 64), optimizer=torch.optim.AdamW, device="cuda")
    assert result.device == "cuda:0"
    assert result.peak.total > 0
    stands_in = any("on a machine without one" in note for note in result.notes)
    assert stands_in is (torch.cuda.device_count() == 0)


def test_optimizers_for_cuda_take_the_multi_tensor_path():
    model, x = Mlp(), torch.randn(8, 64)
    on_cpu, on_cuda = (
        estimate(model, x, optimizer=torch.optim.AdamW, device=d) for d in ("cpu", "cuda")
    )
    # It holds one temporary for each parameter, not for one at a time.
    assert on_cuda.peak.temporary >= sum(p.nbytes for p in model.parameters())
    assert on_cpu.peak.temporary < on_cuda.peak.temporary
    assert estimate(model, x, optimizer=torch.optim.AdamW).peak.total == on_cpu.peak.total


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="a GPU can be used")
def test_tensors_made_on_a_device_that_is_not_there_are_refused_in_words():
    # Autograd would end the process.
    def program(x):
        return x.sum() + torch.ones(4, device="cuda", requires_grad=True).sum()

    with pytest.raises(EstimateError, match="device"):
        estimate(program, torch.randn(4, requires_grad=True))


# Where things come from.


def test_live_storages_name_operator_module_and_line():
    live = estimate(Mlp(), torch.randn(512, 64)).peak.live
    relu = next(c for c in live if c.operator == "aten::relu")
    assert relu.module == "Mlp"
    assert relu.source is not None
    assert (relu.source.file, relu.source.function) == (__file__, "forward")
    assert relu.count > 1
    parameters = {c.module for c in live if c.category is Category.PARAMETER}
    assert parameters == {"Mlp.layers.*.weight", "Mlp.layers.*.bias"}


def test_backward_operators_have_the_module_and_line_of_their_forward():
    live = estimate(Mlp(512), torch.randn(4, 512)).peak.live
    gradient = next(c for c in live if c.category is Category.GRADIENT)
    assert gradient.operator == "aten::mm"
    assert gradient.phase is Phase.BACKWARD
    assert gradient.module == "Mlp.layers.*"
    assert gradient.source is not None
    assert gradient.source.function == "forward"


# What cannot be estimated.


def branching(x):
    return x * 2 if x.sum() > 0 else x


def test_control_flow_on_values_is_explained():
    with pytest.raises(EstimateError) as caught:
        estimate(branching, torch.randn(4))
    text = str(caught.value)
    assert "needs the value of a tensor" in text
    assert f"test_estimate.py:{branching.__code__.co_firstlineno + 1}" in text
    assert "pytest_torchmem.measure" in text
    assert text.endswith("[not-estimated]")


def test_sizes_that_depend_on_values_are_explained():
    with pytest.raises(EstimateError, match="needs the value of a tensor"):
        estimate(lambda x: x[x > 0].sum(), torch.randn(4))


def test_an_optimizer_with_nothing_to_train_is_explained():
    with pytest.raises(EstimateError, match="trainable parameters"):
        estimate(nn.Linear(2, 2).requires_grad_(False), torch.ones(1, 2), optimizer=torch.optim.SGD)


def test_an_optimizer_that_needs_a_closure_is_explained():
    with pytest.raises(EstimateError, match="closure"):
        estimate(nn.Linear(2, 2), torch.ones(1, 2), optimizer=torch.optim.LBFGS)


def test_values_read_by_an_optimizer_are_stood_in_for_and_said():
    result = estimate(nn.Linear(64, 64), torch.randn(8, 64), optimizer=torch.optim.Adafactor)
    assert any("1.0 stood in" in note for note in result.notes)


def test_sparse_tensors_are_refused_in_words():
    with pytest.raises(EstimateError, match="cannot be followed"):
        estimate(lambda a: torch.sparse.mm(a, torch.ones(4, 2)), torch.eye(4).to_sparse())


def test_a_training_step_that_is_estimated_without_gradients_says_so():
    model, x = Mlp(), torch.randn(8, 64)
    with torch.no_grad():
        asked, inference = estimate(model, x), estimate(model, x, backward=False)
    told = "backward=False estimates inference"
    assert asked.peak.total == estimate(model, x).peak.total
    assert any(told in note for note in asked.notes)
    assert not any(told in note for note in (*inference.notes, *estimate(model, x).notes))


def test_tensors_that_stay_on_another_device_are_refused_in_words():
    def step() -> None:  # torch's words, from 2.13 on
        raise RuntimeError("found at least two devices, cpu and cuda:0!")

    with pytest.raises(EstimateError, match="tensors that nobody could move"):
        estimate(step, device="cuda", backward=False)


def test_a_program_that_makes_tensors_on_its_own_device_is_estimated_for_another():
    cache, layer, x = torch.zeros(32, 64), nn.Linear(64, 64), torch.randn(4, 64)

    def step(x):
        cache[:4] = layer(x)
        return torch.cat([cache, torch.ones(4, 64, device="cpu")])

    with torch.no_grad():
        step(x)
        result = estimate(step, x, backward=False, device="cuda")
    assert result.device == "cuda:0"
    # The layer, its input and the cache; then the ones and the result.
    kept = (64 * 65 + 4 * 64 + 32 * 64) * 4
    assert result.peak.total == kept + (4 * 64 + 36 * 64) * 4


def test_a_program_for_a_device_that_is_not_there_may_write_at_places():
    def step(cache, x):
        cache[:4] = x
        return cache * 2

    with torch.no_grad():
        given = torch.zeros(32, 64), torch.ones(4, 64)
        result = estimate(step, *given, device="cuda", backward=False)
    assert result.peak.total == (2 * 32 + 4) * 64 * 4
