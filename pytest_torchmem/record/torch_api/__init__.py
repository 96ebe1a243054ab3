"""Torch's private names, a file for each subject, and what a release may lack.

No other file knows a private name of torch. Each file lists in ``CHECKED`` those that it uses, with
the first and the last release that they were checked on: `NEWEST` by measuring with it and by
reading it, older releases by the tests. A name that a release may lack is looked up here, so that
the rest of the package sees one shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, TypeAlias

#: The first and the last release of torch that each private name was checked on.
Checked: TypeAlias = Mapping[str, tuple[str, str]]

NEWEST: Final = "2.15.0"
ALL_RELEASES: Final = ("2.10.0", NEWEST)
"""From the oldest supported release to the newest that was checked."""
