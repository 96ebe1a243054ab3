"""What holds for all options."""

from pathlib import Path

import pytest

from pytest_torchmem.plugin.options.option_table import OPTIONS

WORDS = {
    "device": "gpu",
    "tolerance": "2",
    "floor": "2",
    "repeat": "0",
    "level": "deep",
    "summary": "long",
    "report": "run.xml",
    "report-timelines": "some",
    "accept": "nwe",
    "known-holder": "models.CACHE*",
    "baseline-all": "some",
}
"""What makes no sense for the options that take a word."""

FLAGS = (
    "update-baseline",
    "dry-run",
    "follow-renames",
    "fail-shrunk",
    "require-baseline",
    "strict",
    "ask",
)


def test_each_option_has_a_help_text_and_an_ini_twin(project):
    help_text = project.run("--help").stdout.str()
    for option in OPTIONS:
        assert option.flag in help_text
        assert f"{option.ini} (" in help_text


def test_each_option_has_a_test_file_of_its_own():
    for option in OPTIONS:
        name = f"test_option_{option.name.replace('-', '_')}.py"
        assert Path(__file__).with_name(name).exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [*WORDS.items(), *((flag, "maybe") for flag in FLAGS)],
)
def test_a_value_without_meaning_is_told_with_where_it_was_given(project, name, value, monkeypatch):
    given = f"--torchmem-{name}={value}"
    ini = "torchmem_" + name.replace("-", "_")
    project.write("def test_a(): pass")

    def refused(where, *arguments):
        result = project.run(*arguments)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines([f"ERROR: {where}: *[[]bad-*]"])

    refused(f"-o {ini}", "-o", f"{ini}={value}")
    if name not in FLAGS:
        refused(f"--torchmem-{name}", given)
        monkeypatch.setenv("PYTEST_ADDOPTS", given)
        refused(f"--torchmem-{name} in PYTEST_ADDOPTS")
        monkeypatch.delenv("PYTEST_ADDOPTS")
        project.pytester.makeini(f"[pytest]\naddopts = {given}")
        refused(f"--torchmem-{name} in addopts of tox.ini")
    project.ini(f"{ini} = {value}")
    refused(f"{ini} in tox.ini")
    below = project.path / "below"
    below.mkdir()
    monkeypatch.chdir(below)
    refused(f"{ini} in ../tox.ini", "..")


@pytest.mark.parametrize("option", [o for o in OPTIONS if o.default == ""], ids=lambda o: o.name)
def test_an_option_with_nothing_after_it_is_refused_and_can_be_switched_off(project, option):
    """A variable that is not set stands in a script: ``--torchmem-report=$OUT``."""
    project.write("def test_a(): pass")
    result = project.run(f"{option.flag}=")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    off = f"-o {option.ini}="
    told = f"ERROR: {option.flag}: nothing stands after it; leave it out, or write {off} for none *"
    result.stderr.fnmatch_lines([told])
    assert project.run(*off.split()).ret == pytest.ExitCode.OK


def test_every_option_has_a_value_without_meaning_or_takes_any_text():
    any_text = {"baseline-from", "baseline-dir"}
    # They are read before the others, and their own files say what is refused.
    early = {"simulate", "world"}
    assert {option.name for option in OPTIONS} == {*WORDS, *FLAGS, *any_text, *early}


def test_no_ini_file_is_needed_to_be_told(project):
    (project.path / "tox.ini").unlink()
    result = project.run("-o", "torchmem_strict=maybe")
    result.stderr.fnmatch_lines(["ERROR: -o torchmem_strict: a flag is true or false *"])


@pytest.mark.parametrize(
    ("given", "needed"),
    [
        ("--torchmem-repeat=3", "--torchmem-update-baseline"),
        ("--torchmem-accept=new", "--torchmem-update-baseline"),
        ("--torchmem-dry-run", "--torchmem-update-baseline"),
        ("--torchmem-report-timelines=all", "--torchmem-report"),
    ],
)
def test_an_option_without_effect_is_refused_where_it_was_typed(
    project, monkeypatch, given, needed
):
    project.write("def test_a(torchmem): pass")
    result = project.run(given)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    name = given.partition("=")[0]
    result.stderr.fnmatch_lines([f"ERROR: {name} does nothing without {needed}; *bad-argument?"])
    # What is set for all runs waits for the run that has a use for it.
    monkeypatch.setenv("PYTEST_ADDOPTS", given)
    assert project.run().ret == pytest.ExitCode.OK
    monkeypatch.delenv("PYTEST_ADDOPTS")
    project.pytester.makeini(f"[pytest]\naddopts = {given}")
    assert project.run().ret == pytest.ExitCode.OK
