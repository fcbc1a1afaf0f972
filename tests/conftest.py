"""Settings for every test."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before torch is loaded: with as many processes as cores, threads that wait for each other must not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Machines are shared and slow at times: no test fails because of a clock. The same examples in every run.
settings.register_profile(
    "ropewalk", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], max_examples=100
)
settings.load_profile("ropewalk")

TESTS = Path(__file__).parent

# What takes most of the time: trainings, compilations, other processes, the interpreter, fuzzes. A folder ends in "/".
SLOW = (
    "attention/test_kv_cache.py",
    "configs/test_mutations.py",
    "gpu/",
    "kernels/test_build.py",
    "kernels/test_c.py",
    "kernels/test_concurrency.py",
    "kernels/test_fuzz.py",
    "kernels/test_gradients.py",
    "lab/",
    "programs/test_demo.py",
    "rotation/test_transforms.py",
    "test_docs.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """`pytest` alone leaves out what is slow; with paths it runs all that is there: `pytest tests src`."""
    alone = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if alone and not config.option.markexpr:
        config.option.markexpr = "not slow"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of those files as slow."""
    for item in items:
        if item.path.is_relative_to(TESTS) and item.path.relative_to(TESTS).as_posix().startswith(SLOW):
            item.add_marker(pytest.mark.slow)
