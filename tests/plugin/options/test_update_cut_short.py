"""An update whose run ends early stores what was measured, and says what was not."""

import pytest

BODY = """
import os

@pytest.mark.memory_baseline
def test_a(): use(SIZE * MiB)

@pytest.mark.memory_baseline
def test_b():
    use(SIZE * MiB)
    if SIZE == 20:
        {end}

@pytest.mark.memory_baseline
def test_c(): use(SIZE * MiB)
"""
SHORT = (
    "the run was cut short: {} of 3 tests did not run to their end; their entries are as before*"
)
ALL = "--torchmem-accept=new,grown,shrunk,unused"


def write(project, end, size):
    project.write(BODY.format(end=end).replace("SIZE", str(size)))


@pytest.mark.parametrize(
    ("end", "arguments", "missed"),
    [
        ("assert False", ("-x",), 1),
        ("assert False", ("--maxfail=1",), 1),
        ("raise KeyboardInterrupt", (), 2),
        ("pytest.exit('enough')", (), 2),
    ],
)
def test_what_was_measured_is_stored_and_what_was_not_is_told(project, end, arguments, missed):
    project.write(
        "@pytest.mark.memory_baseline\ndef test_z(): use(MiB)\n"
        + BODY.format(end=end).replace("SIZE", "10")
    )
    project.update()
    write(project, end, 20)
    told = project.run_apart("--torchmem-update-baseline", ALL, *arguments)
    told.stdout.fnmatch_lines(["  grown: test_a: *", SHORT.format(missed)])
    sizes = {key: entry["total"] >> 20 for key, entry in project.entries().items()}
    assert sizes == {"test_a": 20, "test_b": 10, "test_c": 10, "test_z": 1}


def test_a_crashed_worker_cuts_an_update_short(project):
    write(project, "os._exit(3)", 10)
    project.update()
    write(project, "os._exit(3)", 20)
    told = project.run_in_workers(1, "--torchmem-update-baseline", ALL)
    told.stdout.fnmatch_lines([SHORT.format(1)])
    sizes = {key: entry["total"] >> 20 for key, entry in project.entries().items()}
    assert sizes["test_b"] == 10


@pytest.mark.parametrize("arguments", [(), ("-x",), ("-k", "a"), ("--collect-only",)])
def test_a_run_that_came_to_its_end_was_not_cut_short(project, arguments):
    write(project, "assert True", 20)
    project.update(*arguments).stdout.no_fnmatch_line("*cut short*")
