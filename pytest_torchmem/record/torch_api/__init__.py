"""Torch's private names, a file for each subject, and what a release may lack.

No other file knows a private name of torch. Each file lists in ``CHECKED`` those that it uses, with
the first and the last release that they were checked on: releases up to 2.13.0 by the tests, 2.15.0
by measuring with it and by reading it. A name that a release may lack is looked up here, so that
the rest of the package sees one shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

#: The first and the last release of torch that each private name was checked on.
Checked: TypeAlias = Mapping[str, tuple[str, str]]
