"""One colour for each category, the same in every report.

The first seven are the palette of Okabe and Ito, "Color Universal Design" (2008), the others from
Paul Tol's "muted" scheme: told apart with each of the common kinds of colour blindness, on white
and on black. Reports never rely on colour alone: legends, tables and hover text name the category.
"""

from __future__ import annotations

from typing import Final

from pytest_torchmem.values.contributors import Category

COLOURS: Final = {
    Category.PARAMETER: "#0072B2",
    Category.GRADIENT: "#E69F00",
    Category.OPTIMIZER_STATE: "#009E73",
    Category.INPUT: "#56B4E9",
    Category.AUTOGRAD_DETAIL: "#F0E442",
    Category.ACTIVATION: "#D55E00",
    Category.TEMPORARY: "#CC79A7",
    Category.BUFFER: "#882255",
    Category.WORKSPACE: "#999933",
    Category.UNKNOWN: "#8C8C8C",
}
