"""Settings for every test."""

import os

from hypothesis import HealthCheck, settings

# Before torch is loaded: with as many processes as cores, threads that wait for each other must not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Machines are shared and slow at times: no test fails because of a clock. The same examples in every run.
settings.register_profile(
    "ropewalk", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], max_examples=100
)
settings.load_profile("ropewalk")
