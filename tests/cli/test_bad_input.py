"""Every command ends with 2 and one line for what it cannot read: 1 means that something grew."""

from __future__ import annotations

import zipfile
from struct import pack

import pytest

from pytest_torchmem.cli import main
from pytest_torchmem.cli.main import Exit

COMMANDS = {
    "diff, first": ("diff", "BAD", "BAD"),
    "show": ("show", "BAD"),
    "show --operators": ("show", "--operators", "BAD"),
    "explain": ("explain", "BAD"),
    "report": ("report", "BAD", "-o", "out.md"),
    "report, for a viewer": ("report", "BAD", "-o", "out.perfetto.json"),
    "fits": ("fits", "--capacity", "1GiB", "BAD"),
    "reserved": ("reserved", "BAD"),
    "history": ("history", "-C", "BAD"),
    "simulate": ("simulate", "--gpu", "H100", "--", "BAD"),
}


def _member_of_a_trace(content: bytes):
    def write(path):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("header.npy", content)
        return path

    return write


def _written(content: bytes):
    def write(path):
        path.write_bytes(content)
        return path

    return write


_BRACKETS = b"\x93NUMPY\x01\0" + pack("<H", 9001) + b"(" * 9000 + b"\n"
_QUOTES = b"\x93NUMPY\x01\0" + pack("<H", 4) + b"'''\n"
BAD = {
    "a name of 300 characters": lambda path: path.with_name("n" * 300),
    "a path of 5,000 characters": lambda path: path.joinpath(*["n" * 100] * 50),
    "a name with a NUL": lambda path: f"{path}\0.json",
    "a name with commands": lambda path: path.with_name("a\n::error::b\x1b[31m"),
    "no file": lambda path: path,
    "a file as a folder": lambda path: _written(b"")(path) / "x",
    "an empty file": _written(b""),
    "a trace of brackets": _member_of_a_trace(_BRACKETS),
    "a trace of quotes": _member_of_a_trace(_QUOTES),
    "half a snapshot": _written(b"\x80\x04\x95"),
    "half a text": _written(b'{"entries": [["'),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_bad_input_ends_with_2_and_one_line(command, tmp_path, monkeypatch, words, bad):
    monkeypatch.chdir(tmp_path)
    path = str(BAD[bad](tmp_path / "input"))
    code, out, err = command(*(path if word == "BAD" else word for word in words))
    assert (code, out) == (Exit.BAD_INPUT, "")
    (line,) = err.splitlines()
    assert line.startswith("torchmem: ")
    assert line.isprintable()


@pytest.mark.parametrize("ending", [".html", ".md", ""])
def test_an_output_that_cannot_be_named_ends_with_2(command, tmp_path, ending):
    (tmp_path / "run.json").write_text('{"entries": []}')
    code, _, err = command("report", tmp_path / "run.json", "-o", tmp_path / ("n" * 300 + ending))
    assert code == Exit.BAD_INPUT
    assert len(err.splitlines()) == 1


def test_a_fault_of_our_own_has_a_code_of_its_own(command, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("a fault")

    monkeypatch.setattr(main, "read_measurements", broken)
    code, _, err = command("show", "x.json")
    assert code == Exit.FAULT
    assert "RuntimeError: a fault" in err
