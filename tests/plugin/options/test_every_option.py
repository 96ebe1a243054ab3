"""What holds for all options."""

from pathlib import Path

from pytest_torchmem.plugin.registration import OPTIONS


def test_each_option_has_a_help_text_and_an_ini_twin(project):
    help_text = project.run("--help").stdout.str()
    for option in OPTIONS:
        assert option.flag in help_text
        assert f"{option.ini} (" in help_text


def test_each_option_has_a_test_file_of_its_own():
    for option in OPTIONS:
        name = f"test_option_{option.name.replace('-', '_')}.py"
        assert Path(__file__).with_name(name).exists()
