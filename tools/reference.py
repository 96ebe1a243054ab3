"""Writes docs/options.md from the code: `python tools/reference.py`. A test holds the page."""

from __future__ import annotations

import re
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pytest_torchmem.plugin.options.option_table import OPTIONS, Option

PAGE = Path(__file__).resolve().parent.parent / "docs" / "options.md"

HEAD = """# Options

An option is typed for one run; a setting stands in the ini file of the project.
`-o torchmem_device=cpu` types a setting for one run. The option wins over the setting, and that
over the default. `pytest --help` shows the same lists: this page is written by
`tools/reference.py`, and [0026](decisions/0026-twelve-options.md) says why a name is where it is.

"""
SETTINGS = """
## Settings

A setting that can be given several times takes several lines in the ini file, and a list in TOML.
A name that is no setting ends the run.

"""
COLUMNS = ("option", "ini name", "default", "what it does")


def options_page() -> str:
    """Return the page of options."""
    options = [option for option in OPTIONS if option.is_typed]
    settings = [option for option in OPTIONS if not option.is_typed]
    return HEAD + _table(COLUMNS, options) + SETTINGS + _table(COLUMNS[1:], settings)


def _table(columns: tuple[str, ...], options: list[Option]) -> str:
    rows = [columns, ("---",) * len(columns)]
    rows += (option_row(option)[-len(columns) :] for option in options)
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def option_row(option: Option) -> tuple[str, ...]:
    """Return what the page says of one option; its help says what a default in words is."""
    text = option.help.replace("%%", "%")
    told = re.search(r" ?\(default: ([^)]*)\)", text)
    if option.is_flag:
        default = "off"
    elif option.default:
        default = f"`{option.default}`"
    else:
        default = told[1] if told else "none"
    what = text.replace(told[0], "") if told else text
    flag = f"{option.flag}={option.metavar}" if option.metavar else option.flag
    name = f"{option.ini} = {option.metavar}" if not option.is_typed else option.ini
    if not option.is_typed and option.is_flag:
        name = f"{option.ini} = true"
    ini = f"`{name}`" if option.is_setting else ""
    return f"`{flag}`", ini, default, what


if __name__ == "__main__":
    PAGE.write_text(options_page(), encoding="utf-8")
