"""Files that the command reads, of tests with one size each."""

from pytest_torchmem.store.baselines import FileChanges, write_file
from pytest_torchmem.store.run_reports import RunReport, render_run
from pytest_torchmem.values.baseline import BaselineEntry
from pytest_torchmem.values.measured import MeasuredTest, Window
from pytest_torchmem.values.units import MiB
from tests.results import contributor, result

A = {"test_x": 10 * MiB, "test_y": 5 * MiB}

CPU = {"device": "cpu", "capability": "", "torch": "2.13", "allocator": ""}
GPU = {"device": "Fake 100", "capability": "9.0", "torch": "2.13", "allocator": ""}


def measured(nodeid, size, environment, **changes):
    window = Window(result(contributor(size, **changes)), key=nodeid.partition("::")[2])
    return MeasuredTest(nodeid, "", environment, (window,))


def results(path, sizes, environment=CPU, **changes):
    tests = tuple(
        measured(name if "::" in name else f"tests/test_a.py::{name}", size, environment, **changes)
        for name, size in sizes.items()
    )
    path.write_text(render_run(RunReport(tests, created="2026-01-01T00:00:00+00:00")))
    return str(path)


def baseline(path, sizes, environment=CPU):
    entries = {name: BaselineEntry.of(result(contributor(size))) for name, size in sizes.items()}
    write_file(path, environment, FileChanges(entries))
    return str(path)
