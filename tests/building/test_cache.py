"""What is built appears in the cache once, and whole."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pytest_torchmem.building.cache import UNFINISHED, cache_root, digest, make_once, unfinished


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
