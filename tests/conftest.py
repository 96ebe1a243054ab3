"""What the tests need and the examples do not: `hypothesis` does not come with these."""

from hypothesis import HealthCheck, settings

# A machine that is busy with something else fails no test.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")
