"""--torchmem-baseline-from: compare with the numbers of another environment, by name only."""

import shutil

import pytest


def moved(project, name="cpu-torch2.98", **changes):
    """Turn the stored baseline into that of another environment."""
    path = project.baseline()
    other = path.parent.with_name(name) / path.name
    other.parent.mkdir(exist_ok=True)
    text = path.read_text()
    for key, value in {"torch": "2.98", **changes}.items():
        old = {"torch": "2.99", "device": "cpu"}[key]
        text = text.replace(f'"{key}": "{old}"', f'"{key}": "{value}"')
    other.write_text(text)
    return other


@pytest.fixture
def upgraded(sized, monkeypatch):
    """Torch was upgraded since the baseline of 100 MiB was stored, and the test needs 200 now."""
    sized.update()
    moved(sized)
    shutil.rmtree(sized.baseline().parent)
    monkeypatch.setenv("SIZE", "200")
    return sized


def test_another_environment_is_never_compared_with_silently(upgraded):
    result = upgraded.run()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            "test_it.py::test_a *  new",
            "no baseline for cpu-torch2.99; nearest is cpu-torch2.98 (1 entry): "
            "--torchmem-baseline-from=cpu-torch2.98 compares with it",
        ]
    )


def test_a_required_baseline_that_is_missing_names_the_nearest(upgraded):
    result = upgraded.run("-otorchmem_require_baseline=true")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*nearest is cpu-torch2.98, --torchmem-baseline-from=*"])


def test_a_named_environment_is_compared_with_and_said(upgraded, monkeypatch):
    arguments = ("--torchmem-baseline-from=cpu-torch2.98", "-otorchmem_require_baseline=true")
    result = upgraded.run(*arguments)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*over the baseline for cpu-torch2.98 of 100.0 MiB*"])
    monkeypatch.setenv("SIZE", "100")
    result = upgraded.run(*arguments)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["cpu-torch2.99 was compared with the baseline of cpu-torch2.98 (1 entry)"]
    )


def test_an_update_stores_for_the_environment_of_the_run(upgraded):
    result = upgraded.update("--torchmem-baseline-from=cpu-torch2.98")
    result.stdout.fnmatch_lines(["__torchmem__/cpu-torch2.99/*:", "  new: test_a: 200.0 MiB"])
    upgraded.run("--torchmem-baseline-from=cpu-torch2.98").assert_outcomes(passed=1)
    assert (upgraded.baseline().parent.parent / "cpu-torch2.98/test_it.json").exists()


def test_growth_against_another_environment_needs_a_new_entry_to_be_accepted(upgraded):
    result = upgraded.run(
        "--torchmem-update-baseline",
        "--torchmem-accept=grown",
        "--torchmem-baseline-from=cpu-torch2.98",
    )
    result.assert_outcomes(failed=1)


def test_a_gpu_is_never_near_the_cpu(sized):
    sized.update()
    moved(sized, "fake-100-torch2.99", torch="2.99", device="Fake 100")
    shutil.rmtree(sized.baseline().parent)
    result = sized.run("--torchmem-baseline-from=fake-100-torch2.99")
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*nearest is*")
    result.stdout.no_fnmatch_line("*was compared with*")


def test_the_ini_name_does_the_same(upgraded):
    upgraded.ini("torchmem_baseline_from = cpu-torch2.97, cpu-torch2.98")
    upgraded.run().assert_outcomes(failed=1)


@pytest.mark.parametrize("arguments", [(), (".",), ("test_it.py",), ("test_it.py::test_a",)])
def test_a_typed_name_that_no_baseline_has_ends_the_run(upgraded, arguments):
    result = upgraded.run("--torchmem-baseline-from=nope,cpu-torch2.98", *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    said = "ERROR: --torchmem-baseline-from: no baselines are of 'nope'; there are cpu-torch2.98 *"
    result.stderr.fnmatch_lines([said])
    in_workers = upgraded.run_in_workers(2, "--torchmem-baseline-from=nope", *arguments)
    assert in_workers.ret == pytest.ExitCode.USAGE_ERROR
    in_workers.stderr.fnmatch_lines([said])


def test_a_name_of_the_ini_file_that_no_baseline_has_is_said(upgraded):
    upgraded.ini("torchmem_baseline_from = nope, cpu-torch2.98")
    said = "torchmem_baseline_from = nope: there is no baseline of that name"
    result = upgraded.run()
    result.stdout.fnmatch_lines([said])
    result.stdout.no_fnmatch_line("*cpu-torch2.98: there is no*")


def test_where_nothing_is_compared_no_name_is_missed(project):
    project.ini("torchmem_baseline_from = nope")
    project.write("def test_a(torchmem): use(1)")
    project.run().stdout.no_fnmatch_line("*no baseline of that*")
