"""What the tests need and the examples do not: `hypothesis` does not come with these."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.chromium import launched

# A machine that is busy with something else fails no test.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One for each file: playwright holds an event loop for as long as its browser is open."""
    with launched() as browser:
        yield browser
