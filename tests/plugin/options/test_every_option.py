"""What holds for all options and settings."""

from pathlib import Path

import pytest

from pytest_torchmem.plugin.options.option_table import OPTIONS, option_named

WORDS = {
    "device": "gpu",
    "tolerance": "2",
    "floor": "2",
    "repeat": "0",
    "summary": "long",
    "report": "run.xml",
    "accept": "nwe",
    "known-holder": "models.CACHE*",
    "baseline-all": "some",
    "torchmem": "none",
}
"""What makes no sense for those that take a word."""

ANY_TEXT = {"baseline-from", "baseline-dir"}
EARLY = {"simulate", "world"}
"""They are read before the others, and their own files say what is refused."""

TYPED = [option for option in OPTIONS if option.is_typed]
SETTINGS = [option for option in OPTIONS if option.is_setting]


def test_twelve_options_are_typed_and_each_acts_or_has_a_twin():
    assert len(TYPED) == 12
    acts = {option.name for option in TYPED if not option.is_setting}
    update = {"update-baseline", "accept", "dry-run", "ask", "repeat"}
    assert acts == update | {"ci", "report", "torchmem"}


def test_each_has_a_help_text_and_each_setting_an_ini_name(project):
    help_text = project.run("--help").stdout.str()
    for option in TYPED:
        assert f"  {option.flag}" in help_text
    for option in SETTINGS:
        assert f"{option.ini} (" in help_text


def test_each_option_has_a_test_file_of_its_own():
    for option in OPTIONS:
        name = f"test_option_{option.name.replace('-', '_')}.py"
        assert Path(__file__).with_name(name).exists()


def refused(project, told, *arguments):
    result = project.run(*arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {told}"])


@pytest.mark.parametrize(
    "name", [name for name in WORDS if option_named(name).is_typed], ids=lambda name: name
)
def test_a_typed_word_without_meaning_is_told_with_where_it_was_given(project, name, monkeypatch):
    flag = option_named(name).flag
    given = f"{flag}={WORDS[name]}"
    update = ["--torchmem-update-baseline"] if name in ("accept", "repeat") else []
    project.write("def test_a(): pass")
    refused(project, f"{flag}: *[[]bad-*]", given, *update)
    monkeypatch.setenv("PYTEST_ADDOPTS", given)
    refused(project, f"{flag} in PYTEST_ADDOPTS: *[[]bad-*]", *update)
    monkeypatch.delenv("PYTEST_ADDOPTS")
    project.pytester.makeini(f"[pytest]\naddopts = {given}")
    refused(project, f"{flag} in addopts of tox.ini: *[[]bad-*]", *update)


@pytest.mark.parametrize(
    "option", [o for o in SETTINGS if o.name in WORDS or o.is_flag], ids=lambda o: o.name
)
def test_a_setting_without_meaning_is_told_with_where_it_was_given(project, option, monkeypatch):
    ini, value = option.ini, WORDS.get(option.name, "maybe")
    project.write("def test_a(): pass")
    refused(project, f"-o {ini}: *[[]bad-*]", "-o", f"{ini}={value}")
    project.ini(f"{ini} = {value}")
    refused(project, f"{ini} in tox.ini: *[[]bad-*]")
    below = project.path / "below"
    below.mkdir()
    monkeypatch.chdir(below)
    refused(project, f"{ini} in ../tox.ini: *[[]bad-*]", "..")


@pytest.mark.parametrize(
    "option", [o for o in TYPED if not o.is_flag and o.default == ""], ids=lambda o: o.name
)
def test_an_option_with_nothing_after_it_is_refused(project, option):
    """A variable that is not set stands in a script: ``--torchmem-report=$OUT``."""
    project.write("def test_a(): pass")
    told = f"{option.flag}: it has no value; leave it out"
    if option.is_setting:
        told += f", or write -o {option.ini}= for none"
        assert project.run("-o", f"{option.ini}=").ret == pytest.ExitCode.OK
    refused(project, f"{told} *", f"{option.flag}=")


def test_every_option_has_a_value_without_meaning_or_takes_any_text():
    flags = {option.name for option in OPTIONS if option.is_flag}
    assert {option.name for option in OPTIONS} == {*WORDS, *flags, *ANY_TEXT, *EARLY}


def test_no_ini_file_is_needed_to_be_told(project):
    (project.path / "tox.ini").unlink()
    told = "-o torchmem_strict: a flag is true or false *"
    refused(project, told, "-o", "torchmem_strict=maybe")


@pytest.mark.parametrize("name", ["repeat=3", "accept=new", "dry-run", "ask"])
def test_what_chooses_how_to_store_is_refused_where_nothing_is_stored(project, name, monkeypatch):
    project.write("def test_a(torchmem): pass")
    flag = f"--torchmem-{name}"
    needs = "does nothing without --torchmem-update-baseline; add it *bad-argument?"
    told = f"{flag.partition('=')[0]} {needs}"
    refused(project, told, flag)
    monkeypatch.setenv("PYTEST_ADDOPTS", flag)
    refused(project, told)


@pytest.mark.parametrize("option", [o for o in TYPED if not o.is_setting], ids=lambda o: o.name)
def test_what_is_for_one_run_cannot_stand_in_the_ini_file(project, option):
    project.write("def test_a(torchmem): use(1)")
    told = f"this is for one run: type {option.flag} where you start it *bad-argument?"
    value = "true" if option.is_flag else "1"
    refused(project, f"-o {option.ini}: {told}", "-o", f"{option.ini}={value}")
    project.ini(f"{option.ini} = {value}")
    refused(project, f"{option.ini} in tox.ini: {told}")


@pytest.mark.parametrize("option", [o for o in OPTIONS if not o.is_typed], ids=lambda o: o.name)
def test_a_setting_that_is_typed_as_an_option_is_told_how_to_write_it(project, option):
    value = "true" if option.is_flag else WORDS.get(option.name, "some")
    typed = option.flag if option.is_flag else f"{option.flag}={value}"
    result = project.run_apart(typed)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    told = f"{option.flag}: {option.ini} is a setting: write it into the ini file, or type -o "
    assert told in result.stderr.str()
    assert f"{option.ini}={value}" in result.stderr.str()


def test_a_misspelt_setting_ends_the_run_with_what_was_meant(project):
    project.ini("torchmem_tolerence = 5%")
    meant = "there is no such setting (did you mean 'torchmem_tolerance'?) *bad-argument?"
    refused(project, f"torchmem_tolerence in tox.ini: {meant}")
    project.ini()
    refused(project, f"-o torchmem_tolerence: {meant}", "-o", "torchmem_tolerence=5%")
