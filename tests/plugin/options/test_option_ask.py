"""--torchmem-ask: a question about each change, on a terminal, before an update stores it."""

import contextlib
import os
import signal
import subprocess
import sys
import threading

import pytest

pytestmark = pytest.mark.slow

pty = pytest.importorskip("pty")  # not on Windows
fcntl = pytest.importorskip("fcntl")
termios = pytest.importorskip("termios")

UPDATE = ("--torchmem-update-baseline", "--torchmem-ask")
BODIES = """
    import os

    SIZE = int(os.environ.get("SIZE", "4")) * MiB

    @pytest.mark.memory_baseline
    def test_a(): use(SIZE)

    @pytest.mark.memory_baseline
    def test_b(): use(SIZE)

    @pytest.mark.memory_baseline
    def test_c(): use(SIZE)
"""


def own_terminal():
    """Let Ctrl-C reach this process, also where the tests run in the background and ignore it."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def answered(terminal, answers):
    """Type an answer whenever there is a question; return all that was shown."""
    shown = ""
    with contextlib.suppress(OSError):  # the other end is closed
        while part := os.read(terminal, 4096):
            shown += part.decode().replace("\r\n", "\n")
            if shown.endswith("[y/n/a/q] ") and answers:
                os.write(terminal, answers.pop(0).encode())
    os.close(terminal)
    return shown


@pytest.fixture
def asking(project, monkeypatch):
    """Run an update on a terminal, with typed answers; what it showed."""

    def run(*answers, arguments=(), size="4"):
        try:
            ours, theirs = pty.openpty()
        except OSError as error:
            pytest.skip(f"no terminal can be made: {error}")
        with subprocess.Popen(
            (sys.executable, "-m", "pytest", *UPDATE, *arguments),
            cwd=project.path,
            env={**os.environ, "SIZE": size},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=own_terminal,  # noqa: PLW1509
        ) as process:
            os.close(theirs)
            # A question that nobody answers must not keep the other tests waiting.
            late = threading.Timer(120, process.kill)
            late.start()
            shown = answered(ours, list(answers))
            late.cancel()
        assert process.returncode == 0, shown
        return shown

    project.write(BODIES)
    return run


def totals(project):
    return {key: entry["total"] >> 20 for key, entry in project.entries().items()}


def test_each_change_is_asked_about_and_stored_where_wanted(project, asking):
    shown = asking("y\n", "what\n", "n\n", "yes\n")
    assert totals(project) == {"test_a": 4, "test_c": 4}
    assert shown.count("store it?") == 4  # an answer without meaning is no answer
    assert "new: test_b: 4.0 MiB\n    store it?" in shown
    assert "baseline updated: 2 entries in 1 file" in shown
    assert "not stored: 1 entry\n" in shown


def test_a_question_tells_both_sizes_and_the_cause(project, asking):
    asking("a\n")
    shown = asking("n\n", "n\n", "n\n", size="6")
    assert "grown: test_a: 4.0 MiB -> 6.0 MiB, +2.0 MiB (+50 %)\n    memory peaked at 6" in shown
    assert totals(project) == dict.fromkeys(["test_a", "test_b", "test_c"], 4)


@pytest.mark.parametrize("end", ["q\n", "\x03", "\x04"], ids=["quit", "ctrl-c", "ctrl-d"])
def test_who_quits_keeps_what_was_agreed_and_stores_nothing_more(project, asking, end):
    shown = asking("y\n", end)
    assert shown.count("store it?") == 2
    assert "not stored: 2 entries\n" in shown
    assert totals(project) == {"test_a": 4}


@pytest.mark.parametrize("moment", ["new: test_b", "store it?"])
def test_ctrl_c_while_something_is_shown_quits_as_well(project, asking, moment):
    conftest = project.path / "conftest.py"
    conftest.write_text(
        conftest.read_text()
        + f"""
import builtins, signal

show, shown = builtins.print, []

def interrupted(*values, **options):
    show(*values, **options)
    shown.extend(values)
    if values and {moment!r} in values[0] and any("test_b" in value for value in shown):
        signal.raise_signal(signal.SIGINT)

builtins.print = interrupted
"""
    )
    asking("y\n")
    assert totals(project) == {"test_a": 4}


def test_a_declined_rename_keeps_the_old_entry_also_where_unused_ones_are_removed(project, asking):
    asking("a\n")
    project.write(BODIES.replace("test_b", "test_new"))
    everything = "--torchmem-accept=new,grown,shrunk,unused"
    asking("n\n", arguments=(everything,))
    assert totals(project) == dict.fromkeys(["test_a", "test_b", "test_c"], 4)


def test_all_that_follow_are_stored_without_a_question(project, asking):
    assert asking("n\n", "a\n").count("store it?") == 2
    assert totals(project) == {"test_b": 4, "test_c": 4}


def test_under_xdist_the_controller_asks(project, asking):
    pytest.importorskip("xdist")
    assert asking("n\n", "a\n", arguments=("-p", "xdist", "-n1")).count("store it?") == 2
    assert totals(project) == {"test_b": 4, "test_c": 4}


def test_asking_beside_a_dry_run_is_refused(project):
    project.write(BODIES)
    result = project.run_apart(*UPDATE, "--torchmem-dry-run")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--torchmem-dry-run stores nothing; leave one of them out*"])


def test_without_a_terminal_nothing_runs_or_is_stored(project, monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # it stands for a run that has none
    project.write(BODIES)
    result = project.run_apart(*UPDATE)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--torchmem-ask needs an interactive terminal*"])
    assert not project.baseline().exists()
