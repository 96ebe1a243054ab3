"""Programs that train: loops, optimizers, schedulers, lower precision, checkpoints."""

from __future__ import annotations

import copy
import io
import itertools
import random

import numpy as np
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, random_split

from tests.record.undisturbed.state import nightly, prepared, program

functional = nn.functional


def net(width=8):
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.3), nn.Linear(width, 2))


def fit(model, optimizer, steps=3, loss_of=None):
    losses = []
    for _ in range(steps):
        x, y = torch.randn(4, 8), torch.randint(2, (4,))
        loss = functional.cross_entropy(model(x), y) if loss_of is None else loss_of(model, x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, [p.grad for p in model.parameters()], model.state_dict()


@program
def fits_with_sgd():
    model = net()
    return fit(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True))


@program
def fits_with_every_optimizer():
    kinds = (
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.ASGD,
        torch.optim.Adafactor,
    )
    found = []
    for kind in kinds:
        model = net()
        optimizer = kind(model.parameters(), lr=0.01)
        found.append((fit(model, optimizer, 2), optimizer.state_dict()["state"]))
    return found


@program
def fits_with_lbfgs():
    model, x = nn.Linear(4, 1), torch.randn(8, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    calls = []

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        calls.append(loss.detach())
        return loss

    optimizer.step(closure)
    return calls, model.state_dict()


@program
def fits_a_sparse_embedding():
    table = nn.Embedding(20, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    table(torch.tensor([1, 1, 5])).sum().backward()
    optimizer.step()
    return table.weight.grad, table.weight


@program
def fits_fused_and_foreach():
    found = []
    for option in ({"fused": True}, {"foreach": True}, {"foreach": False}):
        model = net()
        found.append(fit(model, torch.optim.AdamW(model.parameters(), **option)))  # type: ignore[arg-type]
    return found


@program
def follows_schedules():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [2])
    rates = []
    for _ in range(5):
        fit(model, optimizer, 1)
        schedule.step()
        rates.append(schedule.get_last_lr())
    return rates, schedule.state_dict()["last_epoch"]


@program
def follows_one_cycle_and_a_plateau():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=4)
    for _ in range(4):
        fit(model, optimizer, 1)
        cycle.step()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for loss in (1.0, 1.0, 1.0):
        plateau.step(loss)
    return [group["lr"] for group in optimizer.param_groups]


@program
def accumulates_gradients_and_clips():
    model = net()
    optimizer = torch.optim.Adam(model.parameters())
    for part in torch.randn(4, 2, 8):
        (model(part).square().mean() / 4).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return norm, model.state_dict(), [p.grad for p in model.parameters()]


@program
def checkpoints_activations():
    model, x = net(), torch.randn(4, 8, requires_grad=True)
    kept = checkpoint(model, x, use_reentrant=False)
    checkpoint(model, x, use_reentrant=True).sum().backward()
    kept.sum().backward()
    checkpoint_sequential(model, 2, x, use_reentrant=False).sum().backward()
    return x.grad, [p.grad for p in model.parameters()]


@program
def checkpoints_selectively():
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    model, x = net(), torch.randn(4, 8, requires_grad=True)

    def contexts():
        return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])

    checkpoint(model, x, use_reentrant=False, context_fn=contexts).sum().backward()
    return x.grad


@program
def computes_in_bfloat16():
    model = net()

    def loss_of(model, x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
            with torch.autocast("cpu", enabled=False):
                return functional.cross_entropy(out.float(), y)

    found = fit(model, torch.optim.SGD(model.parameters(), 0.1), 2, loss_of)
    return found, torch.is_autocast_enabled("cpu")


@program
def scales_gradients():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(4, 8)).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale(), model.state_dict()


@program
def averages_weights():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    average = torch.optim.swa_utils.AveragedModel(model)
    schedule = torch.optim.swa_utils.SWALR(optimizer, 0.05)
    for _ in range(3):
        fit(model, optimizer, 1)
        average.update_parameters(model)
        schedule.step()
    torch.optim.swa_utils.update_bn([torch.randn(4, 8)], average)
    return average.state_dict()


@program
def steps_within_the_backward_pass():
    model = net()
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    handles = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
    model(torch.randn(4, 8)).sum().backward()
    for handle in handles:
        handle.remove()
    return model.state_dict(), [p.grad for p in model.parameters()]


@program
def saves_and_goes_on():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    fit(model, optimizer, 1)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = net()
    other.load_state_dict(saved["model"], assign=True)
    again = torch.optim.AdamW(other.parameters())
    again.load_state_dict(saved["optimizer"])
    return fit(other, again, 1), len(file.getvalue())


@program
def copies_and_freezes_a_model():
    model = net()
    other = copy.deepcopy(model).requires_grad_(False)
    other[0].requires_grad_(True)
    other(torch.randn(2, 8)).sum().backward()
    return [p.grad for p in other.parameters()], [p.grad for p in model.parameters()]


@program
def trains_two_networks_against_each_other():
    maker, judge = nn.Linear(4, 8), net()
    makers, judges = (torch.optim.Adam(m.parameters()) for m in (maker, judge))
    for _ in range(2):
        fake = maker(torch.randn(4, 4))
        judges.zero_grad()
        (judge(fake.detach()).mean() - judge(torch.randn(4, 8)).mean()).backward()
        judges.step()
        makers.zero_grad()
        (-judge(fake).mean()).backward()
        makers.step()
    return maker.state_dict(), judge.state_dict()


@program
def penalises_gradients():
    model, x = net().eval(), torch.randn(4, 8, requires_grad=True)
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (slope.norm(dim=1) - 1).square().mean().backward()
    return slope, [p.grad for p in model.parameters()]


@program
def runs_recurrent_layers():
    lstm, gru = nn.LSTM(4, 4, 2, batch_first=True, dropout=0.2), nn.GRUCell(4, 4)
    packed = nn.utils.rnn.pack_sequence([torch.randn(n, 4) for n in (5, 3, 1)])
    out, (hidden, _) = lstm(packed)
    padded, lengths = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
    state = gru(padded[:, 0], hidden[-1])
    state.sum().backward()
    return padded, lengths, [p.grad for p in lstm.parameters()]


@program
def runs_attention():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    out = model(torch.randn(2, 5, 8), mask=mask, is_causal=True)
    out.sum().backward()
    return out, functional.scaled_dot_product_attention(*torch.randn(3, 1, 2, 4, 8))


@program
def runs_convolutions():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    )
    out = model(torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last))
    out.sum().backward()
    return out, model.state_dict(), [p.grad for p in model.parameters()]


@program
def loads_data():
    data = TensorDataset(torch.arange(12.0).view(6, 2), torch.arange(6))
    first, second = random_split(data, [4, 2])
    loader = DataLoader(first, 2, shuffle=True)
    return list(itertools.chain(loader, DataLoader(second)))


class Noise(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index, torch.rand(()), random.random(), np.random.rand()


class Stream(IterableDataset):
    def __iter__(self):
        yield from torch.randn(5, 2)


@program
def loads_noise_and_a_stream():
    return list(DataLoader(Noise(), 2)), list(DataLoader(Stream(), 2))


@nightly
@program
def loads_with_workers():
    return list(DataLoader(Noise(), 2, num_workers=2, timeout=60))


@program
def prunes_and_parametrises():
    first = prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.5)
    second = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    third = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 2))
    model = nn.Sequential(first, second, third)
    model(torch.randn(4, 8)).sum().backward()
    prune.remove(first, "weight")
    return model.state_dict(), [p.grad for p in model.parameters()]


@prepared
def goes_on_with_a_model_of_before():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    fit(model, optimizer, 1)
    return lambda: fit(model, optimizer, 2)


@prepared
def runs_backward_through_a_graph_of_before():
    model, x = net(), torch.randn(4, 8, requires_grad=True)
    loss = model(x).exp().sum()

    def run():
        loss.backward()
        return x.grad, [p.grad for p in model.parameters()]

    return run


@program
def generates_with_a_cache():
    project, state, cache = nn.Linear(8, 24), torch.randn(1, 8), []
    with torch.inference_mode():
        for _ in range(4):
            query, key, value = project(state).chunk(3, -1)
            cache.append((key, value))
            keys, values = (torch.cat(parts) for parts in zip(*cache, strict=True))
            state = (query @ keys.t()).softmax(-1) @ values
    return state, state.is_inference()


@program
def routes_to_experts():
    experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    router, x = nn.Linear(4, 3), torch.randn(6, 4)
    weights, chosen = router(x).softmax(1).topk(2)
    mask = nn.functional.one_hot(chosen, 3).permute(2, 1, 0)
    out = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        place, token = torch.where(mask[number])
        out.index_add_(0, token, expert(x[token]) * weights[token, place, None])
    out.square().sum().backward()
    return out, [p.grad for p in experts.parameters()], router.weight.grad
