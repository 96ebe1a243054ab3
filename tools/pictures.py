"""Makes anew what README and docs show of real failures: `python tools/pictures.py`.

The README's two pictures come from its own example and change: an SVG of the lines that pytest
prints, and a screenshot of the page, which needs playwright and a Chromium on the path. The text in
docs/failures.md comes from the change there to examples/gpt.py. Tests hold all but the screenshot.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.chromium import launched
from tests.documents import ROOT, apply_change, blocks, run

README = ROOT / "README.md"
FAILURES = ROOT / "docs" / "failures.md"
PICTURES = ROOT / "docs" / "pictures"
MODULE = "test_memory.py"
TEST = f"{MODULE}::test_training"
REPORT = "memory.html"
COLUMNS = 118
ROWS_OF_A_TABLE = 4

_LINE = 17
_MARGIN = 20
_LETTER = 7.4
_FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def fail_as_the_readme_does(folder: Path) -> str:
    """Store the example's baseline, make the README's change; return what pytest prints then."""
    (folder / "pytest.ini").write_text("[pytest]\ntorchmem_device = cpu\n")
    module = folder / MODULE
    (example,) = blocks(README, "python")
    module.write_text(example, encoding="utf-8")
    stored = run(folder, "-m", "pytest", MODULE, "--torchmem-update-baseline")
    assert stored.returncode == 0, stored.stdout
    apply_change(README, module)
    failed = run(folder, "-m", "pytest", MODULE, f"--torchmem-report={REPORT}")
    assert failed.returncode == 1, failed.stdout
    return failed.stdout


def fail_as_the_guide_does(folder: Path) -> str:
    """Make the change of docs/failures.md to a copy of the examples; return what pytest prints."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    shutil.copytree(ROOT / "examples", folder / "examples", dirs_exist_ok=True)
    apply_change(FAILURES, folder / "examples" / "gpt.py")
    test = "examples/test_gpt.py::test_training_fits_its_budget_and_does_not_grow"
    return run(folder, "-m", "pytest", test).stdout


def excerpt(output: str) -> Iterator[str]:
    """Yield the lines of a failure, its tables cut after a few rows."""
    lines = output.splitlines()
    start = next(n for n, line in enumerate(lines) if re.match(r"_+ test_\w+ _+$", line))
    rows = 0
    for line in lines[start + 1 :]:
        if line.startswith(("---", "===", "___")):
            return
        rows = rows + 1 if re.match(r" *[+\d.]+ [KMGT]?i?B ", line) else 0
        if rows <= ROWS_OF_A_TABLE:
            yield line
        elif rows == ROWS_OF_A_TABLE + 1:
            yield "..."


def folded(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines with those that are too long for the picture broken between words."""
    for line in lines:
        yield from textwrap.wrap(line, COLUMNS, subsequent_indent="    ") or [""]


def terminal_svg(output: str) -> str:
    """Return a failure as a picture of a terminal; its first sentence stands out."""
    lines = "\n".join(folded(excerpt(output))).strip().splitlines()
    width = round(COLUMNS * _LETTER) + 2 * _MARGIN
    height = len(lines) * _LINE + 2 * _MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" font-family="{_FONT}" font-size="12">',
        "<title>What pytest prints</title>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#16181d"/>',
    ]
    sentence = True
    for number, line in enumerate(lines):
        sentence = sentence and line != ""
        if line:
            colour = "#ff8a80" if sentence else "#d7dae0"
            at = _MARGIN + (number + 0.8) * _LINE
            parts.append(
                f'<text x="{_MARGIN}" y="{at:.1f}" fill="{colour}" xml:space="preserve" '
                f'textLength="{len(line) * _LETTER:.1f}">{escape(line)}</text>'
            )
    return "\n".join([*parts, "</svg>", ""])


def screenshot(page: Path, picture: Path) -> None:
    """Save how a browser shows the test on the page of the run."""
    with launched() as browser:
        tab = browser.new_page(viewport={"width": 1180, "height": 960}, color_scheme="light")
        tab.goto(f"{page.as_uri()}#test={TEST}")
        tab.locator("details.test[open] svg, details.test[open] canvas").first.wait_for()
        tab.screenshot(path=str(picture))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        svg = terminal_svg(fail_as_the_readme_does(Path(name)))
        (PICTURES / "failure.svg").write_text(svg, encoding="utf-8")
        screenshot(Path(name) / REPORT, PICTURES / "page.png")
    with tempfile.TemporaryDirectory() as name:
        shown = "\n".join(excerpt(fail_as_the_guide_does(Path(name)))).strip()
        (before,) = blocks(FAILURES, "text")
        text = FAILURES.read_text(encoding="utf-8").replace(before, f"{shown}\n")
        FAILURES.write_text(text, encoding="utf-8")
