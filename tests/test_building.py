"""What is built appears in the cache once, and whole; compilers say what is wrong."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pytest_torchmem import building
from pytest_torchmem.building import (
    UNFINISHED,
    BuildError,
    cache_root,
    compile_sources,
    digest,
    find_compiler,
    make_once,
    unfinished,
)


def test_one_of_many_makes_it_and_the_others_wait(tmp_path: Path) -> None:
    out, made, start = tmp_path / "made", [], threading.Barrier(4)

    def make() -> None:
        with unfinished(out) as folder:
            made.append(folder)
            folder.rename(out)

    def begin(_: int) -> None:
        start.wait()
        make_once(out, out.exists, make)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(begin, range(4)))
    assert len(made) == 1
    assert out.is_dir()


def test_what_raises_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "made"

    def make() -> None:
        with unfinished(out) as folder:
            (folder / "half").touch()
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        make_once(out, out.exists, make)
    assert not out.exists()
    assert not list(tmp_path.glob(f"*{UNFINISHED}"))


def test_names_tell_sources_and_circumstances_apart(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("1")
    two.write_text("2")
    assert digest("x", [one, two]) == digest("x", [two, one])
    assert len({digest("x", [one]), digest("x", [two]), digest("y", [one])}) == 3


def test_the_cache_is_where_the_user_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_root() == Path("/caches/pytest-torchmem")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_root() == Path("/home/somebody/.cache/pytest-torchmem")


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
        building.run_compiler(tmp_path / "g++")


def test_the_strings_are_those_of_torch(tmp_path: Path) -> None:
    settings = tmp_path / "share" / "cmake" / "Torch"
    settings.mkdir(parents=True)
    assert building.options_of_torch(tmp_path) == []
    (settings / "TorchConfig.cmake").write_text('set(FLAGS "-D_GLIBCXX_USE_CXX11_ABI=0")\n')
    assert building.options_of_torch(tmp_path) == ["-D_GLIBCXX_USE_CXX11_ABI=0"]
