"""Sphinx makes the site of these pages: ``sphinx-build -W docs build/site``."""

from __future__ import annotations

import os
import re
from pathlib import Path

from sphinx.application import Sphinx

import pytest_torchmem

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
CODE = "https://github.com/pytest-torchmem/pytest-torchmem"
"""Pages link to files beside docs as one does in a clone; the site has only the pages."""

project = "pytest-torchmem"
copyright = "The pytest-torchmem developers"
release = version = pytest_torchmem.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
html_theme = "furo"
html_title = "pytest-torchmem"
html_theme_options = {
    "source_repository": CODE,
    "source_branch": "main",
    "source_directory": "docs/",
}
myst_heading_anchors = 3
copybutton_prompt_text = "$ "
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
default_role = "code"
# Blocks of both shells and programs' output have languages that Pygments does not know.
suppress_warnings = ["misc.highlighting_failure"]


def link_to_the_code(app: Sphinx, name: str, source: list[str]) -> None:
    """Let links that leave docs lead to the repository."""
    folder = Path(app.env.doc2path(name)).parent

    def outside(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(folder / link[1]))
        if target.is_relative_to(DOCS) and target.suffix == ".md":
            return link[0]
        kind = "tree" if target.is_dir() else "blob"
        return f"]({CODE}/{kind}/main/{target.relative_to(ROOT).as_posix()}{link[2]})"

    source[0] = re.sub(r"\]\((?!\w+:)([\w./-]+)(#[\w-]+)?\)", outside, source[0])


def setup(app: Sphinx) -> None:
    app.connect("source-read", link_to_the_code)
