"""torch's own lazy imports are no part of a recording."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from pytest_torchmem.record.lazy_imports import ImportPause


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    for name, code in {
        "sympy_like": "import sympy_like_part",
        "sympy_like_part": "",
        "other_like": "",
    }.items():
        (tmp_path / f"{name}.py").write_text(code)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    return []


@pytest.fixture
def pause(events: list[str]) -> ImportPause:
    return ImportPause(lambda: events.append("pause"), lambda: events.append("resume"))


def test_the_recording_pauses_once_for_an_import_and_all_it_imports(
    pause: ImportPause, events: list[str]
) -> None:
    pause.install()
    try:
        importlib.import_module("sympy_like")
    finally:
        pause.remove()
    assert events == ["pause", "resume"]
    assert "sympy_like_part" in sys.modules


def test_a_module_keeps_its_own_loader(pause: ImportPause, events: list[str]) -> None:
    pause.install()
    try:
        module = importlib.import_module("sympy_like")
    finally:
        pause.remove()
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert module.__spec__ is not None
    assert module.__spec__.loader is module.__loader__


def test_imports_of_the_users_are_left_alone(pause: ImportPause, events: list[str]) -> None:
    pause.install()
    try:
        importlib.import_module("other_like")
    finally:
        pause.remove()
    assert events == []


def test_a_module_that_fails_to_import_resumes_the_recording(
    pause: ImportPause, events: list[str], tmp_path: Path
) -> None:
    (tmp_path / "sympy_like.py").write_text("raise ValueError('broken')")
    pause.install()
    try:
        with pytest.raises(ValueError, match="broken"):
            importlib.import_module("sympy_like")
    finally:
        pause.remove()
    assert events == ["pause", "resume"]
