"""A launch goes to the device of its tensors. PyTorch's devices and the kernel are replaced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ropewalk._layout import Options
from ropewalk.kernels import gpu, gpu_plans


class OnGpu(Tensor):
    """A tensor that names the device of this number."""

    number: int

    def get_device(self) -> int:
        return self.number


def test_a_kernel_is_launched_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    current, launches = [0], []

    @contextmanager
    def device(number: int) -> Iterator[None]:
        before, current[0] = current[0], number
        yield
        current[0] = before

    class Kernel:
        arg_names = ("q", "p", "k", "r", "cos", "sin", "HEAD_DIM", "tokens")

        def __getitem__(self, programs: tuple[int]) -> Any:
            return lambda *arguments, **options: launches.append((current[0], programs, arguments[6:], options))

    monkeypatch.setattr(gpu, "_has_several_gpus", lambda: True)
    monkeypatch.setattr(gpu, "kernels", lambda: SimpleNamespace(rotate=Kernel()))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    table = torch.empty(3, 4)
    for number in (0, 1, 1, 0):
        x = torch.empty(1, 3, 2, 10).as_subclass(OnGpu)
        x.number = number
        gpu._launch(*gpu_plans.rotation_launch([x], [x], table, table, Options("bshd", False, 0)))
        where, programs, numbers, options = launches.pop()
        assert (where, programs, numbers) == (number, (1,), (10, 3))
        assert options == {"num_warps": 4, "enable_fp_fusion": False}  # products are rounded before they are added
    assert current == [0]
    none = torch.empty(0, 3, 2, 10)
    gpu._launch(*gpu_plans.rotation_launch([none], [none], table, table, Options("bshd", False, 0)))
    assert not launches
