"""What is put into torch and Python while a body runs is in one table, and is taken out again."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from types import FunctionType

import pytest
import torch

from pytest_torchmem import measure
from pytest_torchmem.record.owners.ownership import OwnershipWatch
from pytest_torchmem.record.patches import PATCHES, STAYING, How, Installed
from pytest_torchmem.record.patches.compiled_code import CompilationWatch
from pytest_torchmem.record.recorder import Recorder
from pytest_torchmem.record.torch_api import compiler, profiler

pytestmark = [pytest.mark.slow, pytest.mark.compiles]

HOW_IT_WORKS = Path(__file__).parents[3] / "docs" / "how-it-works.md"


@pytest.fixture(scope="module", autouse=True)
def all_that_is_patched_is_imported() -> None:
    importlib.import_module("torch._dynamo")


def in_place() -> dict[str, object]:
    """What stands under each replaced name now, and who is registered where hooks are."""
    found: dict[str, object] = {}
    for patch in PATCHES:
        where, _, attribute = patch.name.rpartition(".")
        if patch.how is How.REPLACED and hasattr(pkgutil.resolve_name(where), attribute):
            found[patch.name] = id(vars(pkgutil.resolve_name(where)).get(attribute))
    for place in ("torch.nn.modules.module", "torch.optim.optimizer"):
        for name, value in vars(pkgutil.resolve_name(place)).items():
            if name.startswith("_global_") and isinstance(value, dict):
                found[f"{place}.{name}"] = tuple(map(id, value.values()))
    callbacks = compiler.callbacks()
    found["compiler"] = (*callbacks.start_callbacks, *callbacks.end_callbacks)
    found["profilers"] = (sys.getprofile(), threading.getprofile())
    assert len(found) > 20
    return found


def work() -> None:
    torch.func.grad(lambda x: (x * x).sum())(torch.ones(4))


def test_few_names_are_needed() -> None:
    assert len(PATCHES) + len(STAYING) <= 20


def train() -> None:
    model = torch.nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(model.parameters()).step()


def fail() -> None:
    work()
    raise KeyError("mine")


@pytest.mark.parametrize("body", [work, train])
def test_a_measurement_leaves_everything_as_it_was(body: Callable[[], None]) -> None:
    before = in_place()
    with measure(device="cpu"):
        body()
        within = in_place()
    assert in_place() == before
    assert sum(within[name] != before[name] for name in before) >= 4


def test_a_body_that_fails_leaves_everything_as_it_was() -> None:
    before = in_place()
    with pytest.raises(KeyError), measure(device="cpu"):
        fail()
    assert in_place() == before


def test_what_a_program_puts_in_our_place_stays_and_what_it_puts_back_is_the_original(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = in_place()
    wrapped: dict[str, object] = {}
    with measure(device="cpu"), monkeypatch.context() as patched:
        for name in in_place().keys() & {patch.name for patch in PATCHES}:
            ours = pkgutil.resolve_name(name)
            if isinstance(ours, FunctionType) and before[name] != in_place()[name]:
                wrapped[name] = wraps(ours)(lambda *args, ours=ours, **kw: ours(*args, **kw))
        assert len(wrapped) >= 6
        for name, wrapper in wrapped.items():
            patched.setattr(name, wrapper)
        # As by a fixture, whose teardown comes after the body.
        later = patched._setattr.copy()
        patched._setattr.clear()
        train()
    assert {name: id(wrapper) for name, wrapper in wrapped.items()}.items() <= in_place().items()
    for owner, attribute, ours in reversed(later):
        setattr(owner, attribute, ours)
    train()
    with measure(device="cpu"):
        train()
    assert in_place() == before


def test_a_function_of_ours_that_a_program_keeps_ends_as_the_original() -> None:
    seen: list[object] = []

    def make(original: Callable[..., object]) -> Callable[..., object]:
        def noting(*args: object) -> object:
            seen.append(args)
            return original(*args)

        return noting

    with Installed() as installed:
        installed.replace("torch.nn.Module.__setstate__", make)
        ours = torch.nn.Module.__setstate__
        ours(torch.nn.ReLU(), {})
    module = torch.nn.ReLU()
    ours(module, {"mine": 1})
    assert (vars(module)["mine"], len(seen)) == (1, 1)


def test_an_engine_of_ours_that_a_program_keeps_ends_as_the_original(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted: list[object] = []
    monkeypatch.setattr(
        OwnershipWatch, "before_backward", lambda *arguments: noted.append(arguments)
    )
    monkeypatch.setattr(OwnershipWatch, "after_backward", lambda *_: None)
    before, name = in_place(), "_execution_engine"
    with measure(device="cpu"):
        ours = getattr(torch.autograd.Variable, name)
        train()
    assert (in_place(), len(noted)) == (before, 1)
    setattr(torch.autograd.Variable, name, ours)
    train()
    assert len(noted) == 1
    with measure(device="cpu"):
        train()
    assert (in_place(), len(noted)) == (before, 2)


def installed_by(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> list[str]:
    """The names that are put in place while something is done, in order."""
    names: list[str] = []
    note = Installed.note

    def noting(self: Installed, name: str, undo: Callable[[], object]) -> None:
        names.append(name)
        note(self, name, undo)

    with monkeypatch.context() as patched:
        patched.setattr(Installed, "note", noting)
        act()
    return names


def recording() -> None:
    recorder = Recorder(torch.device("cpu"))
    recorder.start()
    recorder.stop()


NAMES_WHILE_MEASURING = [patch.name for patch in PATCHES if not patch.releases]


def test_all_that_is_put_in_place_is_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_gloo = {"torch.distributed.Work.wait"} if not Path("/proc/self/task").is_dir() else set()
    of_other_releases = {*compiler.SETTERS} - {*compiler.setters()}
    of_some_releases = {patch.name for patch in PATCHES if patch.releases}
    found = [n for n in installed_by(monkeypatch, recording) if n not in of_some_releases]
    assert set(found) == {*NAMES_WHILE_MEASURING} - needs_gloo - of_other_releases
    assert [name for name in found if name in NAMES_WHILE_MEASURING] == found
    with pytest.raises(ValueError, match="is not in PATCHES"):
        Installed().replace("torch.ones", lambda ones: ones)


def test_nothing_is_put_in_place_by_an_import() -> None:
    code = (
        "import torch, weakref, pytest_torchmem.plugin, pytest_torchmem.record.recorder; "
        "assert torch.utils.weakref is weakref; "
        "assert not hasattr(torch.nn.Module.__setstate__, '__wrapped__')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class BrokenError(Exception):
    """Raised by an installation."""


@pytest.mark.parametrize("count", range(0, len(NAMES_WHILE_MEASURING), 4))
def test_an_installation_that_fails_leaves_everything_as_it_was(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, note, left = in_place(), Installed.note, [count]

    def failing(self: Installed, name: str, undo: Callable[[], object]) -> None:
        note(self, name, undo)
        left[0] -= 1
        if left[0] < 0:
            raise BrokenError

    with monkeypatch.context() as patched:
        patched.setattr(Installed, "note", failing)
        with pytest.raises(BrokenError):
            Recorder(torch.device("cpu")).start()
    assert in_place() == before
    assert not profiler.profiler_is_active()


def test_the_last_that_came_is_the_first_that_goes_also_where_one_fails() -> None:
    gone: list[str] = []

    def fails() -> None:
        gone.append("second")
        raise BrokenError

    installed = Installed()
    installed.note("torch.utils.weakref", lambda: gone.append("first"))
    installed.note("torch.utils.weakref", fails)
    installed.note("torch.utils.weakref", lambda: gone.append("third"))
    with pytest.raises(BrokenError):
        installed.remove()
    assert gone == ["third", "second", "first"]
    installed.remove()
    assert len(gone) == 3


def test_a_compiler_that_is_reset_keeps_our_callbacks_until_the_end() -> None:
    callbacks = compiler.callbacks()
    before = [*callbacks.end_callbacks]
    with Installed() as installed:
        CompilationWatch(lambda: None).install(installed)
        callbacks.clear()
        assert len(callbacks.end_callbacks) == 1
    callbacks.end_callbacks[:] = before


def rows() -> Iterator[str]:
    """The table of docs/how-it-works.md."""
    for patch in (*PATCHES, *STAYING):
        how = patch.how.value + (f", {patch.releases}" if patch.releases else "")
        yield f"| `{patch.name}` | {how} | {patch.why} |"


def test_the_table_for_users_is_the_table_that_is_used() -> None:
    text = HOW_IT_WORKS.read_text(encoding="utf-8")
    section = text.partition("## What is put into torch while a body runs\n")[2].partition("\n## ")[
        0
    ]
    assert [line for line in section.splitlines() if line.startswith("| `")] == list(rows())


if __name__ == "__main__":
    print(*rows(), sep="\n")
