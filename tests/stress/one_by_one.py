"""Runs each test in a process of its own, forked off one that has imported everything.

An import costs more than a body. torch itself has done nothing when a process is forked off.
"""

from __future__ import annotations

import importlib
import os
import sys

import pytest

import pytest_torchmem.record.recorder  # noqa: F401


def main(tests: list[str], first: int, step: int) -> None:
    for number in range(first, len(tests), step):
        child = os.fork()
        if child == 0:
            os._exit(pytest.main([tests[number], "-q", f"--torchmem-report=alone-{number}.json"]))
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) not in (0, 1):
            print(f"{tests[number]} ended with status {status}")


if __name__ == "__main__":
    importlib.import_module("torch._dynamo")  # once, and not in each child
    main(sys.stdin.read().split(), int(sys.argv[1]), int(sys.argv[2]))
