"""Settings for every test."""

from hypothesis import HealthCheck, settings

# Machines are shared and slow at times: no test fails because of a clock. The same examples in every run.
settings.register_profile(
    "ropewalk", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], max_examples=100
)
settings.load_profile("ropewalk")
