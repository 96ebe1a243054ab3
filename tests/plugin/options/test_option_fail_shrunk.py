"""torchmem_fail_shrunk: a number below its baseline is told, and fails only if asked."""


def test_shrinking_is_told_and_passes(sized, monkeypatch):
    sized.update()
    monkeypatch.setenv("SIZE", "70")
    result = sized.run()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            "shrunk: test_it.py::test_a: memory peaked at 70.0 MiB, 30 % below the baseline of "
            "100.0 MiB: tighten",
            "--torchmem-update-baseline --torchmem-accept=shrunk stores what is lower now",
        ]
    )


def test_with_the_option_it_fails(sized, monkeypatch):
    sized.update()
    sized.run("-otorchmem_fail_shrunk=true").assert_outcomes(passed=1)
    monkeypatch.setenv("SIZE", "70")
    result = sized.run("-otorchmem_fail_shrunk=true")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["memory peaked at 70.0 MiB, 30 % below *: tighten it [[]shrunk]"])


def test_an_update_that_stores_it_passes(sized, monkeypatch):
    sized.update()
    monkeypatch.setenv("SIZE", "70")
    arguments = (
        "-otorchmem_fail_shrunk=true",
        "--torchmem-update-baseline",
        "--torchmem-accept=shrunk",
    )
    sized.run(*arguments).assert_outcomes(passed=1)
    sized.run("-otorchmem_fail_shrunk=true").assert_outcomes(passed=1)


def test_the_ini_name_does_the_same(sized, monkeypatch):
    sized.ini("torchmem_fail_shrunk = true")
    sized.update()
    monkeypatch.setenv("SIZE", "70")
    sized.run().assert_outcomes(failed=1)
