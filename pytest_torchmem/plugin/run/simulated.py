"""Start pytest again where it finds a simulated GPU: a torch that is loaded cannot get one."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator

import pytest

from pytest_torchmem.plugin.options.option_table import simulation_asked
from pytest_torchmem.simulate import GPU_VARIABLE
from pytest_torchmem.simulate.gaps import (
    Gaps,
    decision_sentence,
    gaps_so_far,
    inexact_reads_sentence,
)
from pytest_torchmem.simulate.gpus import parse_gpu
from pytest_torchmem.simulate.process import notice, parse_world, variables
from pytest_torchmem.simulate.torch_builds import torch_build
from pytest_torchmem.values.errors import NotComputedError, SimulationError


def start_again(config: pytest.Config) -> None:
    """Become the same pytest with a simulated GPU; return at once where this is that one.

    The process stays what it is, with its id, terminal and arguments, so signals, exit codes and
    the debugger are pytest's own. xdist's workers inherit the environment. Raises
    `pytest.UsageError` for a GPU that cannot be simulated.
    """
    gpu, place = simulation_asked(config)
    if os.environ.get(GPU_VARIABLE) == gpu:
        return
    if list(config.invocation_params.args) != sys.argv[1:]:
        raise pytest.UsageError(
            f"{place} starts pytest again, and this run was started by a program with "
            f"arguments of its own; start that with `torchmem simulate --gpu {gpu} -- COMMAND` "
            "[not-simulated]"
        )
    try:
        parse_gpu(gpu)
        world = parse_world(config.getini("torchmem_world") or "")
        built = torch_build()
        gpu_variables = variables(gpu, built, world)
    except SimulationError as error:
        raise pytest.UsageError(f"{place}: {error}") from None
    if notice_text := notice(built):
        print(f"torchmem: {notice_text}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **gpu_variables})


class InexactReads:
    """Tells which outcomes of tests depend on values that the GPU would have, and not on memory."""

    _SECTION = "simulated GPU"

    def __init__(self) -> None:
        self._failed = self._passed = 0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        before = gaps_so_far()
        try:
            outcome = yield
        except (AssertionError, pytest.fail.Exception) as error:
            # `pytest.raises` fails so where nothing was raised; our own verdicts have no traceback.
            if getattr(error, "pytrace", True):
                self._note(item, before, "; the assertion may have failed because of that")
            raise
        if decided := decision_sentence(before):
            from pytest_torchmem.plugin.item.body import BODY  # few bodies decide so

            body = item.stash.get(BODY, None)
            if body and not body.is_off:
                raise pytest.fail.Exception(str(NotComputedError(decided)), pytrace=False)
        self._note(item, before, "")
        return outcome

    def _note(self, item: pytest.Item, before: Gaps, consequence: str) -> None:
        if sentence := inexact_reads_sentence(before):
            item.add_report_section("call", self._SECTION, f"{sentence}{consequence}\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if f"Captured {self._SECTION} call" in [name for name, _ in report.sections]:
            self._failed += report.when == "call" and report.failed
            self._passed += report.when == "call" and report.passed

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if count := self._failed:
            terminalreporter.write_line(
                f"torchmem: {count} of the failures are not about memory: an assertion failed "
                "after the body read values that are not exact on a simulated GPU"
            )
        if count := self._passed:
            terminalreporter.write_line(
                f"torchmem: {count} of the tests that passed read values that are not exact on a "
                "simulated GPU; their assertions on such values prove nothing"
            )
