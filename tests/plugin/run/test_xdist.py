"""With xdist, workers measure and the controller alone writes and speaks."""

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("xdist")

MANY = """
@pytest.mark.memory_baseline
@pytest.mark.parametrize("size", range(1, 13))
def test_a(size): use(size * MiB)
"""


def test_workers_and_a_single_process_store_the_same_file(project):
    project.write(MANY)
    project.update().assert_outcomes(passed=12)
    alone = project.baseline().read_bytes()
    project.baseline().unlink()
    result = project.run_in_workers(2, "--torchmem-update-baseline")
    result.assert_outcomes(passed=12)
    result.stdout.fnmatch_lines(["baseline updated: 12 entries in 1 file", "memory: 12 new"])
    assert project.baseline().read_bytes() == alone
    stored = sorted(path.name for path in project.baseline().parent.iterdir())
    assert stored == ["test_it.json", "test_it.origins"]


def test_a_failure_in_a_worker_reads_as_without_one(sized, monkeypatch):
    sized.update()
    monkeypatch.setenv("SIZE", "200")
    result = sized.run_in_workers(1)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "memory peaked at 200.0 MiB, +100.0 MiB (+100 %) over the baseline of 100.0 MiB*",
            "memory: 1 failed*",
        ]
    )


def test_what_finished_before_a_worker_died_is_not_lost(project):
    project.write(
        """
        import os, time

        @pytest.mark.memory_baseline
        @pytest.mark.parametrize("size", range(1, 5))
        def test_a(size): use(size * MiB)

        @pytest.mark.memory_baseline
        def test_dies():
            use(1)
            time.sleep(0.3)  # let the reports of the others leave
            os._exit(1)
        """
    )
    result = project.run_in_workers(1, "--torchmem-update-baseline")
    result.assert_outcomes(passed=4, failed=1)
    result.stdout.fnmatch_lines(["*worker 'gw0' crashed while running 'test_it.py::test_dies'*"])
    result.stdout.no_fnmatch_line("unused:*")
    assert sorted(project.entries()) == [f"test_a[{size}]" for size in range(1, 5)]


def test_a_dead_worker_loses_no_stored_entry(project, monkeypatch):
    project.write(
        """
        import os

        @pytest.mark.memory_baseline
        def test_a(): use(1 * MiB)

        @pytest.mark.memory_baseline
        def test_dies():
            use(1)
            if "DIE" in os.environ:
                os._exit(1)
        """
    )
    project.update().assert_outcomes(passed=2)
    before = project.baseline().read_bytes()
    monkeypatch.setenv("DIE", "1")
    project.run_in_workers(1, "--torchmem-update-baseline").assert_outcomes(passed=1, failed=1)
    assert project.baseline().read_bytes() == before


def test_after_a_worker_died_nothing_counts_as_unused(project, monkeypatch):
    """The dead worker cannot say any more whether it deselected a test."""
    body = "@pytest.mark.memory_baseline\ndef test_{}(): use(MiB)\n"
    dies = "def test_dies():\n    import os\n    'DIE' in os.environ and os._exit(1)\n"
    unused = ("--torchmem-update-baseline", "--torchmem-accept=unused")
    project.write(body.format("a") + body.format("gone") + dies)
    project.update().assert_outcomes(passed=3)
    project.write(body.format("a") + dies)
    monkeypatch.setenv("DIE", "1")
    project.run_in_workers(1, *unused)
    assert sorted(project.entries()) == ["test_a", "test_gone"]
    monkeypatch.delenv("DIE")
    project.run_in_workers(1, *unused)
    assert sorted(project.entries()) == ["test_a"]


def test_a_group_is_not_part_of_a_tests_name(project):
    project.write(
        """
        @pytest.mark.xdist_group("gpu")
        @pytest.mark.memory_baseline
        @pytest.mark.parametrize("name", ["a", "b@c"])
        def test_a(name): use(1 * MiB)
        """
    )
    project.run_in_workers(1, "--dist=loadgroup", "--torchmem-update-baseline").assert_outcomes(
        passed=2
    )
    assert sorted(project.entries()) == ["test_a[a]", "test_a[b@c]"]


def test_deselection_in_the_workers_calls_nothing_unused(project):
    body = "@pytest.mark.memory_baseline\ndef test_{}(): use(MiB)\n"
    project.write(body.format("a") + body.format("b"))
    project.update()
    result = project.run_in_workers(1, "--torchmem-update-baseline", "-k", "test_a")
    result.stdout.no_fnmatch_line("unused:*")
    project.write(body.format("a"))
    result = project.run_in_workers(1, "--torchmem-update-baseline")
    result.stdout.fnmatch_lines(["  unused: test_b: *"])


def test_a_run_without_xdist_does_not_need_it(project):
    project.write(MANY)
    project.run().assert_outcomes(passed=12)
