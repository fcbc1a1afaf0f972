"""Large new outputs ask the system for large pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ropewalk import KVCache, Rope
from ropewalk.kernels import backend

SUPPORTED = Path("/sys/kernel/mm/transparent_hugepage/enabled").exists() and backend.FAST_PATH
ROPE = Rope(128, 1e4, "half")


def asks(x: Tensor) -> bool:
    """Return whether the memory of a tensor has the flag of madvise(MADV_HUGEPAGE), which smaps shows as "hg"."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name = line.split()[0]
        if not name.endswith(":"):
            begin, end = (int(number, 16) for number in name.split("-"))
            inside = begin <= x.data_ptr() + x.nbytes // 2 < end
        elif inside and name == "VmFlags:":
            return "hg" in line.split()
    raise AssertionError(hex(x.data_ptr()))


def queries_of_a_step() -> Tensor:
    cache, q = KVCache(1, 1, 1, 128, capacity=1024), torch.ones(1, 1024, 16, 128)
    step, k = cache.step(1024), q[:, :, :1]
    rotation = step.rotation(ROPE)
    rotated = cache._stores[0].rotate_and_write(step._plan.flat_slots, q, k, k, rotation=rotation, norm=None)
    assert rotated is not None
    return rotated


def attended() -> Tensor:
    cache, q = KVCache(1, 64, 1, 128, capacity=8), torch.ones(64, 8, 32, 128)
    with torch.no_grad():
        return cache.step(8).layer(0).attend(q, q[:, :, :1], q[:, :, :1])


@pytest.mark.skipif(not SUPPORTED, reason="needs Linux with large pages, and the kernels")
@pytest.mark.parametrize(
    "output",
    [lambda: ROPE.at(torch.arange(16384)).cos, lambda: ROPE.at(torch.arange(16384)).sin, queries_of_a_step, attended],
)
def test_large_outputs_ask_for_large_pages(output: Callable[[], Tensor]) -> None:
    assert asks(output())
