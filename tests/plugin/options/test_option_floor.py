"""torchmem_floor: an increase of no more than this never fails, however small the baseline."""

import pytest


@pytest.mark.parametrize(
    ("before", "same", "grown", "floor"),
    [(20, 21, 22, "1.0 MiB"), (40, 41, 42, "1.0 MiB"), (3, 3, 4, "153.6 KiB")],
)
def test_the_default_is_a_twentieth_of_the_peak_and_one_mebibyte_at_most(
    sized, monkeypatch, before, same, grown, floor
):
    monkeypatch.setenv("SIZE", str(before))
    sized.update()
    monkeypatch.setenv("SIZE", str(same))
    sized.run().assert_outcomes(passed=1)
    monkeypatch.setenv("SIZE", str(grown))
    result = sized.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            f"*over the baseline of {before}.0 MiB: *",
            f"grown against the baseline (floor {floor}), in all *",
        ]
    )


SMALL = """
@pytest.mark.memory_baseline
@pytest.mark.parametrize("size", [100, 2000, 30_000, 960_000, 30_000_000, 900_000_000])
def test_a(size):
    import os
    use(size * int(os.environ["PERCENT"]) // 100)
"""


def test_no_test_grows_by_a_tenth_unseen_however_small_it_is(project, monkeypatch):
    project.write(SMALL)
    monkeypatch.setenv("PERCENT", "100")
    project.update().assert_outcomes(passed=6)
    monkeypatch.setenv("PERCENT", "110")
    project.run().assert_outcomes(failed=6)


def test_same_is_said_of_equal_numbers_only(project, monkeypatch):
    project.write(SMALL)
    monkeypatch.setenv("PERCENT", "100")
    project.update()
    told = project.run()
    assert len([line for line in told.outlines if line.endswith("same as baseline")]) == 6
    monkeypatch.setenv("PERCENT", "102")
    told = project.run()
    told.assert_outcomes(passed=6)
    told.stdout.fnmatch_lines(["*test_a[[]960000] *within tolerance, +18.8 KiB (+2 %)"])
    told.stdout.no_fnmatch_line("*same as baseline*")


def test_a_marker_may_name_a_share_and_a_size(project, monkeypatch):
    body = "@pytest.mark.memory_baseline(floor='50% up to 10MiB')\ndef test_a(): use({} * MiB)\n"
    for before, fits, grown in ((10, 15, 16), (100, 110, 111)):
        project.write(body.format(before))
        project.update()
        project.write(body.format(fits))
        project.run().assert_outcomes(passed=1)
        project.write(body.format(grown))
        project.run().assert_outcomes(failed=1)


def test_the_command_line_beats_the_ini_file(sized, monkeypatch):
    monkeypatch.setenv("SIZE", "3")
    sized.update()
    monkeypatch.setenv("SIZE", "5")
    sized.ini("torchmem_floor = 2MiB")
    sized.run().assert_outcomes(passed=1)
    sized.run("-otorchmem_floor=1MiB").assert_outcomes(failed=1)


def test_the_larger_of_tolerance_and_floor_decides(sized, monkeypatch):
    sized.update()
    monkeypatch.setenv("SIZE", "104")
    sized.run("-otorchmem_floor=4MiB", "-otorchmem_tolerance=1%").assert_outcomes(passed=1)
    sized.run("-otorchmem_floor=1MiB", "-otorchmem_tolerance=4%").assert_outcomes(passed=1)
    sized.run("-otorchmem_floor=3MiB", "-otorchmem_tolerance=3%").assert_outcomes(failed=1)


def test_a_value_that_means_nothing_is_a_usage_error(sized):
    result = sized.run("-otorchmem_floor=1")
    assert result.ret == 4
    result.stderr.fnmatch_lines(["ERROR: -o torchmem_floor: cannot read '1'*"])
