"""Growth per step: of which loop it is, and what it is made of."""

import subprocess

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.searches(with_optimizers=True)]

pytest.importorskip("torch")

BODIES = """
import collections, pytest, torch

KEEP = []


class Trainer:
    def __init__(self):
        self.model = torch.nn.Linear(256, 256)
        self.log = []

    def step(self):
        out = self.model(torch.ones(64, 256))
        self.log.append(out.detach())
        out.sum().backward()
        self.model.zero_grad()


@pytest.mark.memory_budget(growth="1KiB")
def test_local(torchmem):
    trainer = Trainer()
    for _ in torchmem.steps(4, warmup=1):
        trainer.step()


@pytest.mark.memory_budget(growth="0B")
def test_replaced(torchmem):
    model, losses = torch.nn.Linear(256, 1024), []
    for _ in torchmem.steps(4, warmup=1):
        out = model(torch.ones(512, 256))
        losses.append(out.detach().sum())


@pytest.mark.memory_budget(growth="1KiB")
def test_nested(torchmem):
    for _ in torchmem.steps(2, warmup=1):
        for _ in torchmem.steps(2):
            KEEP.append(torch.ones(1024))


@pytest.mark.memory_budget(growth="1KiB")
def test_between(torchmem):
    for _ in torchmem.steps(2):
        torch.ones(1000)
    kept = torch.ones(100_000)
    for _ in torchmem.steps(3):
        KEEP.append(torch.ones(1024))


@pytest.mark.memory_budget(growth="0B")
def test_hidden(torchmem):
    cache, kept = torch.ones(1 << 20), []
    for step in torchmem.steps(5, warmup=1):
        kept.append(torch.ones(2048))
        if step == 3:
            del cache


@pytest.mark.memory_budget(growth="0B")
def test_made_once(torchmem):
    kept = {}
    for step in torchmem.steps(5):
        if step == 1:
            kept["cache"] = torch.ones(4096)


@pytest.mark.memory_budget(growth="0B")
def test_ring(torchmem):
    ring, gone = collections.deque(maxlen=3), [torch.ones(1 << 18)]
    for step in torchmem.steps(6, warmup=3):
        ring.append(torch.ones(2048))
        if step == 5:
            gone.clear()


@pytest.mark.memory_budget(growth="0B")
def test_emptied_every_fourth_step(torchmem):
    buffer = []
    for _ in torchmem.steps(5, warmup=2):
        buffer.append(torch.ones(2048))
        if len(buffer) == 4:
            buffer.clear()


@pytest.mark.memory_budget(growth="0B")
def test_handed_over(torchmem):
    queue, done = [torch.ones(2048) for _ in range(8)], []
    for _ in torchmem.steps(5, warmup=1):
        done.append(queue.pop() + 1)
"""


@pytest.fixture(scope="module")
def failures(tmp_path_factory, request):
    import subprocess
    import sys

    folder = tmp_path_factory.mktemp("growth")
    (folder / "test_growing.py").write_text(BODIES)
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    command += ("-otorchmem_device=cpu",)  # type: ignore[assignment]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return ran.stdout


def test_what_a_local_variable_keeps_is_named_though_it_is_gone_at_the_end(failures):
    assert (
        "grew by 64.0 KiB per step, +63.0 KiB (+6,300 %) over the limit of 1.0 KiB: +64.0 KiB of "
        "temporary from aten::linear at test_growing.py:13 in Linear" in failures
    )
    assert "growth from step to step: +64.0 KiB, +64.0 KiB, +64.0 KiB\n" in failures
    assert "made by the steps and still there after the last" in failures


def test_what_each_step_replaces_is_no_cause_however_large(failures):
    assert (
        "grew by 4 B per step, +4 B over the limit of 0 B: +4 B of temporary from aten::sum "
        "at test_growing.py:31" in failures
    )


def test_of_nested_loops_the_one_that_grows_most_counts(failures):
    assert "grew by 8.0 KiB per step, +7.0 KiB (+700 %) over the limit" in failures


def test_what_is_made_between_two_loops_is_no_growth(failures):
    assert "grew by 4.0 KiB per step, +3.0 KiB (+300 %) over the limit" in failures


def test_a_release_does_not_hide_what_every_step_leaves_behind(failures):
    assert (
        "grew by 8.0 KiB in most steps, +8.0 KiB over the limit of 0 B: +8.0 KiB of temporary from "
        "aten::ones at test_growing.py:54" in failures
    )
    assert "growth from step to step: +8.0 KiB, -4.0 MiB, +8.0 KiB, +8.0 KiB\n" in failures


def test_what_is_made_once_is_told_from_what_goes_on(failures):
    assert (
        "growth from step to step: +16.0 KiB, +0 B, +0 B, +0 B\nthe last 3 steps added nothing: "
        "make what is made once (a cache, an optimizer's state) in the warm-up, with 1 more step\n"
        in failures
    )


@pytest.mark.parametrize("name", ["ring", "emptied_every_fourth_step", "handed_over"])
def test_what_is_replaced_is_no_growth(failures, name):
    assert f"test_{name}" not in failures


LOSSES = """
import pytest
import torch

LOSSES = []


def train(torchmem):
    weight = torch.ones(1 << 18, requires_grad=True)
    for _ in torchmem.steps(4):
        loss = (weight * 2).pow(2).mean()
        loss.backward()
        LOSSES.append(loss.item())


@pytest.mark.memory_baseline
@pytest.mark.memory_budget(growth="0B", retained="1MiB")
def test_training(torchmem):
    train(torchmem)
    LOSSES.clear()
"""


def test_a_limit_names_what_has_changed_since_the_baseline_was_committed(
    pytester: pytest.Pytester,
) -> None:
    file = pytester.makepyfile(LOSSES)
    pytester.runpytest("--torchmem-update-baseline").assert_outcomes(passed=1)
    author = ("-c", "user.name=n", "-c", "user.email=e@x.org", "-c", "commit.gpgsign=false")
    for command in (["init", "-q"], ["add", "-A"], [*author, "commit", "-qm", "all"]):
        subprocess.run(["git", *command], check=True)
    file.write_text(LOSSES.replace("loss.item()", "loss"), encoding="utf-8")
    result = pytester.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["grew by *; changed since: *.py:13*"])


def test_without_a_repository_it_names_what_has_changed_since_the_baseline_was_written(
    pytester: pytest.Pytester,
) -> None:
    file = pytester.makepyfile(LOSSES)
    pytester.runpytest("--torchmem-update-baseline").assert_outcomes(passed=1)
    file.write_text(LOSSES.replace("loss.item()", "loss"), encoding="utf-8")
    pytester.runpytest().stdout.fnmatch_lines(["grew by *; changed since: *.py:13*"])
    unknown = pytester.runpytest("-p", "no:cacheprovider")
    unknown.assert_outcomes(failed=1)
    unknown.stdout.no_fnmatch_line("*changed since*")


FLICKERS = """
import os, pytest, torch

@pytest.mark.memory_baseline
def test_size():
    torch.ones(int(os.environ["SIZE"]) << 18)
"""


def test_a_number_that_differs_without_a_change_of_code_is_said_to(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = "*--torchmem-repeat=5 says whether it is stable"
    file = pytester.makepyfile(FLICKERS)
    monkeypatch.setenv("SIZE", "9")
    pytester.runpytest("--torchmem-update-baseline").assert_outcomes(passed=1)
    monkeypatch.setenv("SIZE", "20")
    pytester.runpytest().stdout.fnmatch_lines([f"memory peaked at 20.0 MiB*{told}"])
    file.write_text(FLICKERS.replace("18", "19"), encoding="utf-8")
    pytester.runpytest().stdout.no_fnmatch_line(told)
    pytester.runpytest("-p", "no:cacheprovider").stdout.no_fnmatch_line(told)
