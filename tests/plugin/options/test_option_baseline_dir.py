"""torchmem_baseline_dir: one folder for all baselines."""


def test_by_default_a_baseline_is_beside_its_module(project):
    body = "@pytest.mark.memory_baseline\ndef test_a(): use(MiB)\n"
    project.write(body, "unit/test_it")
    project.write(body, "deep/unit/test_other")
    project.update("--rootdir=.").assert_outcomes(passed=2)
    found = {path.relative_to(project.path).as_posix() for path in project.path.rglob("*.json")}
    assert found == {
        "unit/__torchmem__/cpu-torch2.99/test_it.json",
        "deep/unit/__torchmem__/cpu-torch2.99/test_other.json",
    }


def test_the_folder_repeats_the_modules_path(project):
    project.write("@pytest.mark.memory_baseline\ndef test_a(): use(MiB)\n", "unit/test_it")
    project.update("-otorchmem_baseline_dir=stored").assert_outcomes(passed=1)
    assert (project.path / "stored/cpu-torch2.99/unit/test_it.json").exists()
    result = project.run("-otorchmem_baseline_dir=stored", "-otorchmem_require_baseline=true")
    result.assert_outcomes(passed=1)
    project.run("-otorchmem_require_baseline=true").assert_outcomes(failed=1)


def test_the_ini_name_does_the_same_and_the_command_line_beats_it(sized):
    sized.ini("torchmem_baseline_dir = from_ini")
    sized.update()
    assert (sized.path / "from_ini/cpu-torch2.99/test_it.json").exists()
    sized.update("-otorchmem_baseline_dir=from_line")
    assert (sized.path / "from_line/cpu-torch2.99/test_it.json").exists()


def test_each_environment_has_its_own_file(project):
    project.write("@pytest.mark.memory_baseline\ndef test_a(): use(MiB)\n")
    project.update()
    project.update("-otorchmem_device=cuda")
    assert project.baseline(environment="cpu-torch2.99").exists()
    assert project.baseline(environment="fake-100-torch2.99").exists()


def test_a_module_outside_the_rootdir_has_a_place_of_its_own_and_is_not_gone(project):
    for folder, size in (("one", 1), ("two", 2), ("root", 3)):
        body = f"@pytest.mark.memory_baseline\ndef test_a(): use({size} * MiB)\n"
        project.write(body, f"{folder}/test_in_{folder}")
    (project.path / "root" / "pytest.ini").write_text(
        "[pytest]\naddopts = -p no:cacheprovider\ntorchmem_baseline_dir = stored\n"
    )
    outside = ("-c", "root/pytest.ini", "--confcutdir=.")
    project.update(*outside, "one", "two", "root").assert_outcomes(passed=3)
    stored = project.path / "root" / "stored"
    found = {path.relative_to(stored).as_posix() for path in stored.rglob("*.json")}
    assert found == {
        "cpu-torch2.99/test_in_root.json",
        "cpu-torch2.99/__above__/one/test_in_one.json",
        "cpu-torch2.99/__above__/two/test_in_two.json",
    }
    for part in (("one", "two", "root"), ("one",), ("root",)):
        told = project.run(*outside, "--torchmem-ci", *part)
        told.assert_outcomes(passed=len(part))
        told.stdout.no_fnmatch_line("*is gone*")
    (project.path / "two" / "test_in_two.py").unlink()
    told = project.run(*outside, "one", "root")
    told.stdout.fnmatch_lines(["*two/test_in_two.py is gone and has baselines (1 entry)*"])
