"""What the tests need and the examples do not: `hypothesis` does not come with these."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.chromium import launched

# A machine that is busy with something else fails no test, and a commit always tries the same
# examples; others are looked for at night.
settings.register_profile(
    "steady", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.register_profile("searching", settings.get_profile("steady"), derandomize=False)
settings.load_profile("steady")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("nightly", default=False):
        settings.load_profile("searching")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """One for each file: playwright holds an event loop for as long as its browser is open."""
    with launched() as browser:
        yield browser
