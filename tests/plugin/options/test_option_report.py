"""--torchmem-report."""

import json
import subprocess
import xml.etree.ElementTree as ElementTree

import pytest

from pytest_torchmem.store.run_reports import FORMAT, KIND, read_run
from pytest_torchmem.store.traces import load_trace

TESTS = """
@pytest.mark.memory_budget("1MiB")
def test_over():
    use(3 * MiB)

@pytest.mark.memory_budget("9MiB")
def test_under(torchmem):
    use(2 * MiB)
    with torchmem.measure("part"):
        use(1 * MiB)

def test_plain():
    pass
"""


@pytest.fixture
def two(project):
    project.write(TESTS)
    return project


def test_several_reports_are_written_of_one_run(two):
    options = ("--torchmem-report=run.json", "--torchmem-report", "run.md", "--torchmem-report=out")
    result = two.run(*options, "--torchmem-report=run.json")
    written = [line for line in result.outlines if line.startswith("report written: ")]
    assert [line.rpartition(" ")[2] for line in written] == ["run.json", "run.md", "out/index.html"]
    run = json.loads((two.path / "run.json").read_text())
    pictured = [test["test"] for test in run["tests"] if test["windows"][0]["picture"]]
    assert len(pictured) == 2, "a file has the timelines of all tests, beside a folder, too"
    two.pytester.makeini("[pytest]\naddopts = --torchmem-report=a.json --torchmem-report=b.md")
    two.run()
    assert (two.path / "a.json").exists()
    assert (two.path / "b.md").exists()


def test_a_home_that_nobody_has_is_a_name_like_any_other(two):
    two.run("--torchmem-report=~nobody.json")
    assert (two.path / "~nobody.json").exists()


def test_a_report_that_cannot_be_written_keeps_no_other_from_it(two):
    (two.path / "file").write_text("")
    result = two.run("--torchmem-report=file/run.json", "--torchmem-report=run.md")
    result.stdout.fnmatch_lines(["file/run.json cannot be written*"])
    assert (two.path / "run.md").exists()


def test_json_holds_the_whole_run(two):
    two.run("--torchmem-report=run.json")
    run = json.loads((two.path / "run.json").read_text())
    assert (run["kind"], run["format"]) == (KIND, FORMAT)
    tests = {test["test"]: test for test in run["tests"]}
    assert set(tests) == {"test_it.py::test_over", "test_it.py::test_under"}
    over = tests["test_it.py::test_over"]
    assert (over["outcome"], over["file"], over["line"]) == ("failed", "test_it.py", 6)
    assert over["windows"][0]["result"]["peak"]["total"] == 3 << 20
    assert over["windows"][0]["limits"] == {"total": 1 << 20}
    assert over["windows"][0]["picture"]["levels"] == {"activation": [1, 3 << 20]}
    (part,) = tests["test_it.py::test_under"]["unjudged"]
    assert part["result"]["name"] == "part"
    assert part["picture"]["levels"] == {"activation": [1, 1 << 20]}
    assert set(run["versions"]) == {"torchmem", "torch", "python", "platform"}


def test_what_is_written_can_be_read_back(two):
    two.run("--torchmem-report=run.json")
    run = read_run(two.path / "run.json")
    assert run.counts() == {"failed": 1, "ok": 1}


def test_a_report_of_no_known_kind_is_told_before_any_test_runs(two):
    result = two.run("--torchmem-report=run.png")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--torchmem-report: run.png: *write run.svg instead*"])


def test_nothing_of_the_machine_is_in_a_results_file(two):
    two.run("--torchmem-report=run.json")
    assert str(two.path) not in (two.path / "run.json").read_text()


def test_the_ending_decides_what_is_written(two):
    two.run("--torchmem-report=run.md")
    assert "test_it.py::test_over" in (two.path / "run.md").read_text(encoding="utf-8")
    two.run("--torchmem-report=deep/run.html")
    assert (two.path / "deep/run.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_folder_has_a_page_for_each_failed_test(two):
    result = two.run("--torchmem-report=out")
    names = {path.name for path in (two.path / "out").iterdir()}
    assert names == {"results.json", "summary.md", "index.html", "tests"}
    page, trace = sorted((two.path / "out/tests").iterdir())
    assert page.name.startswith("test-it-py-test-over-")
    assert (page.stem, page.suffix, trace.suffix) == (trace.stem, ".html", ".trace")
    load_trace(trace)
    result.stdout.fnmatch_lines(["report written: out/index.html"])


def test_pages_of_an_earlier_run_go_and_other_files_stay(two):
    two.run("--torchmem-report=out", "--torchmem-report=run.json")  # timelines of all tests
    (two.path / "out/tests/mine.html").write_text("")
    assert len(list((two.path / "out/tests").iterdir())) == 4
    two.run("--torchmem-report=out")
    assert len(list((two.path / "out/tests").iterdir())) == 3
    assert (two.path / "out/tests/mine.html").exists()


def test_an_ending_without_meaning_is_a_usage_error(two):
    result = two.run("--torchmem-report=run.xml")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["*--torchmem-report: run.xml: no report has this ending*[[]bad-report]"]
    )


def test_a_report_that_cannot_be_written_fails_the_run(project):
    project.write("def test_a(torchmem):\n    use(1)\n")
    (project.path / "file").write_text("")
    result = project.run("--torchmem-report=file/run.json")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*cannot be written*[[]bad-report]"])
    result.assert_outcomes(passed=1)


def test_a_path_starts_here(two, monkeypatch):
    (two.path / "sub").mkdir()
    monkeypatch.chdir(two.path / "sub")
    two.run("..", "--torchmem-report=typed.json")
    assert (two.path / "sub/typed.json").exists()


def test_a_run_that_measured_nothing_still_writes_what_was_asked_for(project):
    project.write("def test_plain():\n    pass\n")
    project.run("--torchmem-report=run.json").assert_outcomes(passed=1)
    assert read_run(project.path / "run.json").tests == ()


def test_the_commit_is_in_it(two):
    git = ["git", "-C", str(two.path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *arguments], check=True)
    two.run("--torchmem-report=run.json")
    run = read_run(two.path / "run.json")
    assert len(run.commit) == 40
    assert not run.dirty
    two.write(TESTS + "\n")
    two.run("--torchmem-report=run.json")
    assert read_run(two.path / "run.json").dirty


def test_each_outcome_is_told(project):
    project.write("""
        @pytest.mark.xfail(strict=True)
        @pytest.mark.memory_budget("1MiB")
        def test_expected():
            use(3 * MiB)

        @pytest.fixture
        def broken():
            yield
            raise OSError

        @pytest.mark.memory_budget("1MiB")
        def test_torn(broken):
            use(1)

        @pytest.mark.memory_budget("1MiB", device="cuda:7")
        def test_elsewhere():
            use(1)
    """)
    project.run("--torchmem-report=run.json")
    tests = read_run(project.path / "run.json").tests
    assert {t.test.partition("::")[2]: t.outcome for t in tests} == {
        "test_expected": "xfailed",
        "test_torn": "failed",
        "test_elsewhere": "skipped",
    }


@pytest.mark.slow
def test_workers_send_their_timelines_and_the_controller_writes(two):
    two.run_in_workers(2, "--torchmem-report=run.json").assert_outcomes(passed=2, failed=1)
    run = read_run(two.path / "run.json")
    assert all(test.windows[0].picture for test in run.tests)
    assert len(run.tests) == 2


@pytest.mark.slow
def test_a_worker_sends_the_recording_of_a_failed_test(two):
    two.run_in_workers(2, "--torchmem-report=out")
    (trace,) = (two.path / "out/tests").glob("*.trace")
    load_trace(trace)


def test_properties_are_replaced_by_a_rerun(project):
    pytest.importorskip("pytest_rerunfailures")
    project.write("""
        sizes = iter([5, 2])

        @pytest.mark.flaky(reruns=1)
        @pytest.mark.memory_budget("4MiB")
        def test_a(record_property):
            record_property("mine", 1)
            use(next(sizes) * MiB)
    """)
    result = project.run("--junitxml=j.xml", "-p", "rerunfailures")
    assert result.parseoutcomes()["rerun"] == 1
    cases = list(ElementTree.parse(project.path / "j.xml").iter("testcase"))
    last = [(p.get("name"), p.get("value")) for p in cases[-1].iter("property")]
    assert [value for name, value in last if name == "torchmem_peak_bytes"] == [str(2 << 20)]
    assert ("mine", "1") in last


def test_github_is_told_where_and_why(two, monkeypatch):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(two.path.parent))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(two.path / "summary.md"))
    result = two.run()
    start = f"::error file={two.path.name}/test_it.py,line=6,title=memory over-limit%3A test_over"
    result.stdout.fnmatch_lines([f"{start}::memory peaked at 3.0 MiB*"])
    assert "1 failed, 1 ok" in (two.path / "summary.md").read_text(encoding="utf-8")


def test_github_is_shown_the_line_that_grew_where_git_has_its_file(sized, monkeypatch):
    sized.update()
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(sized.path.parent))
    monkeypatch.setenv("SIZE", "150")
    subprocess.run(["git", "init", "-q"], cwd=sized.path, check=True)
    sized.run().stdout.no_fnmatch_line("::warning *")  # no file of git's
    subprocess.run(["git", "add", "fake_measure.py"], cwd=sized.path, check=True)
    file = f"{sized.path.name}/fake_measure.py"
    sized.run().stdout.fnmatch_lines(
        [
            f"::error file={sized.path.name}/test_it.py,line=*::* peaked at 150.0 MiB*",
            f"::warning file={file},line=12,title=memory grown here::test_it.py::test_a: *",
        ]
    )


def test_elsewhere_nothing_is_said_to_github(two, monkeypatch):
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(two.path / "summary.md"))
    assert "::error" not in two.run().stdout.str()
    assert not (two.path / "summary.md").exists()
