"""Stacks that a thread leaves and comes back to, and interpreters beside ours."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.measured import measured


def test_what_greenlets_make_has_their_lines_and_modules() -> None:
    greenlet = pytest.importorskip("greenlet")
    kept: list[torch.Tensor] = []

    def work() -> None:
        while True:
            kept.append(torch.ones(1024))
            main.switch()

    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            other.switch()
            return x + 1

    main, other, net = greenlet.getcurrent(), greenlet.greenlet(work), Net()
    result = measured(lambda: kept.extend([net(torch.ones(2048)) for _ in range(3)]))
    assert result.retained.total == 3 * (1024 + 2048) * 4
    found = {(c.operator, c.source and c.source.function, c.module) for c in result.peak.live}
    assert {("aten::ones", "work", ""), ("aten::add", "forward", "Net")} <= found
    sizes = {c.source.function: c.size_bytes for c in result.peak.live if c.source}
    assert sizes["work"] == 3 * 1024 * 4


def test_an_interpreter_within_the_body_changes_nothing() -> None:
    interpreters = pytest.importorskip("_xxsubinterpreters")

    def body() -> torch.Tensor:
        first = torch.ones(1024)
        number = interpreters.create()
        interpreters.run_string(number, "import gc\nx = [[] for _ in range(100_000)]\ngc.collect()")
        interpreters.destroy(number)
        return first + torch.ones(1024)

    result = measured(body)
    assert result.peak.total == 3 * 1024 * 4
    assert {c.source and c.source.function for c in result.peak.live} == {"body"}
