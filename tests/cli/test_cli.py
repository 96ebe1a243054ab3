"""``torchmem diff`` and ``report``: what they print and what they end with."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_torchmem.cli.main import Exit
from pytest_torchmem.store.results import RunReport, read_run, render_run
from pytest_torchmem.values.units import MiB
from tests.builders import TraceBuilder
from tests.cli.files import CPU, GPU, A, baseline, results
from tests.report.sample_run import report_of
from tests.report.sample_run import window as drawn_window

# --- diff


def test_nothing_grown_ends_with_0(torchmem, tmp_path):
    one, two = results(tmp_path / "a.json", A), results(tmp_path / "b.json", A)
    assert torchmem("diff", one, two) == (Exit.OK, "2 same\n", "")


def test_growth_ends_with_1_and_names_its_cause(torchmem, tmp_path):
    one = results(tmp_path / "a.json", A)
    two = results(tmp_path / "b.json", {**A, "test_x": 14 * MiB})
    code, out, _ = torchmem("diff", one, two)
    assert code == Exit.GROWN
    assert out.splitlines() == [
        "grown   tests/test_a.py::test_x  10.0 MiB -> 14.0 MiB, +4.0 MiB (+40.0%)",
        "        +4.0 MiB of activation from aten::mm in net.fc (net.py:3)",
        "1 grown, 1 same",
    ]


def test_what_shrank_came_or_went_is_told_and_ends_with_0(torchmem, tmp_path):
    one = results(tmp_path / "a.json", A)
    two = results(tmp_path / "b.json", {"test_x": 4 * MiB, "test_z": MiB})
    code, out, _ = torchmem("diff", one, two)
    assert code == Exit.OK
    assert [line.split()[0] for line in out.splitlines() if line[0] != " "] == [
        "shrunk",
        "new",
        "unused",
        "1",
    ]


def test_growth_within_the_allowance_is_the_same(torchmem, tmp_path):
    one = results(tmp_path / "a.json", A)
    two = results(tmp_path / "b.json", {**A, "test_x": 10 * MiB + MiB // 2})
    assert torchmem("diff", one, two)[1] == "1 within tolerance, 1 same\n"
    assert torchmem("diff", one, two)[0] == Exit.OK
    assert torchmem("diff", one, two, "--floor", "1KiB")[0] == Exit.GROWN
    assert torchmem("diff", one, two, "--floor", "0B", "--tolerance", "10%")[0] == Exit.OK


def test_results_are_compared_with_a_baseline_file(torchmem, tmp_path):
    path = tmp_path / "tests/__torchmem__/cpu-torch2.13/test_a.json"
    one = baseline(path, {"test_x": 8 * MiB, "test_y": 5 * MiB})
    two = results(tmp_path / "b.json", A)
    assert torchmem("diff", one, two)[1].endswith("1 grown, 1 same\n")
    assert torchmem("diff", tmp_path, two)[0] == Exit.BAD_INPUT  # b.json is no baseline
    assert torchmem("diff", tmp_path / "tests", two)[1].endswith("1 grown, 1 same\n")
    folder = tmp_path / "tests/__torchmem__"
    assert torchmem("diff", folder, two)[1].endswith("1 grown, 1 same\n")


def test_tests_of_one_name_in_two_modules_are_kept_apart(torchmem, tmp_path):
    one = results(tmp_path / "a.json", {"a/test_m.py::test_x": 9 * MiB, "b/test_m.py::test_x": MiB})
    two = results(tmp_path / "b.json", {"b/test_m.py::test_x": MiB, "a/test_m.py::test_x": 9 * MiB})
    assert torchmem("diff", one, two)[1] == "2 same\n"


def test_a_test_is_paired_with_neither_of_two_modules_that_have_its_name(torchmem, tmp_path):
    one = results(tmp_path / "a.json", {"a/test_m.py::test_x": 9 * MiB, "b/test_m.py::test_x": MiB})
    two = results(tmp_path / "b.json", {"c/test_m.py::test_x": 9 * MiB})
    assert torchmem("diff", one, two)[1].endswith("1 new, 2 unused\n")
    assert torchmem("diff", two, one)[1].endswith("2 new, 1 unused\n")


def test_other_environments_are_compared_and_said_to_be_other(torchmem, tmp_path):
    one = results(tmp_path / "a.json", A, CPU)
    two = results(tmp_path / "b.json", A, GPU)
    out = torchmem("diff", one, two)[1]
    assert "a.json: measured on cpu, torch 2.13" in out
    assert "b.json: measured on Fake 100, capability 9.0, torch 2.13" in out
    assert "the environments differ" in out
    assert out.endswith("2 same\n")


def test_a_gpu_s_entry_is_not_compared_with_the_cpu_s_of_the_same_test(torchmem, tmp_path):
    for folder, more in (("one", 0), ("two", MiB * 9)):
        baseline(tmp_path / folder / "cpu/test_a.json", {"test_x": MiB}, CPU)
        baseline(tmp_path / folder / "gpu/test_a.json", {"test_x": 20 * MiB + more}, GPU)
    code, out, _ = torchmem("diff", tmp_path / "one", tmp_path / "two")
    assert code == Exit.GROWN
    assert "20.0 MiB -> 29.0 MiB" in out
    assert out.endswith("1 grown, 1 same\n")


def test_json_is_for_programs(torchmem, tmp_path):
    one = results(tmp_path / "a.json", A)
    two = results(tmp_path / "b.json", {"test_x": 14 * MiB})
    code, out, _ = torchmem("diff", one, two, "--format=json")
    data = json.loads(out)
    assert (code, data["kind"], data["format"]) == (Exit.GROWN, "torchmem-diff", 1)
    grown = data["tests"][0]
    assert (grown["change"], grown["before_bytes"], grown["after_bytes"]) == (
        "grown",
        10 * MiB,
        14 * MiB,
    )
    assert data["tests"][1]["after_bytes"] is None


def test_all_shows_what_is_the_same(torchmem, tmp_path):
    one = results(tmp_path / "a.json", A)
    assert "same    tests/test_a.py::test_x  10.0 MiB\n" in torchmem("diff", one, one, "--all")[1]


def test_no_colour_leaves_the_terminal(torchmem, tmp_path):
    one = results(tmp_path / "a.json", A)
    two = results(tmp_path / "b.json", {"test_x": 14 * MiB})
    assert "\x1b" not in torchmem("diff", one, two)[1]


# --- bad input


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "cannot be read"),
        ("[1]", "neither a results file nor a baseline"),
        ('{"entries": {}, "format": 99}', "has format 99"),
        ('{"entries": {"a": {}}, "format": 1, "environment": %s}', "is damaged"),
        ('{"kind": "torchmem-results", "format": 77}', "has format 77"),
    ],
)
def test_bad_input_ends_with_2_and_the_reason(torchmem, tmp_path, text, reason):
    bad = tmp_path / "bad.json"
    bad.write_text(text.replace("%s", '{"device": "cpu", "torch": "2"}'))
    code, out, err = torchmem("diff", bad, bad)
    assert (code, out) == (Exit.BAD_INPUT, "")
    assert reason in err
    assert "[bad-report]" in err
    assert torchmem("show", bad)[0] == Exit.BAD_INPUT


def test_a_missing_file_and_an_empty_folder_end_with_2(torchmem, tmp_path):
    assert torchmem("diff", "no.json", "no.json")[0] == Exit.BAD_INPUT
    (tmp_path / "empty").mkdir()
    assert "no baseline" in torchmem("show", "empty")[2]
    assert torchmem("report", "no.json", "-o", "x.html")[0] == Exit.BAD_INPUT


def test_a_bad_option_ends_with_2(torchmem, tmp_path):
    one = results(tmp_path / "a.json", A)
    said = torchmem("diff", one, one, "--tolerance=much")[2]
    assert said.startswith("torchmem: --tolerance: cannot read 'much'")
    assert said.endswith("[bad-size]\n")
    assert said.count("[") == 1
    assert "--floor: cannot read '3'" in torchmem("diff", one, one, "--floor=3")[2]
    with pytest.raises(SystemExit) as end:
        torchmem("diff", one)
    assert end.value.code == Exit.BAD_INPUT


# --- report


def test_shards_become_one_report(torchmem, tmp_path):
    one = results(tmp_path / "a.json", {"test_x": MiB})
    two = results(tmp_path / "b.json", {"test_y": MiB})
    assert torchmem("report", one, two, "-o", "both.json")[:2] == (
        Exit.OK,
        "report written: both.json\n",
    )
    names = [test.measured.test for test in read_run(tmp_path / "both.json").tests]
    assert names == ["tests/test_a.py::test_x", "tests/test_a.py::test_y"]


@pytest.mark.parametrize("name", ["x.html", "x.md", "folder"])
def test_the_name_decides_the_form(torchmem, tmp_path, name):
    one = results(tmp_path / "a.json", A)
    assert torchmem("report", one, "-o", name)[0] == Exit.OK
    path = tmp_path / name
    text = (path / "index.html" if path.is_dir() else path).read_text(encoding="utf-8")
    assert "tests/test_a.py::test_x" in text


def test_one_test_alone(torchmem, tmp_path):
    one = results(tmp_path / "a.json", A)
    torchmem("report", one, "--test", "test_x", "-o", "x.json")
    assert len(read_run(tmp_path / "x.json").tests) == 1
    assert torchmem("report", one, "--test", "nobody", "-o", "x.json")[0] == Exit.BAD_INPUT


def test_a_test_whose_name_begins_another_s_can_be_drawn(torchmem, tmp_path):
    names = ["test_train", *(f"test_train_{number}" for number in range(6))]
    tests = tuple(report_of(name, drawn_window("test_step")) for name in names)
    run = tmp_path / "run.json"
    run.write_text(render_run(RunReport(tests)))
    ids = [test.measured.test for test in tests]
    assert torchmem("report", run, "--test", ids[0], "-o", "t.svg")[0] == Exit.OK
    assert "test_train</" in (tmp_path / "t.svg").read_text()
    code, _, err = torchmem("report", run, "--test", "test_train", "-o", "t.svg")
    assert code == Exit.BAD_INPUT
    listed = ", ".join(ids[:5])
    assert err.endswith(f"7 tests have one; name one test: {listed}, and 2 more [bad-report]\n")


def test_a_form_that_there_is_not_ends_with_2(torchmem, tmp_path):
    one = results(tmp_path / "a.json", A)
    code, _, err = torchmem("report", one, "-o", "x.pdf")
    assert code == Exit.BAD_INPUT
    assert ".json, .md, .html, .svg," in err
    code, _, err = torchmem("report", one, "-o", "x.svg")
    assert code == Exit.BAD_INPUT
    assert err.endswith("shows one timeline, and no test has one [bad-report]\n")


@pytest.fixture
def trace(tmp_path):
    import torch

    from pytest_torchmem.measuring.body import BodyMeasurement

    measurement = BodyMeasurement("cpu")
    measurement.start()
    torch.nn.Linear(8, 8)(torch.ones(4, 8)).sum().backward()
    measurement.stop()
    path = tmp_path / "body.trace"
    measurement.profile_so_far().tree.trace.save(path)
    return path


@pytest.mark.parametrize("name", ["x.html", "x.svg", "x.json", "x.md"])
def test_a_stored_trace_becomes_a_report(torchmem, trace, tmp_path, name):
    assert torchmem("report", trace, "-o", name)[0] == Exit.OK
    assert (tmp_path / name).stat().st_size > 100


def test_a_stored_trace_opens_in_other_viewers(torchmem, trace, tmp_path):
    assert torchmem("report", trace, "-o", "x.perfetto.json")[0] == Exit.OK
    assert json.loads((tmp_path / "x.perfetto.json").read_text())["traceEvents"]
    assert torchmem("report", trace, "-o", "x.pickle")[0] == Exit.OK
    assert (tmp_path / "x.pickle").stat().st_size > 500


# --- the command itself


def test_it_is_a_command_and_needs_neither_torch_nor_pytest(tmp_path):
    one = results(tmp_path / "a.json", A)
    program = (
        "import sys; from pytest_torchmem.cli.main import main; "
        f"code = main(['diff', {one!r}, {one!r}]); "
        "loaded = {'torch', 'pytest', '_pytest'} & set(sys.modules); "
        "sys.exit(code or ','.join(sorted(loaded)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=False, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    command = [sys.executable, "-m", "pytest_torchmem", "--version"]
    assert subprocess.run(command, capture_output=True, check=False, text=True).stdout.startswith(
        "torchmem "
    )


def test_a_reader_who_stops_early_is_no_error(tmp_path):
    many = {f"test_{i}": MiB for i in range(5000)}
    one = results(tmp_path / "a.json", many)
    command = f"{sys.executable} -m pytest_torchmem show {one} | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, check=False, text=True)
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == ""
    assert Path(one).exists()


def test_a_test_in_two_files_is_told(torchmem, tmp_path):
    one = results(tmp_path / "a.json", A)
    two = results(tmp_path / "b.json", {"test_y": 7 * MiB, "test_z": MiB})
    code, _, err = torchmem("report", one, two, "-o", "both.json")
    assert code == Exit.OK
    assert err == "torchmem: results left out because a later file has the same test: 1\n"
    tests = json.loads((tmp_path / "both.json").read_text())["tests"]
    assert len(tests) == 3


def test_a_file_of_another_kind_is_named(torchmem, tmp_path):
    trace, told = str(tmp_path / "body.trace"), results(tmp_path / "a.json", A)
    builder = TraceBuilder()
    builder.alloc(8)
    builder.build().save(trace)
    assert "body.trace is a recording; torchmem report, fits" in torchmem("show", trace)[2]
    code, _, err = torchmem("fits", told, "--capacity=1GiB")
    assert code == Exit.BAD_INPUT
    assert err == f"torchmem: cannot read {told} as a trace: it is not one [bad-trace]\n"


def test_names_in_a_file_give_the_terminal_no_commands(torchmem, tmp_path):
    name = "tests/test_a.py::test_x[\x1b[31m\n::error::boo]"
    one = results(tmp_path / "a.json", {name: MiB})
    two = results(tmp_path / "b.json", {name: 5 * MiB})
    for arguments in (("show", one), ("show", one, "test_x"), ("diff", one, two)):
        out = torchmem(*arguments)[1]
        assert "test_x" in out
        assert "\x1b" not in out
        assert not any(line.startswith("::") for line in out.splitlines())


def test_a_number_that_is_none_ends_with_2_and_no_traceback(torchmem, tmp_path):
    one = Path(results(tmp_path / "a.json", A))
    for wrong in ('"much"', "[]", "NaN", "null", "1e999"):
        bad = tmp_path / "bad.json"
        bad.write_text(one.read_text().replace(f'"total": {10 * MiB}', f'"total": {wrong}'))
        assert bad.read_text() != one.read_text()
        code, _, err = torchmem("show", bad)
        assert (code, err.count("\n")) in ((Exit.BAD_INPUT, 1), (Exit.OK, 0)), wrong
