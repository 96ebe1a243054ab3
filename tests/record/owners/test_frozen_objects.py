"""What ``gc.freeze`` took out of sight is found, and its state stays as it was."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.searches(with_optimizers=True)]

# Nothing else of this process should be frozen, and a freeze cannot be undone.
PROGRAM = """
import gc, json, sys, types, weakref
import torch
from torch import nn
from pytest_torchmem import measure
from pytest_torchmem.record.heap import instances_of
from pytest_torchmem.values.errors import LimitError

server = types.ModuleType("server")
sys.modules["server"] = server
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(100, 100)
        self.register_buffer("mask", torch.ones(50))
    def forward(self, x):
        return self.layer(x)[:, :50] * self.mask

model = Model()
server.cache = {"last": torch.ones(1000)}
plain = torch.ones(300)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model(torch.ones(2, 100)).sum().backward()
optimizer.step()
def step():
    (model(torch.ones(4, 100)).sum() + plain.sum()).backward()
    optimizer.step()

def body():
    with measure("step", device="cpu") as measured:
        step()
        server.cache["next"] = torch.ones(500)
        server.cache.pop("last", None)
    del server.cache["next"]
    server.cache["last"] = torch.ones(1000)
    return measured.result

step()
before = body()
gc.collect()
gc.freeze()
made_after = torch.ones(200)
counts = [gc.get_freeze_count()]
after = body()
told = ""
try:
    with measure("leak", device="cpu", retained=0):
        server.cache["leak"] = torch.ones(700)
except LimitError as error:
    told = str(error)
counts.append(gc.get_freeze_count())
def look():
    seen = torch.ones(10)
    found = any(thing is seen for thing in instances_of([torch.Tensor]))
    return found, weakref.ref(seen)
gc.disable()
found, seen = look()
looked = [found, seen() is None]
gc.enable()
def serve():
    local = nn.Linear(8, 8)
    gc.freeze()
    x = torch.ones(4, 8)
    with measure("serve", device="cpu") as measured:
        local(x)
        gone = weakref.ref(x)
        del x
        freed = gone() is None
    return freed, {c.value: n for c, n in measured.result.peak.by_category.items() if n}
print(json.dumps({
    "served": serve(),
    "categories": [
        {c.value: n for c, n in r.peak.by_category.items() if n} for r in (before, after)
    ],
    "totals": [before.peak.total, after.peak.total],
    "blind": [before.blind_spots, after.blind_spots],
    "counts": counts,
    "told": told,
    "looked": looked,
    "enabled": gc.isenabled(),
}))
"""


@pytest.mark.nightly
def test_a_frozen_model_is_measured_and_a_frozen_holder_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    before, after = said["categories"]
    assert before == after
    assert {"parameter", "buffer", "optimizer_state", "gradient"} <= before.keys()
    assert said["totals"][0] == said["totals"][1]
    assert said["blind"] == [[], []]
    assert "still held by server.cache['leak']" in said["told"]
    at_first, at_last = said["counts"]
    assert at_first > 10_000
    # Some of what was frozen may be gone; nothing was added.
    assert at_first - 1000 < at_last <= at_first
    assert said["enabled"]
    # A model that only a running function has is found, and the look keeps no variable of it alive.
    freed, categories = said["served"]
    assert freed
    assert categories["parameter"] == 4 * (8 * 8 + 8)
    # A look keeps nothing of what it finds, not even for the collector.
    assert said["looked"] == [True, True]


LOOKS = """
import gc, json, weakref
import torch
from torch import nn
from pytest_torchmem import measure
from pytest_torchmem.record import heap

walk, walks = heap.frozen_objects, []
heap.frozen_objects = lambda: walks.append(1) or walk()
model = nn.Linear(100, 100)
held = {"table": torch.ones(100, 100)}
gc.collect()
gc.freeze()

def body():
    with measure(device="cpu") as measured:
        (model(torch.ones(4, 100)) @ held["table"]).sum().backward()
    model.zero_grad()
    return measured.result.peak

# The first bodies find what holds the table, which no module has as a variable of its own.
first = [body() for _ in range(4)]
walks.clear()
peaks = [body() for _ in range(3)]
few = len(walks)
torch.utils.swap_tensors(model.weight, nn.Parameter(torch.ones(100, 100)))
late = nn.Linear(100, 100)
gc.freeze()
with measure(device="cpu") as measured:
    late(torch.ones(4, 100))
print(json.dumps({
    "walks": few,
    "totals": [p.total for p in (*first, *peaks)],
    "parameters": [p.parameter for p in (*first, *peaks, measured.peak)],
}))
"""


def test_what_is_frozen_is_searched_for_at_first_and_not_before_each_body() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOOKS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["walks"] == 0
    assert len(set(said["totals"])) == 1
    # What is frozen later is found, too, and a tensor that nobody refers to weakly can be swapped.
    assert set(said["parameters"]) == {4 * (100 * 100 + 100)}
