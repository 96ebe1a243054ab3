"""An estimate ends in a number or a sentence, and nothing of it stays behind."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import functools
import gc
import inspect
import io
import pickle
import random
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from pytest_torchmem import estimate, measure
from pytest_torchmem.record.fake.stand_ins.unknown import UnknownNumber
from pytest_torchmem.record.owners import live_objects
from pytest_torchmem.values.errors import EstimateError


def fake_tensors() -> set[int]:
    return {id(v) for v in gc.get_objects() if issubclass(type(v), FakeTensor)}


@pytest.fixture(scope="module", autouse=True)
def _no_fake_tensor_stays():
    # Two looks for the whole file: a look at everything takes longer than most of its tests. Other
    # tests may have left some, and these may go meanwhile.
    before = fake_tensors()
    yield
    gc.collect()
    assert not fake_tensors() - before


@pytest.fixture
def model():
    return nn.Linear(64, 64)


X = torch.ones(32, 64)


def step_of(model, after):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        after(loss)
        optimizer.step()

    step()
    return step


def test_a_loss_that_is_only_logged_is_no_reason_to_refuse(model):
    seen: dict[str, Any] = {"total": 0.0, "lines": []}

    def log(loss):
        seen["total"] += loss.item() / 2
        seen["lines"].append(f"{loss.item():.3f} {loss:.2f} {round(loss.item(), 3)}")

    step = step_of(model, log)
    before = copy.deepcopy(seen)
    plain = estimate(step_of(model, lambda loss: None), backward=False)
    logged = estimate(step, backward=False)
    assert logged.peak.total == plain.peak.total
    assert any("values of tensors are read" in note for note in logged.notes)
    assert seen["total"] == before["total"]


@pytest.mark.parametrize(
    "decide",
    [
        lambda number: number > 1,
        lambda number: not number,
        lambda number: range(int(number)),
        torch.empty,
        lambda number: max(1.0, number),
        round,
    ],
)
def test_what_decides_by_a_number_is_refused_at_its_line(model, decide):
    step = step_of(model, lambda loss: None)

    def decides():
        step()
        decide(model(X).sum().item())

    with pytest.raises(EstimateError, match=r"test_estimate_leaves_nothing\.py:\d+"):
        estimate(decides, backward=False)
    assert not isinstance(model.weight, FakeTensor)


def test_an_unknown_number_shows_as_nan():
    number = UnknownNumber()
    assert (str(number), f"{number:.2f}", f"{2 * number + 1:5.1f}") == ("nan", "nan", "  nan")


def test_a_scaler_steps_and_keeps_its_scale(model):
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def step():
        scaler.scale(model(X).square().mean()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    step()
    result = estimate(step, backward=False)
    assert any("no gradient is taken to be infinite" in note for note in result.notes)
    assert scaler.get_scale() == 8.0
    step()


def test_a_scaler_is_as_it_was_after_a_refusal(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")

    def step():
        loss = model(X).square().mean()
        scaler.scale(loss).backward()
        if loss > 1:
            scaler.step(optimizer)

    with pytest.raises(EstimateError):
        estimate(step, backward=False)
    assert not isinstance(scaler._scale, FakeTensor)


@functools.lru_cache(maxsize=2)
def mask(length):
    return torch.ones(length, length).tril()


def test_a_cache_of_the_program_holds_no_fake_tensor(model):
    mask.cache_clear()
    estimate(lambda: model(mask(32) @ X).sum())
    assert type(mask(32)) is torch.Tensor


@pytest.mark.parametrize("generation", [1, 2])
def test_a_cache_that_a_collection_made_old_holds_no_fake_tensor(model, generation):
    mask.cache_clear()

    def program():
        table = mask(32)
        gc.collect(generation)
        return model(table @ X).sum()

    estimate(program)
    assert type(mask(32)) is torch.Tensor


@pytest.mark.skipif(not live_objects.HAS_GENERATIONS, reason="no generations to go by")
def test_an_estimate_that_leaves_nothing_looks_at_nothing_that_was_there(model, monkeypatch):
    looks = []
    monkeypatch.setattr(live_objects, "instances_of", lambda kinds: looks.append(kinds) or [])
    estimate(model, X)
    assert looks == []
    estimate(lambda: (gc.collect(), model(X))[1])
    assert len(looks) == 1


@pytest.mark.skipif(not live_objects.HAS_GENERATIONS, reason="no generations to go by")
def test_garbage_of_an_estimate_goes_without_a_look_at_what_was_there(model):
    def program():
        cycle = [model(X)]
        cycle.append(cycle)
        return model(X)

    # The first one imports.
    estimate(program)
    before, looks = fake_tensors(), gc.get_stats()[2]["collections"]
    estimate(program)
    assert gc.get_stats()[2]["collections"] == looks
    assert fake_tensors() == before


def test_a_cache_that_gets_a_graph_is_refused_in_words_and_stays_without(model):
    cache = torch.zeros(4, 64)
    held, kept = [cache], {cache}

    def write(caches):
        next(iter(caches))[:1] = model(X[:1])

    with pytest.raises(EstimateError, match="a tensor that was there before"):
        estimate(lambda: write(kept), backward=False)
    assert not cache.requires_grad
    with torch.no_grad():
        assert estimate(lambda: write(kept), backward=False).peak.total
    assert estimate(lambda: write(held), backward=False).peak.total
    estimate(lambda held: held.add_(model(X[:4])), cache, backward=False)
    assert not cache.requires_grad


def test_a_loss_that_looks_for_a_negative_variance_is_taken_to_find_none(model):
    def loss():
        return nn.functional.gaussian_nll_loss(model(X), X, model(X).exp())

    loss().backward()  # gradients are there
    result = estimate(loss)
    with measure(device="cpu") as window:
        loss().backward()
    assert abs(result.peak.total - window.result.peak.total) <= 64


def test_the_checks_of_distributions_are_taken_to_pass_with_a_note(model):
    def sample():
        # Torch's compiler switches the checks off for all that comes after.
        normal = torch.distributions.Normal(X, model(X).exp(), validate_args=True)
        return normal.log_prob(normal.rsample()).sum()

    result = estimate(sample)
    assert "the checks of torch.distributions and losses are taken to pass" in result.notes
    with measure(device="cpu") as window:
        sample().backward()
    assert abs(result.peak.total - window.result.peak.total) < 512
    model.weight.grad = model.bias.grad = None
    with pytest.raises(EstimateError, match="needs the value"):
        estimate(lambda: model(X) if (model(X) > 0).all() else None)


def test_what_torch_cannot_do_without_data_is_refused_in_words(model):
    class Own(torch.Tensor):
        pass

    def moves():
        model.to(torch.float64)

    with pytest.raises(EstimateError, match="a class of its own"):
        estimate(lambda: X.clone().as_subclass(Own), backward=False)
    ragged = torch.nested.nested_tensor([X, X[:3]], layout=torch.jagged)
    with pytest.raises(EstimateError, match="ragged tensors"):
        estimate(lambda: model(ragged).values().sum())
    # Older releases move parameters without data.
    if "FakeTensor" in inspect.getsource(torch.nn.Module._apply):
        with pytest.raises(EstimateError, match="moves a module's parameters"):
            estimate(moves, backward=False)
    assert model.weight.dtype is torch.float32


def test_weights_are_averaged_for_cuda_as_there(model):
    average = torch.optim.swa_utils.AveragedModel(model)

    def step():
        average.update_parameters(model)

    step()
    found = estimate(step, backward=False, device="cuda:0").run.graph.nodes
    assert "aten::_foreach_lerp_" in {node.operator for node in found}


def test_what_a_program_keeps_is_as_before(model):
    kept, table = [], {}

    def keeps():
        out = model(X)
        kept.append(out)
        table.setdefault("out", out)
        return out.sum()

    estimate(keeps)
    assert (kept, table) == ([], {})


class Replacing(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if "m" in state:
                state["m"] = state["m"] * 0.9
            else:
                state["m"] = torch.zeros_like(parameter)


def test_state_that_a_step_replaces_is_freed():
    parameter = nn.Parameter(torch.ones(1000))
    optimizer = Replacing([parameter], {})
    optimizer.step()
    retained = estimate(optimizer.step, backward=False).retained.total
    assert retained == 4000  # the new state; the old one is gone


def in_another_process(program):
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )


ENABLES_GRADIENTS = """
import torch
from pytest_torchmem import estimate, measure
model, x = torch.nn.Linear(8, 8), torch.ones(4, 8)
def by_hand():
    with torch.enable_grad():
        return torch.autograd.grad(model(x).sum(), list(model.parameters()))
def by_function():
    return torch.func.grad(lambda w: (x @ w).sum())(model.weight.detach())
with torch.no_grad():
    for step in (by_hand, by_function):
        print(estimate(step, backward=False, device="cuda").peak.total > 0)
"""


def test_gradients_that_are_enabled_for_a_missing_device_do_not_end_the_process():
    done = in_another_process(ENABLES_GRADIENTS)
    assert (done.returncode, done.stdout.split()) == (0, ["True", "True"]), done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="casts for CUDA are on where there is one")
@pytest.mark.parametrize("made_before", [False, True])
def test_casts_for_cuda_are_refused_with_the_way_to_measure_them(model, made_before):
    with pytest.warns(UserWarning, match="CUDA") if made_before else contextlib.nullcontext():
        before = torch.autocast("cuda") if made_before else None

    def step():
        with before or torch.autocast("cuda"):
            return model(X).sum()

    with pytest.raises(EstimateError, match=r"--torchmem-simulate=H100"):
        estimate(step, device="cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU that is here decides")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_that_cudnn_may_compute_is_said_to_be_in_doubt(dtype):
    x = torch.ones(2, 4, 16, 32, dtype=dtype)
    mask = torch.ones(16, 16, dtype=torch.bool)
    attend = nn.functional.scaled_dot_product_attention
    found = estimate(lambda: attend(x, x, x, attn_mask=mask), backward=False, device="cuda")
    assert any("cuDNN" in note for note in found.notes) == (dtype is torch.bfloat16)


def test_casts_that_are_off_are_no_reason_to_refuse(model):
    def step():
        with torch.autocast("cuda", enabled=False):
            return model(X).sum()

    assert estimate(step, device="cuda").peak.total == estimate(model, X).peak.total


def test_values_handed_to_numpy_are_refused_in_words(model):
    with pytest.raises(EstimateError, match="hands values of a tensor to numpy"):
        estimate(lambda: model(X).detach().numpy())


def test_data_that_is_replaced_is_followed_or_refused_in_words(model):
    def step(model):
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        return model(X).sum()

    assert estimate(step, model).peak.total >= estimate(nn.Linear(64, 64), X).peak.total
    with pytest.raises(EstimateError, match="replaces the data of parameters"):
        estimate(step, nn.Linear(64, 64, device="meta"))


def test_tensors_that_the_program_makes_on_the_device_asked_for_are_there(model):
    def step():
        return model(torch.ones(32, 64, device="cuda")).sum()

    result = estimate(step, device="cuda")
    assert result.peak.total == estimate(lambda: model(torch.ones(32, 64)).sum()).peak.total


def test_a_copy_of_the_model_in_a_step_is_estimated(model):
    def step():
        return (model(X) + copy.deepcopy(model)(X)).sum()

    assert estimate(step, optimizer=torch.optim.AdamW).peak.total > 0
    torch.testing.assert_close(copy.deepcopy(model).weight, model.weight)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_gradients_are_refused_in_words(model, register):
    getattr(next(model.parameters()), register)(lambda _: None)
    with pytest.raises(EstimateError, match="hooks on their gradients"):
        estimate(model, torch.ones(4, 8))


@pytest.mark.parametrize("write", [pickle.dumps, lambda state: torch.save(state, io.BytesIO())])
def test_what_would_be_written_to_a_file_is_refused_in_words(model, write):
    with pytest.raises(EstimateError, match="pickles tensors"):
        estimate(lambda: write(model.state_dict()), backward=False)
    write(model.state_dict())
    assert estimate(lambda: copy.copy(model(X)), backward=False).peak.total > 0


def test_a_schedule_has_not_gone_on(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)

    def step():
        model(X).sum().backward()
        optimizer.step()
        schedule.step()

    step()
    estimate(step, backward=False)
    assert (schedule.last_epoch, optimizer.param_groups[0]["lr"]) == (1, 1.0)
    step()
    assert (schedule.last_epoch, optimizer.param_groups[0]["lr"]) == (2, 0.1)


def switches():
    return (
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_anomaly_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
    )


def test_an_estimate_can_be_made_where_a_default_device_was_taken_back():
    def estimated():
        torch.set_default_device("meta")
        torch.set_default_device(None)
        return estimate(lambda: X * 2, backward=False).peak.total

    # Each thread has its own, and torch 2.6 cannot have it again as it was.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(estimated).result() == 2 * X.nbytes


def test_what_holds_for_all_of_a_process_is_as_it_was():
    def program(fails):
        torch.manual_seed(7)
        random.random()
        np.random.rand()
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_grad_enabled(False)
        torch.use_deterministic_algorithms(True)
        torch.autograd.set_detect_anomaly(True)
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_dtype("cpu", torch.float16)
        if fails:
            bool(X.sum() > 0)
        return X * 2

    before = switches()
    estimate(program, False, backward=False)
    assert switches() == before
    with pytest.raises(EstimateError):
        estimate(program, True, backward=False)
    assert switches() == before


def test_casts_around_an_estimate_keep_no_fake_weight(model):
    with torch.autocast("cpu", torch.bfloat16):
        estimate(model, X)
        gc.collect()
        assert model(X).dtype == torch.bfloat16
        assert not isinstance(model(X), FakeTensor)


def test_hooks_and_children_that_a_program_adds_are_gone():
    model = nn.Sequential(nn.Linear(64, 64))

    def program():
        model.append(nn.ReLU())
        model.register_forward_hook(lambda *_: None)
        model[0].register_forward_pre_hook(lambda *_: None)
        return model(X)

    estimate(program)
    assert (len(model), len(model._forward_hooks), len(model[0]._forward_pre_hooks)) == (1, 0, 0)


def in_a_thread(model):
    worker = threading.Thread(target=model, args=(X,))
    worker.start()
    worker.join()


def in_a_pool(model):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return sum(pool.map(lambda factor: model(X * factor).sum(), range(3)))


@pytest.mark.parametrize("program", [in_a_thread, in_a_pool])
def test_work_of_another_thread_is_refused(model, program):
    with pytest.raises(EstimateError, match="in another thread"):
        estimate(program, model, backward=False)
    program(model)


def test_a_thread_without_tensors_is_no_hindrance(model):
    def program():
        thread = threading.Thread(target=lambda: None)
        thread.start()
        thread.join()
        return model(X)

    assert estimate(program).peak.total == estimate(model, X).peak.total


def test_modules_that_cannot_have_fake_parameters_are_refused_in_words(model):
    class Outer(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x)

    with pytest.raises(EstimateError, match=r"torch\.jit"):
        estimate(Outer(torch.jit.trace(model, X)), X)
    lazy = Outer(nn.LazyLinear(8))
    with pytest.raises(EstimateError, match="call it once"):
        estimate(lazy, X)
    lazy(X)
    assert estimate(lazy, X).peak.total > 0


def test_ragged_tensors_of_an_encoder_are_refused_in_words():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 1).eval()
    x, mask = torch.ones(2, 8, 16), torch.zeros(2, 8, dtype=torch.bool)
    mask[:, 6:] = True
    with torch.no_grad(), pytest.raises(EstimateError, match="ragged"):
        estimate(functools.partial(model, src_key_padding_mask=mask), x, backward=False)
