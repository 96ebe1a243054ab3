"""``torchmem diff`` and ``report``: what they print and what they end with."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_torchmem.cli.main import Exit, _parser
from pytest_torchmem.store.run_reports import RunReport, read_run, render_run
from pytest_torchmem.values.units import MiB
from tests.builders import TraceBuilder
from tests.cli.files import CPU, GPU, A, baseline, results
from tests.report.sample_run import report_of
from tests.report.sample_run import window as drawn_window

# --- diff


def test_nothing_grown_ends_with_0(command, tmp_path):
    one, two = results(tmp_path / "a.json", A), results(tmp_path / "b.json", A)
    assert command("diff", one, two) == (Exit.OK, "2 same\n", "")


def test_growth_ends_with_1_and_names_its_cause(command, tmp_path):
    one = results(tmp_path / "a.json", A)
    two = results(tmp_path / "b.json", {**A, "test_x": 14 * MiB})
    code, out, _ = command("diff", one, two)
    assert code == Exit.GROWN
    assert out.splitlines() == [
        "grown   tests/test_a.py::test_x  10.0 MiB -> 14.0 MiB, +4.0 MiB (+40 %)",
        "        +4.0 MiB of activation from aten::mm at net.py:3 in net.fc",
        "1 grown, 1 same",
    ]


def test_what_shrank_came_or_went_is_told_and_ends_with_0(command, tmp_path):
    one = results(tmp_path / "a.json", A)
    two = results(tmp_path / "b.json", {"test_x": 4 * MiB, "test_z": MiB})
    code, out, _ = command("diff", one, two)
    assert code == Exit.OK
    assert [line.split()[0] for line in out.splitlines() if line[0] != " "] == [
        "shrunk",
        "new",
        "gone",
        "1",
    ]


def test_growth_within_the_allowance_is_the_same(command, tmp_path):
    one = results(tmp_path / "a.json", A)
    two = results(tmp_path / "b.json", {**A, "test_x": 10 * MiB + MiB // 2})
    assert command("diff", one, two)[1] == "1 within tolerance, 1 same\n"
    assert command("diff", one, two)[0] == Exit.OK
    assert command("diff", one, two, "--floor", "1KiB")[0] == Exit.GROWN
    assert command("diff", one, two, "--floor", "0B", "--tolerance", "10%")[0] == Exit.OK


def test_results_are_compared_with_a_baseline_file(command, tmp_path):
    path = tmp_path / "tests/__torchmem__/cpu-torch2.13/test_a.json"
    one = baseline(path, {"test_x": 8 * MiB, "test_y": 5 * MiB})
    two = results(tmp_path / "b.json", A)
    assert command("diff", one, two)[1].endswith("1 grown, 1 same\n")
    code, _, told = command("diff", tmp_path, two)
    assert (code, "has results and baselines, such as " in told) == (Exit.BAD_INPUT, True)
    assert command("diff", tmp_path / "tests", two)[1].endswith("1 grown, 1 same\n")
    folder = tmp_path / "tests/__torchmem__"
    assert command("diff", folder, two)[1].endswith("1 grown, 1 same\n")


def test_tests_of_one_name_in_two_modules_are_kept_apart(command, tmp_path):
    one = results(tmp_path / "a.json", {"a/test_m.py::test_x": 9 * MiB, "b/test_m.py::test_x": MiB})
    two = results(tmp_path / "b.json", {"b/test_m.py::test_x": MiB, "a/test_m.py::test_x": 9 * MiB})
    assert command("diff", one, two)[1] == "2 same\n"


def test_a_test_is_paired_with_neither_of_two_modules_that_have_its_name(command, tmp_path):
    one = results(tmp_path / "a.json", {"a/test_m.py::test_x": 9 * MiB, "b/test_m.py::test_x": MiB})
    two = results(tmp_path / "b.json", {"c/test_m.py::test_x": 9 * MiB})
    assert command("diff", one, two)[1].endswith("1 new, 2 gone\n")
    assert command("diff", two, one)[1].endswith("2 new, 1 gone\n")


def test_other_environments_are_compared_and_said_to_be_other(command, tmp_path):
    one = results(tmp_path / "a.json", A, CPU)
    two = results(tmp_path / "b.json", A, GPU)
    out = command("diff", one, two)[1]
    assert "a.json: measured on cpu, torch 2.13" in out
    assert "b.json: measured on Fake 100, capability 9.0, torch 2.13" in out
    assert "the environments differ" in out
    assert out.endswith("2 same\n")


def test_a_gpu_s_entry_is_not_compared_with_the_cpu_s_of_the_same_test(command, tmp_path):
    for folder, more in (("one", 0), ("two", MiB * 9)):
        baseline(tmp_path / folder / "cpu/test_a.json", {"test_x": MiB}, CPU)
        baseline(tmp_path / folder / "gpu/test_a.json", {"test_x": 20 * MiB + more}, GPU)
    code, out, _ = command("diff", tmp_path / "one", tmp_path / "two")
    assert code == Exit.GROWN
    assert "20.0 MiB -> 29.0 MiB" in out
    assert out.endswith("1 grown, 1 same\n")


def test_json_is_for_programs(command, tmp_path):
    one = results(tmp_path / "a.json", A)
    two = results(tmp_path / "b.json", {"test_x": 14 * MiB})
    code, out, _ = command("diff", one, two, "--format=json")
    data = json.loads(out)
    assert (code, data["kind"], data["format"]) == (Exit.GROWN, "torchmem-diff", 1)
    grown = data["tests"][0]
    assert (grown["change"], grown["before_bytes"], grown["after_bytes"]) == (
        "grown",
        10 * MiB,
        14 * MiB,
    )
    assert data["tests"][1]["after_bytes"] is None


def test_all_shows_what_is_the_same(command, tmp_path):
    one = results(tmp_path / "a.json", A)
    assert "same    tests/test_a.py::test_x  10.0 MiB\n" in command("diff", one, one, "--all")[1]


def test_no_colour_leaves_the_terminal(command, tmp_path):
    one = results(tmp_path / "a.json", A)
    two = results(tmp_path / "b.json", {"test_x": 14 * MiB})
    assert "\x1b" not in command("diff", one, two)[1]


# --- bad input


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no pipes with names")
@pytest.mark.parametrize("words", [("show",), ("diff", "a.json"), ("report", "-o=x.html")])
def test_a_pipe_that_nobody_writes_into_is_refused(command, tmp_path, words):
    results(tmp_path / "a.json", A)
    os.mkfifo(tmp_path / "pipe.json")
    code, _, err = command(*words, "pipe.json")
    assert code == Exit.BAD_INPUT
    assert "it is a pipe, and no file" in err


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no pipes with names")
def test_a_pipe_among_baselines_is_refused(command, tmp_path):
    (tmp_path / "one/cpu").mkdir(parents=True)
    os.mkfifo(tmp_path / "one/cpu/test_a.json")
    assert "it is a pipe, and no file" in command("show", tmp_path / "one")[2]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "cannot be read"),
        ("[1]", "neither a results file nor a baseline"),
        ('{"entries": {}, "format": 99}', "written by another version: record it"),
        ('{"entries": [["a", "work", 1], ["end"]], "format": 4, "environment": %s}', "is damaged"),
        ('{"kind": "torchmem-results", "format": 77}', "written by another version: record it"),
    ],
)
def test_bad_input_ends_with_2_and_the_reason(command, tmp_path, text, reason):
    bad = tmp_path / "bad.json"
    bad.write_text(text.replace("%s", '{"device": "cpu", "torch": "2"}'))
    code, out, err = command("diff", bad, bad)
    assert (code, out) == (Exit.BAD_INPUT, "")
    assert reason in err
    assert "[bad-report]" in err
    assert command("show", bad)[0] == Exit.BAD_INPUT


def test_a_missing_file_and_an_empty_folder_end_with_2(command, tmp_path):
    assert command("diff", "no.json", "no.json")[0] == Exit.BAD_INPUT
    (tmp_path / "empty").mkdir()
    assert "no baseline" in command("show", "empty")[2]
    assert command("report", "no.json", "-o", "x.html")[0] == Exit.BAD_INPUT


def test_a_bad_option_ends_with_2(command, tmp_path):
    one = results(tmp_path / "a.json", A)
    said = command("diff", one, one, "--tolerance=much")[2]
    assert said.startswith("torchmem: --tolerance: cannot read 'much'")
    assert said.endswith("[bad-size]\n")
    assert said.count("[") == 1
    assert "--floor: cannot read '3'" in command("diff", one, one, "--floor=3")[2]
    with pytest.raises(SystemExit) as end:
        command("diff", one)
    assert end.value.code == Exit.BAD_INPUT


# --- report


def test_shards_become_one_report(command, tmp_path):
    one = results(tmp_path / "a.json", {"test_x": MiB})
    two = results(tmp_path / "b.json", {"test_y": MiB})
    assert command("report", one, two, "-o", "both.json")[:2] == (
        Exit.OK,
        "report written: both.json\n",
    )
    names = [test.test for test in read_run(tmp_path / "both.json").tests]
    assert names == ["tests/test_a.py::test_x", "tests/test_a.py::test_y"]


def test_a_folder_of_results_becomes_one_report(command, tmp_path):
    (tmp_path / "run").mkdir()
    out = tmp_path / "x.json"
    code, _, told = command("report", tmp_path / "run", "-o", out)
    assert (code, "no results file in the folder" in told) == (Exit.BAD_INPUT, True)
    for rank, size in enumerate((4, 7)):
        results(tmp_path / f"run/rank{rank}.json", {f"test_{rank}": size * MiB})
    assert command("report", tmp_path / "run", "-o", out)[0] == Exit.OK
    assert len(read_run(out).tests) == 2


@pytest.mark.parametrize("name", ["x.html", "x.md", "folder"])
def test_the_name_decides_the_form(command, tmp_path, name):
    one = results(tmp_path / "a.json", A)
    assert command("report", one, "-o", name)[0] == Exit.OK
    path = tmp_path / name
    text = (path / "index.html" if path.is_dir() else path).read_text(encoding="utf-8")
    assert "tests/test_a.py::test_x" in text


def test_several_reports_are_written_of_one_file(command, tmp_path):
    one = results(tmp_path / "a.json", A)
    exit_code, said, _ = command("report", one, "-o", "x.md", "-o", "x.html")
    assert (exit_code, said) == (Exit.OK, "report written: x.md\nreport written: x.html\n")
    assert (tmp_path / "x.md").exists()
    assert (tmp_path / "x.html").exists()


def test_one_test_alone(command, tmp_path):
    one = results(tmp_path / "a.json", A)
    command("report", one, "--test", "test_x", "-o", "x.json")
    assert len(read_run(tmp_path / "x.json").tests) == 1
    assert command("report", one, "--test", "nobody", "-o", "x.json")[0] == Exit.BAD_INPUT


def test_a_test_whose_name_begins_another_s_can_be_drawn(command, tmp_path):
    names = ["test_train", *(f"test_train_{number}" for number in range(6))]
    tests = tuple(report_of(name, drawn_window("test_step")) for name in names)
    run = tmp_path / "run.json"
    run.write_text(render_run(RunReport(tests)))
    ids = [test.test for test in tests]
    assert command("report", run, "--test", ids[0], "-o", "t.svg")[0] == Exit.OK
    assert "test_train</" in (tmp_path / "t.svg").read_text()
    code, _, err = command("report", run, "--test", "test_train", "-o", "t.svg")
    assert code == Exit.BAD_INPUT
    listed = ", ".join(ids[:5])
    assert err.endswith(f"7 tests have one; name one test: {listed}, and 2 more [bad-report]\n")


def test_a_form_that_there_is_not_ends_with_2(command, tmp_path):
    one = results(tmp_path / "a.json", A)
    code, _, err = command("report", one, "-o", "x.pdf")
    assert code == Exit.BAD_INPUT
    assert ".json, .md, .html, .svg," in err
    code, _, err = command("report", one, "-o", "x.svg")
    assert code == Exit.BAD_INPUT
    assert err.endswith("shows one timeline, and no test has one [bad-report]\n")


@pytest.fixture
def trace(tmp_path):
    import torch

    from pytest_torchmem.measuring.body_measurement import BodyMeasurement

    measurement = BodyMeasurement("cpu")
    measurement.start()
    torch.nn.Linear(8, 8)(torch.ones(4, 8)).sum().backward()
    measurement.stop()
    path = tmp_path / "body.trace"
    measurement.profile_so_far().tree.trace.save(path)
    return path


@pytest.mark.parametrize("name", ["x.html", "x.svg", "x.json", "x.md"])
def test_a_stored_trace_becomes_a_report(command, trace, tmp_path, name):
    assert command("report", trace, "-o", name)[0] == Exit.OK
    assert (tmp_path / name).stat().st_size > 100


def test_a_stored_trace_opens_in_other_viewers(command, trace, tmp_path):
    assert command("report", trace, "-o", "x.perfetto.json")[0] == Exit.OK
    assert json.loads((tmp_path / "x.perfetto.json").read_text())["traceEvents"]
    assert command("report", trace, "-o", "x.pickle")[0] == Exit.OK
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


@pytest.mark.slow
def test_a_reader_who_stops_early_is_no_error(tmp_path):
    many = {f"test_{i}": MiB for i in range(5000)}
    one = results(tmp_path / "a.json", many)
    command = f"{sys.executable} -m pytest_torchmem show {one} | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, check=False, text=True)
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == ""
    assert Path(one).exists()


def test_a_test_in_two_files_is_told(command, tmp_path):
    one = results(tmp_path / "a.json", A)
    two = results(tmp_path / "b.json", {"test_y": 7 * MiB, "test_z": MiB})
    code, _, err = command("report", one, two, "-o", "both.json")
    assert code == Exit.OK
    assert err == "torchmem: results left out because a later file has the same test: 1\n"
    tests = json.loads((tmp_path / "both.json").read_text())["tests"]
    assert len(tests) == 3


def test_a_file_of_another_kind_is_named(command, tmp_path):
    trace, told = str(tmp_path / "body.trace"), results(tmp_path / "a.json", A)
    builder = TraceBuilder()
    builder.alloc(8)
    builder.build().save(trace)
    error = command("show", trace)[2]
    assert "body.trace is a recording; torchmem report, fits" in error
    assert "explain and show --operators a trace" in error
    code, _, err = command("fits", told, "--capacity=1GiB")
    assert code == Exit.BAD_INPUT
    assert err == f"torchmem: cannot read {told} as a trace: it is not one [bad-trace]\n"


def test_names_in_a_file_give_the_terminal_no_commands(command, tmp_path):
    name = "tests/test_a.py::test_x[\x1b[31m\n::error::boo]"
    one = results(tmp_path / "a.json", {name: MiB})
    two = results(tmp_path / "b.json", {name: 5 * MiB})
    for arguments in (("show", one), ("show", one, "test_x"), ("diff", one, two)):
        out = command(*arguments)[1]
        assert "test_x" in out
        assert "\x1b" not in out
        assert not any(line.startswith("::") for line in out.splitlines())


def test_a_number_that_is_none_ends_with_2_and_no_traceback(command, tmp_path):
    one = Path(results(tmp_path / "a.json", A))
    for wrong in ('"much"', "[]", "NaN", "null", "1e999"):
        bad = tmp_path / "bad.json"
        bad.write_text(one.read_text().replace(f'"total": {10 * MiB}', f'"total": {wrong}'))
        assert bad.read_text() != one.read_text()
        code, _, err = command("show", bad)
        assert (code, err.count("\n")) in ((Exit.BAD_INPUT, 1), (Exit.OK, 0)), wrong


def arguments_without_help(parser: argparse.ArgumentParser) -> list[str]:
    actions = parser._actions
    nested = [a for a in actions if isinstance(a, argparse._SubParsersAction)]
    found = [a.dest for a in actions if not a.help and a not in nested]
    return found + [
        f"{name} {dest}"
        for one in nested
        for name, command in one.choices.items()
        for dest in arguments_without_help(command)
    ]


def test_every_argument_of_every_command_has_help():
    assert arguments_without_help(_parser()) == []
    silent = argparse.ArgumentParser(add_help=False)
    silent.add_argument("file")
    assert arguments_without_help(silent) == ["file"]
