"""--torchmem-dry-run: an update that shows what it would change."""

import pytest

UPDATE = ("--torchmem-update-baseline", "--torchmem-dry-run")


def test_nothing_is_written(sized, monkeypatch):
    sized.run(*UPDATE)
    assert not sized.baseline().parent.exists()
    sized.update()
    before = sized.baseline().read_bytes()
    monkeypatch.setenv("SIZE", "200")
    sized.run(*UPDATE).assert_outcomes(passed=1)
    assert sized.baseline().read_bytes() == before


def test_the_change_is_shown_as_a_table_and_as_a_diff(sized, monkeypatch):
    sized.update()
    monkeypatch.setenv("SIZE", "130")
    result = sized.run(*UPDATE)
    result.stdout.fnmatch_lines(
        [
            "change * entry * before * now * file",
            "grown * test_a * 100.0 MiB * 130.0 MiB * +30 % * __torchmem__/*/test_it.json",
            "dry run: 1 grown; nothing written",
            "--- a/__torchmem__/cpu-torch2.99/test_it.json",
            "-[[]*test_a*, *100.0 MiB: *",
            "-[[]*test_a*work*, 104857600, *],",
            "+[[]*test_a*, *130.0 MiB: *",
            "+[[]*test_a*work*, 136314880, *],",
        ]
    )
    result.stdout.no_fnmatch_line("baseline updated*")
    result.stdout.no_fnmatch_line("*replaces an entry*")


def test_no_change_is_said_too(sized):
    sized.update()
    sized.run(*UPDATE).stdout.fnmatch_lines(["dry run: nothing would change"])


def test_an_entry_that_would_be_removed_is_shown_and_kept(project):
    body = "@pytest.mark.memory_baseline\ndef test_{}(): use({} * MiB)\n"
    project.write(body.format("a", 1) + body.format("b", 2))
    project.update()
    project.write(body.format("a", 1))
    result = project.run(
        "--torchmem-update-baseline", "--torchmem-accept=unused", "--torchmem-dry-run"
    )
    result.stdout.fnmatch_lines(["unused * test_b * 2.0 MiB * - *", "-[[]*test_b*, 2097152, *],"])
    assert sorted(project.entries()) == ["test_a", "test_b"]


def test_without_an_update_it_is_refused(sized):
    result = sized.run("--torchmem-dry-run")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["*--torchmem-dry-run does nothing without --torchmem-update-baseline*"]
    )
