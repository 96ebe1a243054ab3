"""``torchmem calibrate``: simulated GPUs that differ stand for a real one and its simulation."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pytest_torchmem.cli.calibrating import (
    MOST_BYTES,
    CalibratedGpu,
    Calibration,
    PlaceSizes,
    as_file,
)
from pytest_torchmem.cli.main import Exit
from tests.documents import has_simulated_gpu

PRODUCT = """
import subprocess, sys
import torch
x = torch.ones(64, 64, device="cuda")
y = x @ x
subprocess.run([sys.executable, "-c", "import torch; torch.ones(9, device='cuda')"], check=True)
"""

# It writes what torch would after more allocations than its history holds.
LONG = """
import os, pathlib, pickle
from tests.analysis.snapshots import snapshot_of
from pytest_torchmem.allocator import RequestLog, simulate
log = RequestLog()
for key in range(3):
    log.alloc(key, 512)
data = snapshot_of(log.requests(), simulate(log.requests()), 1)
folder = pathlib.Path(os.environ["TORCHMEM_HISTORY"])
(folder / "snapshot.pickle").write_bytes(pickle.dumps(data))
(folder / "device.json").write_text("{}")
"""


@pytest.fixture
def on_an_a100(tmp_path):
    """Runs the command where the GPU that is here is a simulated A100."""
    if not has_simulated_gpu():
        pytest.skip("needs torch's CUDA build: `torchmem simulate --fetch`")

    def run(*arguments):
        torchmem = (sys.executable, "-m", "pytest_torchmem")
        done = subprocess.run(
            [*torchmem, "simulate", "--gpu", "A100", "--", *torchmem, "calibrate", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout.splitlines(), done.stderr

    return run


@pytest.mark.nightly
@pytest.mark.slow
def test_a_program_on_two_gpus_names_the_line_whose_workspace_differs(
    on_an_a100, command, tmp_path
):
    (tmp_path / "prog.py").write_text(PRODUCT)
    written = ("--out", "found.json")
    code, lines, _ = on_an_a100(*written, "--gpu", "H100", "--", sys.executable, "prog.py")
    assert code == Exit.DIFFERS
    assert lines[1] == "of 3 allocations number 3 is the first that differs"
    assert lines[-1] == "  aten::matmul at prog.py:5: 8519680, simulated 33554432"
    assert lines[2].endswith(f"simulated +{33554432 - 8519680:,} B")
    # Elsewhere, without a GPU and without torch's CUDA build, the file says the same.
    code, out, _ = command("calibrate", tmp_path / "found.json")
    assert (code, out.splitlines()) == (Exit.DIFFERS, lines)
    code, lines, _ = on_an_a100("--", sys.executable, "prog.py")
    assert lines[0].count("simulated A100 (torch 2.13") == 2
    assert (code, lines[1]) == (Exit.OK, "all 3 allocations are equal, in their order")


@pytest.mark.nightly
@pytest.mark.slow
def test_our_programs_are_as_on_themselves_and_have_room_in_an_issue(on_an_a100, tmp_path):
    code, lines, said = on_an_a100("--out", "found.json")
    assert "did not end" not in said
    assert (code, lines[1].startswith("all ")) == (Exit.OK, True)
    text = (tmp_path / "found.json").read_text()
    assert len(text) < MOST_BYTES
    places = json.loads(text)["places"]
    operators = {operator for operator, *_ in places}
    assert {"aten::conv2d", "aten::linalg_svd", "aten::lstm_input", "aten::sort"} <= operators
    assert all(real == simulated for *_, real, simulated in places)
    files = {place.partition(":")[0] for operator, place, *_ in places if "lstm" in operator}
    assert files == {"calibration_programs.py"}  # a line of torch's is another file on a GPU


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import torch; torch.ones(9)", "used no GPU here"),
        ("raise SystemExit(3)", "ended with exit code 3 here"),
        ("import os; os.kill(os.getpid(), 9)", "ended by SIGKILL here"),
        ("import os; os._exit(0)", "ends without `os._exit`"),
        (LONG, "more here than the allocator's history holds"),
    ],
)
def test_a_command_without_an_answer_is_told(command, tmp_path, program, said):
    (tmp_path / "prog.py").write_text(program)
    written = tmp_path / "found.json"
    written.write_text("of another run")
    code, _, err = command("calibrate", "--out", written, "--", sys.executable, "prog.py")
    assert code == Exit.BAD_INPUT
    assert said in err
    assert written.read_text() == "of another run"


def test_a_folder_is_refused_before_anything_runs(command, tmp_path):
    run = ("--", sys.executable, "-c", "import pathlib; pathlib.Path('ran').touch()")
    code, _, err = command("calibrate", "--out", tmp_path, *run)
    assert (code, f"{tmp_path} is a folder" in err) == (Exit.BAD_INPUT, True)
    assert not (tmp_path / "ran").exists()


def test_a_file_of_another_release_says_so_and_one_that_is_cut_off_is_none(command, tmp_path):
    other = calibration(PlaceSizes("aten::mm", "net.py:3", "512", "1024"))
    text = as_file(other).replace('"2.13.0"', '"2.6.0+cu124"')
    (tmp_path / "found.json").write_text(text)
    code, out, _ = command("calibrate", tmp_path / "found.json")
    assert (code, out.splitlines()[0]) == (
        Exit.DIFFERS,
        "L4 (torch 2.6.0+cu124) beside L4 (torch 2.6.0+cu124)",
    )
    for length in range(0, len(text) - 3, 40):
        (tmp_path / "found.json").write_text(text[:length])
        code, out, err = command("calibrate", tmp_path / "found.json")
        assert (code, out, len(err.splitlines())) == (Exit.BAD_INPUT, "", 1)
        assert "is no file of `torchmem calibrate`" in err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "is no file of `torchmem calibrate`"),
        ('{"torchmem calibration": 2}', "its format is not 1"),
        ('{"torchmem calibration": 1}', "is no file of `torchmem calibrate`"),
        ("[", "is no file of `torchmem calibrate`"),
    ],
)
def test_another_file_is_told(command, tmp_path, text, said):
    (tmp_path / "found.json").write_text(text)
    code, _, err = command("calibrate", tmp_path / "found.json")
    assert (code, said in err) == (Exit.BAD_INPUT, True), err
    code, _, err = command("calibrate", "python", "prog.py")
    assert (code, "a command after two dashes" in err) == (Exit.BAD_INPUT, True)
    code, _, err = command("calibrate", "--gpu", "H100", tmp_path / "found.json")
    assert (code, "--out and --gpu are for a run" in err) == (Exit.BAD_INPUT, True)


def calibration(*places: PlaceSizes, first_other: int = 1) -> Calibration:
    gpu = CalibratedGpu("L4", "L4", {"torch": "2.13.0"}, {"allocated": 1024})
    return Calibration(gpu, gpu, 9, first_other, places)


def test_a_file_leaves_out_what_is_equal_first_and_says_how_much(command, tmp_path):
    other = PlaceSizes("aten::mm", "net.py:3", "512x3 1024", "512x2 1024x2")
    more = PlaceSizes("aten::mm", "net.py:4", "512 1 2 3 4", "512")
    equal = (PlaceSizes("aten::add", f"net.py:{n}", "512", "512") for n in range(4000))
    path = tmp_path / "found.json"
    path.write_text(as_file(calibration(other, more, *equal)))
    assert path.stat().st_size < MOST_BYTES
    code, out, _ = command("calibrate", path)
    *_, first, second, left_out = out.splitlines()
    assert code == Exit.DIFFERS
    assert first == "  aten::mm at net.py:3: 512, simulated 1024"
    assert (
        second
        == "  aten::mm at net.py:4: 1, simulated none; 2, simulated none; 3, simulated none; 1 more"
    )
    assert left_out.endswith("operators and lines had no room in the file")


def test_another_order_alone_is_told(command, tmp_path):
    path = tmp_path / "found.json"
    path.write_text(as_file(calibration(PlaceSizes("aten::mm", "net.py:3", "512", "512"))))
    code, out, _ = command("calibrate", path)
    assert (code, "in another order" in out) == (Exit.DIFFERS, True)
    path.write_text(as_file(calibration(first_other=0)))
    assert command("calibrate", path)[0] == Exit.OK


def test_a_forged_count_takes_no_memory(command, tmp_path):
    forged = PlaceSizes("aten::mm", "net.py:3", "512x999999999999", "513")
    (tmp_path / "found.json").write_text(as_file(calibration(forged)))
    code, out, _ = command("calibrate", tmp_path / "found.json")
    assert (code, "512, simulated 513" in out) == (Exit.DIFFERS, True)
