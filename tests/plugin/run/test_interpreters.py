"""A test is measured the same whatever Python was told when it began."""

import os
import subprocess
import sys

import pytest

BODY = """
import pytest
import torch


@pytest.mark.memory_budget("1MiB")
def test_large():
    x = torch.ones(256, 1024)
    x * 2
"""


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        (("-I",), {}),
        ((), {"PYTHONTRACEMALLOC": "1"}),
        (("-X", "dev"), {}),
        (("-O",), {"PYTHONDONTWRITEBYTECODE": "1"}),
    ],
    ids=["isolated", "tracemalloc", "developers", "optimised"],
)
def test_a_limit_fails_with_the_bytes_and_the_line(options, settings, tmp_path):
    (tmp_path / "test_it.py").write_text(BODY, encoding="utf-8")
    command = (
        sys.executable,
        *options,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "test_it.py",
    )
    environment = {**os.environ, **settings}
    ran = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    limit = "memory peaked at 2.0 MiB, +1.0 MiB (+100 %) over the limit of 1.0 MiB"
    assert f"{limit}: largest 1.0 MiB of input from aten::ones (test_it.py:8)" in ran.stdout
    assert "aten::mul             test_it.py:9 test_large" in ran.stdout
    assert "Traceback" not in ran.stdout + ran.stderr
    assert ran.returncode == 1
