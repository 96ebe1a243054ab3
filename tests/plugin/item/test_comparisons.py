"""A failed assert of a size says what it is in words that people use."""

import pytest


def test_a_failed_assert_of_a_region_tells_sizes(project):
    project.write(
        """
        def test_a(torchmem):
            with torchmem.measure("forward") as forward:
                use(4 * MiB)
            assert forward.peak.activation <= 3 * MiB
        """
    )
    result = project.run()
    result.stdout.fnmatch_lines(
        [
            "E *assert 4194304 <= 3145728",
            "E         4.0 MiB <= 3.0 MiB, 1.0 MiB apart",
            "E         'forward': peak 4.0 MiB (activation 4.0 MiB), retained 0 B",
        ]
    )


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("assert part.retained.total == 4 * MiB + 1", "4194304 B == 4194305 B, 1 B apart"),
        ("assert 5 * MiB < part.peak.total", "5.0 MiB < 4.0 MiB, 1.0 MiB apart"),
        ("assert part.peak.total != 4 * MiB", "4.0 MiB != 4.0 MiB"),
        ("assert part.growth == 2 * MiB", ""),
        ("assert part.peak.total == 4.5", ""),
        ("assert 7 * MiB == 3 * MiB", ""),
        ("assert part.peak.total and 7 * MiB == 3 * MiB", ""),
        ("assert part.retained.activation == 3", "4.0 MiB == 3 B, 4.0 MiB apart"),
        ("assert part.peak.gradient > 0", ""),
        ("assert len([1]) > part.peak.gradient + 1", ""),
    ],
)
def test_what_is_compared_with_a_number_that_was_read_is_a_size(project, body, told):
    project.write(
        f"""
        def test_a(torchmem):
            with torchmem.measure("part") as part:
                use(4 * MiB, retained=True)
            {body}
        """
    )
    result = project.run()
    result.assert_outcomes(failed=1)
    if told:
        result.stdout.fnmatch_lines([f"E         {told}"])
    else:
        result.stdout.no_fnmatch_line("* apart*")
        result.stdout.no_fnmatch_line("E *MiB*")


def test_a_test_that_reads_nothing_is_left_alone(project):
    project.write(
        """
        def test_before(torchmem):
            with torchmem.measure("part") as part:
                use(4 * MiB)
            assert part.peak.total

        def test_after():
            assert 4 * MiB == 5

        def test_unread(torchmem):
            with torchmem.measure("part"):
                use(4 * MiB)
            assert 4 * MiB == 5
        """
    )
    result = project.run()
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.no_fnmatch_line("* apart*")


RETAINED = """
    def test_a(torchmem):
        with torchmem.measure("part") as part:
            use(4 * MiB, operator="aten::mm", module="net.fc", retained=True)
        assert {}
"""


def test_a_failed_assert_tells_who_holds_most_of_it(project):
    project.write(RETAINED.format("part.peak.total < 3 * MiB"))
    told = (
        "E             largest 4.0 MiB of activation from aten::mm at fake_measure.py:* in net.fc*"
    )
    project.run().stdout.fnmatch_lines([told])


def test_a_number_that_is_too_small_has_no_cause(project):
    project.write(RETAINED.format("part.peak.total > 5 * MiB"))
    result = project.run()
    result.stdout.fnmatch_lines(["E         4.0 MiB > 5.0 MiB, 1.0 MiB apart"])
    result.stdout.no_fnmatch_line("E *largest*")


def test_a_failed_assert_of_a_category_tells_who_holds_most_of_that_category(project):
    project.write(
        """
        def test_a(torchmem):
            with torchmem.measure("part") as part:
                use(4 * MiB, retained=True)
                use(9 * MiB, "gradient", operator="aten::bmm", retained=True)
            assert part.retained.activation == 0
        """
    )
    project.run().stdout.fnmatch_lines(["E *largest 4.0 MiB of activation from aten::mm *"])
