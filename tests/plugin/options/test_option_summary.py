"""--torchmem-summary: how much of the closing table is shown."""

import pytest


@pytest.fixture
def many(project):
    project.write(
        """
        @pytest.mark.parametrize("size", range(1, 31))
        @pytest.mark.memory_budget("20MiB")
        def test_a(size): use(size * MiB)
        """
    )
    return project


def rows(result):
    lines = [line for line in result.outlines if line.startswith("test_it.py::test_a[")]
    return [line for line in lines if "MiB " in line and "PASSED" not in line]


def test_the_short_table_has_the_failed_and_the_largest(many):
    result = many.run()
    assert len(rows(result)) == 20
    assert "over limit" in rows(result)[0]
    result.stdout.fnmatch_lines(["... and 10 smaller ones (--torchmem-summary=all shows them)"])
    result.stdout.fnmatch_lines(["memory: 10 failed (10 over a limit or baseline), 20 ok"])


def test_all_shows_every_test(many):
    assert len(rows(many.run("--torchmem-summary=all"))) == 30


def test_off_shows_only_what_went_wrong(many):
    result = many.run("--torchmem-summary=off")
    assert not rows(result)
    assert "memory: " not in result.stdout.str()
    # One line in place of ten failures.
    result.stdout.fnmatch_lines(["fake_measure.py:12 made 10 tests fail"])


def test_off_still_says_what_was_not_measured(project):
    project.write("def test_a(torchmem): use(1)")
    project.ini("torchmem_device = cuda:1")
    result = project.run("--torchmem-summary=off")
    result.stdout.fnmatch_lines(["not measured: *"])


def test_quiet_shows_the_counts_only(many):
    result = many.run("-q")
    assert not rows(result)
    result.stdout.fnmatch_lines(["memory: 10 failed (10 over a limit or baseline), 20 ok"])


def test_each_step_of_verbosity_says_more(many):
    assert "memory: " not in many.run("-qq").stdout.str()
    verbose = many.run("-v")
    assert len(rows(verbose)) == 30
    assert "each category's own peak" not in verbose.stdout.str()
    result = many.run("-vv")
    result.stdout.fnmatch_lines(["each category's own peak:"])
    result.stdout.fnmatch_lines(["test_it.py::test_a[[]7]: activation 7.0 MiB"])


def test_off_stays_off_however_verbose(many):
    assert not rows(many.run("--torchmem-summary=off", "-vv"))


def test_the_command_line_beats_the_ini_file(many):
    many.ini("torchmem_summary = off")
    assert not rows(many.run())
    assert rows(many.run("--torchmem-summary=short"))


def test_an_unknown_kind_is_a_usage_error(many):
    result = many.run("--torchmem-summary=long")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: --torchmem-summary: 'long' is not one of short, all, off*"]
    )


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_table_fits_the_terminal(many, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    result = many.run()
    assert all(len(line) <= columns for line in rows(result))
    has_composition = "activation 30.0 MiB" in rows(result)[0]
    assert has_composition == (columns >= 100)


def test_nothing_is_said_where_nothing_was_asked(project):
    project.write("def test_a(): pass")
    result = project.run("--torchmem-summary=all", "--torchmem-update-baseline")
    assert "torchmem ==" not in result.stdout.str()


def test_tests_are_named_as_pytest_names_them_where_it_was_started(sized, monkeypatch):
    sized.update()
    below = sized.path / "below"
    below.mkdir()
    monkeypatch.chdir(below)
    monkeypatch.setenv("SIZE", "50")
    result = sized.run("..", "-rA")
    result.stdout.fnmatch_lines(
        ["../test_it.py::test_a * 50.0 MiB *", "shrunk: ../test_it.py::test_a: *", "PASSED *"]
    )
    assert "PASSED ../test_it.py::test_a" in result.outlines


def test_more_letters_than_have_a_meaning_say_no_more_and_no_less(project):
    project.write("@pytest.mark.memory_budget('2MiB')\ndef test_a(): use(MiB)\n")
    for most, beyond in (("-qq", "-qqqq"), ("-vv", "-vvvv")):
        told = [
            [line for line in project.run(letters).outlines if "MiB" in line]
            for letters in (most, beyond)
        ]
        assert told[0] == told[1]


def test_what_failed_is_red_where_there_are_colours(project):
    project.write("@pytest.mark.memory_budget('1MiB')\ndef test_a(): use(2 * MiB)\n")
    told = [line for line in project.run("--color=yes").outlines if "over limit" in line]
    assert told
    assert all("\x1b[" in line for line in told)
