"""Compilers of this machine, and what is said where one is missing or fails."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest

from pytest_torchmem.building import cpp
from pytest_torchmem.building.cpp import BuildError, compile_sources, find_compiler


def test_no_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(BuildError, match=r"no C\+\+ compiler; install g\+\+, or `pip install z"):
        find_compiler(any_kind=True)
    with pytest.raises(BuildError, match=r"no C\+\+ compiler; install g\+\+$"):
        find_compiler()


def test_zig_builds_only_what_speaks_no_c_plus_plus_with_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: True)
    assert find_compiler(any_kind=True) == [sys.executable, "-m", "ziglang", "c++"]
    with pytest.raises(BuildError):
        find_compiler()


def test_an_error_of_the_compiler_is_told(tmp_path: Path) -> None:
    (tmp_path / "good.cpp").write_text("int good() { return 1; }")
    (tmp_path / "bad.cpp").write_text("int bad() { return missing; }")
    with pytest.raises(BuildError, match=r"(?s)failed: .*bad\.cpp.*missing"):
        compile_sources(find_compiler(), tmp_path, [], tmp_path)


def test_all_sources_are_compiled(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.cpp").write_text(f"int {name}() {{ return 1; }}")
    made = compile_sources(find_compiler(), tmp_path, [], tmp_path)
    assert made == [tmp_path / "one.o", tmp_path / "two.o"]
    assert all(path.stat().st_size for path in made)


def test_a_compiler_that_cannot_be_started_is_told(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"g\+\+ could not be started"):
        cpp.run_compiler(tmp_path / "g++")


def test_the_strings_are_those_of_torch(tmp_path: Path) -> None:
    settings = tmp_path / "share" / "cmake" / "Torch"
    settings.mkdir(parents=True)
    assert cpp.options_of_torch(tmp_path) == []
    (settings / "TorchConfig.cmake").write_text('set(FLAGS "-D_GLIBCXX_USE_CXX11_ABI=0")\n')
    assert cpp.options_of_torch(tmp_path) == ["-D_GLIBCXX_USE_CXX11_ABI=0"]
