"""Settings for all tests."""

import os
import sys

import pytest
from hypothesis import HealthCheck, settings

import slow_tests
import toolchain

# Must be set before torch is loaded: if there are as many processes as cores, waiting threads must not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# No test may fail because a machine is slow, so there is no deadline. Every run uses the same examples.
settings.register_profile(
    "ropewalk", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], max_examples=100
)
settings.load_profile("ropewalk")


@pytest.fixture
def compiler() -> str:
    """The path of the C++ compiler, which Inductor calls. Tests that compile with Inductor use this fixture."""
    return toolchain.need(toolchain.CXX)


@pytest.fixture
def built() -> None:
    """Skip the test if the CPU kernels were not compiled. With ROPEWALK_REQUIRE_KERNEL=1, fail instead."""
    from ropewalk.kernels import cpu

    if reason := cpu.unavailable():
        toolchain.skip(f"the CPU kernels are {reason}")


@pytest.fixture
def used(built: None) -> None:
    """Skip the test also if ROPEWALK_BACKEND disables the kernels."""
    from ropewalk.kernels import backend

    if backend.BACKEND == "reference":
        pytest.skip("ROPEWALK_BACKEND=reference")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--since", metavar="COMMIT", help="leave out the slow tests of what has not changed since then")


def pytest_runtest_setup() -> None:
    """Seed PyTorch for each test, so that its random numbers do not depend on earlier tests."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


def pytest_configure(config: pytest.Config) -> None:
    """Deselect slow tests if pytest is called without paths. With paths, as in `pytest tests src`, run all tests."""
    alone = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if alone and not config.option.markexpr:
        config.option.markexpr = "not slow"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the slow tests, and run files with slow tests first, so that short tests balance the workers at the end."""
    slow = tuple(test for tests in slow_tests.SLOW.values() for test in tests)
    for item in items:
        if item.nodeid.removeprefix("tests/").startswith(slow):
            item.add_marker(pytest.mark.slow)
    with_slow_tests = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in with_slow_tests)
    if config.option.since:
        unchanged = tuple(slow_tests.left_out(config.option.since))
        items[:] = [item for item in items if not item.nodeid.removeprefix("tests/").startswith(unchanged)]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.option.since:
        terminalreporter.section(f"left out, because nothing they watch has changed since {config.option.since}")
        terminalreporter.write_line("\n".join(slow_tests.left_out(config.option.since)))
