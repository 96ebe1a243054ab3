"""``torchmem show``."""

import re
from dataclasses import replace

import pytest

from pytest_torchmem.cli.main import Exit
from pytest_torchmem.report.text.terminal import failure_text
from pytest_torchmem.store.run_reports import RunReport, render_run
from pytest_torchmem.values.baseline import Change
from pytest_torchmem.values.contributors import Category, CategoryBytes
from pytest_torchmem.values.findings import Finding, FindingKind
from pytest_torchmem.values.measured import MeasuredTest, Window
from pytest_torchmem.values.picture import OperatorUse, Picture, Span
from pytest_torchmem.values.results import Fate, Holder
from pytest_torchmem.values.units import MiB
from tests.builders import TraceBuilder
from tests.cli.files import CPU, A, baseline, measured, results
from tests.results import contributor, failed, result


def test_show_lists_the_largest_first(command, tmp_path):
    lines = command("show", results(tmp_path / "a.json", A))[1].splitlines()
    assert lines == [
        "10.0 MiB  tests/test_a.py::test_x  (activation 10.0 MiB)",
        " 5.0 MiB  tests/test_a.py::test_y  (activation 5.0 MiB)",
        "2 measured on cpu, torch 2.13",
    ]


def test_how_a_test_stands_to_its_limits_and_its_baseline_is_shown(command, tmp_path):
    test = measured("test_a.py::test_x", 12 * MiB, CPU)
    (window,) = test.windows
    window = replace(
        window, change=Change.WITHIN, baseline_bytes=10 * MiB, limits={"total": 16 * MiB}
    )
    run = RunReport((replace(test, windows=(window,)),))
    (tmp_path / "a.json").write_text(render_run(run))
    assert command("show", "a.json")[1].splitlines() == [
        "12.0 MiB  test_a.py::test_x  (activation 12.0 MiB), 75% of limit; within tolerance, "
        "+2.0 MiB (+20 %)",
        "1 measured on cpu, torch 2.13",
        "memory: 1 ok",
    ]


@pytest.mark.parametrize("kind", ["results", "baselines"])
def test_json_of_other_programs_in_a_folder_is_passed_over(command, tmp_path, kind):
    (tmp_path / "step.perfetto.json").write_text('{"traceEvents": [0.5]}')
    (tmp_path / "list.json").write_text("[1]")
    assert command("show", tmp_path)[0] == Exit.BAD_INPUT
    if kind == "results":
        results(tmp_path / "run.json", {"test_x": MiB})
    else:
        baseline(tmp_path / "__torchmem__/cpu-torch2.13/test_a.json", {"test_x": MiB})
    code, out, _ = command("show", tmp_path)
    assert (code, "test_a.py::test_x" in out) == (Exit.OK, True)


def test_a_file_without_measurements_says_so(command, tmp_path):
    (tmp_path / "a.json").write_text(render_run(RunReport()))
    assert command("show", "a.json")[1] == "nothing was measured\n"


def test_why_a_test_failed_and_what_holds_its_memory_is_shown(command, tmp_path):
    test = measured("test_a.py::test_x", MiB, CPU)
    (window,) = test.windows
    held = Holder(MiB, 1, Fate.HELD, "net.CACHE")
    result = replace(window.result, retained=replace(window.result.retained, holders=(held,)))
    window = replace(window, result=result, findings=failed("one", "two"))
    test = replace(test, windows=(window,), outcome="failed")
    (tmp_path / "a.json").write_text(render_run(RunReport((test,))))
    lines = command("show", "a.json", "test_x")[1].splitlines()
    assert lines[2:4] == ["  failed: one", "  failed: two"]
    assert lines[-1] == "    1.0 MiB in 1 storage: still held by net.CACHE"


def test_show_tells_everything_about_a_test(command, tmp_path):
    out = command("show", results(tmp_path / "a.json", A), "test_x")[1]
    assert "test_y" not in out
    assert "peak 10.0 MiB, retained 0 B" in out
    assert "aten::mm    net.fc    src/net.py:3 forward" in out


def test_shares_are_those_of_the_peak_as_in_a_failure(command, tmp_path):
    kept, scratch = contributor(80 * MiB), contributor(60 * MiB, Category.TEMPORARY)
    left, small = (contributor(size, Category.TEMPORARY) for size in (30 * MiB, 10 * MiB))
    one = result(kept, retained=(left, small))
    # Scratch has its own peak at another moment, and not all that was retained is listed.
    peaks = CategoryBytes(activation=80 * MiB, temporary=60 * MiB)
    peak = replace(one.peak, total=100 * MiB, by_category=peaks, live_by_category=(kept, scratch))
    one = replace(one, peak=peak, retained=replace(one.retained, live=(small,)))
    over = Finding(FindingKind.OVER_LIMIT, "retained", "over")
    window = Window(one, (over,), key="test_x", limits={"total": 1})
    run = RunReport((MeasuredTest("test_a.py::test_x", "", CPU, (window,)),))
    (tmp_path / "a.json").write_text(render_run(run))
    out = command("show", "a.json", "test_x")[1]
    failure = failure_text([window], "", "pytest")
    for text in (out, failure):
        assert re.search(r"10.0 MiB +25% +temporary", text)
    assert re.search(r"80.0 MiB +80% +activation", out)
    assert re.search(r"60.0 MiB +60% +temporary", out)
    assert "each at its category's own peak, as shares of the peak:" in out


def test_what_was_held_against_nothing_is_shown_and_not_compared(command, tmp_path):
    body, region = result(contributor(9 * MiB)), result(contributor(3 * MiB), name="part")
    windows = (Window(body), Window(region))
    test = MeasuredTest("t.py::test_a", "t.py", CPU, (), unjudged=windows, raised="ValueError")
    path = tmp_path / "a.json"
    path.write_text(render_run(RunReport((replace(test, outcome="failed"),))))
    code, out, _ = command("show", path)
    assert code == 0
    assert "9.0 MiB  t.py::test_a (unfinished)" in out
    assert "3.0 MiB  t.py::test_a::part" in out
    results(tmp_path / "b.json", {"t.py::test_a": 1 * MiB})
    code, out, _ = command("diff", path, tmp_path / "b.json")
    assert (code, "shrunk" in out) == (0, False)
    assert "1 new" in out


def test_show_of_a_test_that_is_not_there_ends_with_2(command, tmp_path):
    code, _, err = command("show", results(tmp_path / "a.json", A), "nobody")
    assert code == Exit.BAD_INPUT
    assert "'nobody'" in err


def test_an_estimated_number_is_named_so(command, tmp_path):
    test = measured("t.py::test_x", MiB, CPU)
    (window,) = test.windows
    window = replace(window, result=replace(window.result, estimated=True))
    test = replace(test, windows=(window,))
    (tmp_path / "a.json").write_text(render_run(RunReport((test,))))
    assert "estimated" in command("show", "a.json")[1]
    assert "estimated" in command("show", "a.json", "test_x")[1]
    grown = results(tmp_path / "b.json", {"t.py::test_x": 9 * MiB})
    assert "estimated" in command("diff", "a.json", grown)[1]


def test_what_ran_at_the_peak_is_shown_with_its_time(command, tmp_path):
    test = measured("test_a.py::test_x", MiB, CPU)
    (window,) = test.windows
    picture = Picture(
        times_ns=(0, 5),
        rows=(0, 1),
        change_count=2,
        levels={Category.ACTIVATION: (0, MiB)},
        operators=(OperatorUse("aten::mm", 3, 2 * MiB, MiB, 1_500_000),),
        running=(
            Span("running", "step", 0, 9_000_000),
            Span("running", "aten::mm", 0, 2_000_000),
        ),
    )
    test = replace(test, windows=(replace(window, picture=picture),))
    (tmp_path / "a.json").write_text(render_run(RunReport((test,))))
    assert command("show", "a.json", "test_x", "--operators")[1].splitlines() == [
        "test_a.py::test_x",
        "what ran at the peak:",
        "  step  9.000 ms",
        "    aten::mm  2.000 ms",
        "",
        "operators that allocated:",
        "operator      calls    own time    allocated    live at the peak",
        "aten::mm          3    1.500 ms      2.0 MiB             1.0 MiB",
    ]
    code, _, error = command("show", "a.json", "test_z", "--operators")
    assert code == Exit.BAD_INPUT
    assert "no timeline of a test with 'test_z'" in error


def test_the_operators_of_a_trace_are_shown(command, tmp_path):
    b = TraceBuilder()
    with b.op("aten::outer"), b.op("aten::inner"):
        b.alloc(MiB)
    b.build().save(tmp_path / "body.trace")
    lines = command("show", "body.trace", "--operators")[1].splitlines()
    assert lines[:3] == [
        "what ran at the peak:",
        "  aten::outer  0.003 us",
        "    aten::inner  0.001 us",
    ]
    assert lines[5].split()[:2] == ["aten::inner", "1"]
    assert "1.0 MiB" in lines[5]


def test_a_folder_of_the_files_of_several_ranks_has_what_each_of_them_notes(command, tmp_path):
    for number in range(2):
        test = measured("tests/test_a.py::test_x", MiB, {**CPU, "rank": f"{number} of 2"})
        (window,) = test.windows
        told = replace(window.result, notes=(f"a note of {number}",))
        window = replace(window, result=told, findings=failed(f"rank {number} is too large"))
        test = replace(test, windows=(window,))
        (tmp_path / f"run-rank{number}.json").write_text(render_run(RunReport((test,))))
    _, table = command("show", tmp_path)[:2]
    notes = [line.partition(", torch")[0] for line in table.splitlines()[-2:]]
    assert notes == [f"note: cpu, rank {number} of 2" for number in range(2)]
    assert [line[-11:] for line in table.splitlines()[-2:]] == ["a note of 0", "a note of 1"]
    _, text = command("show", tmp_path, "test_x")[:2]
    for number in range(2):
        assert f"  failed: rank {number} is too large" in text
        assert f"  note: a note of {number}" in text


def test_a_baseline_without_its_origins_shows_the_categories_that_its_numbers_have(
    command, tmp_path
):
    path = tmp_path / "__torchmem__/cpu-torch2.13/test_a.json"
    baseline(path, {"test_x": MiB})
    path.with_suffix(".origins").unlink()
    assert "test_x  (at most activation 1.0 MiB)" in command("show", path)[1]
    one = command("show", path, "test_x")[1]
    assert "  activation:         1.0 MiB at most" in one.splitlines()
