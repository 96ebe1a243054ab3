"""The state of the plugin between hooks: every key, and when its value ends.

Nothing else of the plugin outlives a call, but for what the objects that these keys lead to hold.
One more key, PAYLOAD, stands in `plugin.run.workers`, which takes its value from test to report.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from pytest_torchmem.plugin.item.body import Body
    from pytest_torchmem.plugin.options.marker import Demands
    from pytest_torchmem.plugin.options.settings import Run
    from pytest_torchmem.plugin.run.controller import Collector
    from pytest_torchmem.plugin.run.workers import Selection

# Of a run of pytest: these end with it.
SELECTION: Final[pytest.StashKey[Selection]] = pytest.StashKey()
"""Whether every test of a module is run; there from the start."""

RUN: Final[pytest.StashKey[Run]] = pytest.StashKey()
"""The settings and the baselines; there once a test or an option asks for a measurement."""

COLLECTOR: Final[pytest.StashKey[Collector]] = pytest.StashKey()
"""The measurements of all tests; beside `RUN`, but not in a worker."""

RUNNING: Final[pytest.StashKey[Body]] = pytest.StashKey()
"""The body of the test that runs now; ends with the test."""

# Of a test: each ends when the test does, or begins anew.
IN_CALL: Final[pytest.StashKey[bool]] = pytest.StashKey()
"""True while the body runs."""

BAD_ARGUMENT: Final[pytest.StashKey[bool]] = pytest.StashKey()
"""True where a marker of the test could not be read."""

DEMANDS: Final[pytest.StashKey[tuple[list[pytest.Mark], Demands]]] = pytest.StashKey()
"""The markers that were read, and what they ask for."""

BODY: Final[pytest.StashKey[Body]] = pytest.StashKey()
"""The measured body."""
