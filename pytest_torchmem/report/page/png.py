"""A timeline's SVG as pixels, for documents that take no SVG.

resvg draws what a browser draws of it, text with its halo included, and needs no library of the
system: it is one wheel for all of Python 3.10 and newer. Fonts are the machine's.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

from pytest_torchmem.report.page.svg import FONT
from pytest_torchmem.values.errors import ReportError

PIXELS_PER_UNIT: Final = 2
"""A PNG has this many pixels for each unit of its SVG, so that it is sharp on dense screens."""

_LETTER: Final = (
    f'<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20" font-family="{FONT}">'
    '<text y="16">M</text></svg>'
)


def require_png() -> None:
    """Raise `ReportError` where the library that draws pixels is not installed."""
    if find_spec("resvg_py") is None:
        raise ReportError(
            "a .png needs the package resvg-py, which is not installed; "
            "install it with: pip install 'pytest-torchmem[png]' (an .svg needs nothing)"
        )


def png(svg: str) -> bytes:
    """Return an SVG document as a PNG. Raises `ReportError` where it cannot be drawn as it is."""
    require_png()
    import resvg_py

    # resvg leaves text out where it finds no font, without a word.
    blank = resvg_py.svg_to_bytes(svg_string=_LETTER.replace("M", ""))
    if resvg_py.svg_to_bytes(svg_string=_LETTER) == blank:
        raise ReportError(
            "a .png needs a font for its text, and this machine has none; install one (on Debian: "
            "apt install fonts-dejavu-core), or ask for an .svg"
        )
    return bytes(resvg_py.svg_to_bytes(svg_string=svg, zoom=PIXELS_PER_UNIT))
