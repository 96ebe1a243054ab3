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

Each option has a twin in the ini file. The command line wins over the ini file, which wins over
the default. An option that is typed and does nothing without another one is refused; in the ini
file and in `addopts` it waits for the run that has a use for it. One that can be given several
times takes several lines in the ini file, and a list in TOML. `pytest --help` shows the same list:
this page is written by `tools/reference.py`.

"""
COLUMNS = ("option", "ini name", "default", "what it does")


def options_page() -> str:
    """Return the page of options."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *map(option_row, OPTIONS)]
    return HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def option_row(option: Option) -> tuple[str, str, str, str]:
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
    return f"`{flag}`", f"`{option.ini}`", default, what


if __name__ == "__main__":
    PAGE.write_text(options_page(), encoding="utf-8")
