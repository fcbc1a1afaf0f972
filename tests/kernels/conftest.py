"""Fixtures that run a test with each instruction set that this machine supports."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernel_cases import record_calls
from ropewalk.kernels import cpu

LEVELS = ["none"] if cpu.unavailable() else cpu._cpu.levels()


@pytest.fixture(params=LEVELS)
def level(built: None, request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test with each instruction set, and restore the fastest one afterwards."""
    cpu._cpu.use_level(request.param)
    yield request.param
    cpu._cpu.use_level(LEVELS[-1])


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fill new tensors with NaN, so that an element that is not written is detected."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread. On a busy machine, waiting for a second thread takes ten times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def threads(one_thread: None) -> None:
    """Use two threads. A test may change their number."""
    torch.set_num_threads(2)


@pytest.fixture
def calls(used: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the kernels that the test calls, in order."""
    return record_calls(cpu, monkeypatch)
