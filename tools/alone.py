"""A plugin of pytest: each test runs in a fork, and tests of torch 2.6 find what they expect.

A failed test of torch's pins its tensors, and the blocks of its graphs stay for the tests after it.
A fork has nothing of other tests. It ends a test that hangs or crashes with its process.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Final

import pytest
import torch
from _pytest.runner import runtestprotocol

LONGEST_S: Final = 600
UTILS: Final = ("common", "inductor")


class _Stderr:
    """The stderr of the moment: tests of 2.6 replace it, and later releases bind theirs once."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def pytest_configure() -> None:
    """Give 2.6's tests the names of 2.6, and let them leave a default device behind."""
    utils: list[Any] = [import_module(f"torch.testing._internal.{name}_utils") for name in UTILS]
    common_utils, inductor_utils = utils
    if not hasattr(inductor_utils, "HAS_CUDA"):
        inductor_utils.HAS_CUDA = inductor_utils.HAS_CUDA_AND_TRITON
    ended = common_utils.TestCase.tearDown

    def tear_down(self: Any) -> None:
        self._prev_torch_function_mode_stack_len = torch._C._len_torch_function_stack()
        ended(self)

    common_utils.TestCase.tearDown = tear_down


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool:
    """Run a test in a fork, and report what the fork reports."""
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _reports_of_a_fork(item):
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _reports_of_a_fork(item: pytest.Item) -> Iterator[pytest.TestReport]:
    with tempfile.TemporaryFile() as written:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                signal.alarm(LONGEST_S)
                _reports_to(item, written)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        written.seek(0)
        reports = written.read()
    if status:
        code = os.waitstatus_to_exitcode(status)
        yield pytest.TestReport(
            item.nodeid, item.location, {}, "failed", f"ended with exit code {code}", "call"
        )
        return
    for data in pickle.loads(reports):
        yield item.ihook.pytest_report_from_serializable(config=item.config, data=data)


def _reports_to(item: pytest.Item, written: Any) -> None:
    # Collecting the tests asked for devices, so torch refuses CUDA in a fork. The simulated
    # driver has nothing of a process.
    torch.cuda._is_in_bad_fork = lambda: False
    for name in ("torch", *logging.root.manager.loggerDict):
        for handler in logging.getLogger(name).handlers if name.startswith("torch") else ():
            if type(handler) is logging.StreamHandler:
                handler.stream = _Stderr()
    config = item.config
    reports = runtestprotocol(item, log=False, nextitem=None)
    data = [item.ihook.pytest_report_to_serializable(config=config, report=r) for r in reports]
    pickle.dump(data, written)
    written.flush()
