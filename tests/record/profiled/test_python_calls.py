"""Python calls in the event tree: functions, files and lines."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from pytest_torchmem.record.environment import library_paths
from pytest_torchmem.record.profiled.python_calls import Gap, PythonCalls, full_path
from pytest_torchmem.record.recorded_tables import StringTable
from pytest_torchmem.values.trace import EVENT


def called(text: str) -> tuple[str, str]:
    """Function and file that the name of a Python call stands for; no file is ``""``."""
    strings = StringTable()
    events = np.zeros(1, EVENT)
    PythonCalls(strings).read([0], [text], [7], events)
    assert events["line"][0] == 7
    values = (*strings.values(), "")
    return values[events["name"][0]], values[events["file"][0]]


@pytest.mark.parametrize(
    ("text", "function", "file"),
    [
        ("/home/me/model.py(12): forward", "forward", "/home/me/model.py"),
        ("/home/me/a (copy).py(1): <lambda>", "<lambda>", "/home/me/a (copy).py"),
        ("<eval_with_key>.3(5): forward", "forward", "<eval_with_key>.3"),
        ("<string>(-1): made", "made", "<string>"),
        ("nn.Module: Linear_0", "nn.Module: Linear_0", ""),
    ],
)
def test_a_name_is_taken_apart_into_function_and_file(text, function, file):
    assert called(text) == (function, file)


def test_an_address_is_no_part_of_a_name():
    first, second = (
        called(f"<built-in method addmm of type object at {address}>")
        for address in ("0x7f36a0b2c5e0", "0x11")
    )
    assert first == second == ("<built-in method addmm of type object>", "")


@pytest.fixture
def on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "model.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_path_that_was_cut_is_completed(on_the_path: Path) -> None:
    assert full_path("pkg/model.py") == str(on_the_path.resolve() / "pkg" / "model.py")


@pytest.mark.parametrize("name", ["nowhere/model.py", "<frozen runpy>", "/absolute/model.py"])
def test_a_path_that_nothing_completes_stays(on_the_path: Path, name: str) -> None:
    assert full_path(name) == name


def test_with_another_folder_on_the_path_a_name_is_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "of_both.py").touch()
        monkeypatch.syspath_prepend(str(tmp_path / folder))
        found += [called("of_both.py(1): f")[1] for _ in range(2)]
    one, other = (str((tmp_path / folder / "of_both.py").resolve()) for folder in ("one", "other"))
    assert found == [one, one, other, other]


def test_installed_packages_and_ours_are_the_librarys_and_tests_are_not() -> None:
    folders = tuple(f"{folder}/" for folder in library_paths())
    assert torch.__file__.startswith(folders)
    assert sys.modules[PythonCalls.__module__].__file__.startswith(folders)
    assert pytest.__file__.startswith(folders)
    assert not __file__.startswith(folders)


@pytest.mark.parametrize("name", ["site-packages", "dist-packages"])
def test_packages_that_a_virtual_environment_sees_outside_of_it_are_the_librarys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path / name))
    assert str(tmp_path / name) in library_paths()
    assert str(tmp_path) not in library_paths()


def test_operators_between_two_calls_get_lines_in_the_users_files_alone(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("def forward(x, y):\n    x = call(x)\n    z = x + y\n    return call(z)\n")
    strings = StringTable()
    calls = PythonCalls(strings)
    events = np.zeros(4, EVENT)
    texts = [f"{file}(1): forward", f"{torch.__file__}(1): forward", "<built-in method add>"]
    assert list(map(calls.is_users, texts)) == [True, False, False]
    calls.place_operators([Gap(0, (1,), 2, 4)], texts[:1], ["aten::add"], events)
    assert events["line"].tolist() == [0, 3, 0, 0]
