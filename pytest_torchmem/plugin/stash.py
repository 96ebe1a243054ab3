"""The state of the plugin between hooks: the keys, and when their values end.

Nothing else of the plugin outlives a call, but for what the objects that these keys lead to hold.
Four more keys stand beside their values: BODY and RUNNING, DEMANDS, and PAYLOAD, which travels from
test to report.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from pytest_torchmem.plugin.options.settings import Run
    from pytest_torchmem.plugin.run.workers import Selection

# Of a run of pytest: these end with it.
SELECTION: Final[pytest.StashKey[Selection]] = pytest.StashKey()
"""Whether every test of a module is run; there from the start."""

RUN: Final[pytest.StashKey[Run]] = pytest.StashKey()
"""The settings and the baselines; there once a test or an option asks for a measurement."""

# Of a test: each ends when the test does, or begins anew.
IN_CALL: Final[pytest.StashKey[bool]] = pytest.StashKey()
"""True while the body runs."""

BAD_ARGUMENT: Final[pytest.StashKey[bool]] = pytest.StashKey()
"""True where a marker of the test could not be read."""
