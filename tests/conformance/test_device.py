"""`check(device=...)`: the target runs on another device, here a fake one, and is measured on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fake_device import FakeCuda, OnCuda
from ropewalk import RopeError, conformance

seen: set[type] = set()


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    seen.add(type(x))
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1).type_as(x)


def frequencies(**options: Any) -> Tensor:
    return torch.tensor(10_000.0, **options) ** (-torch.arange(0, 64, 2, **options) / 64)


def right(x: Tensor, positions: Tensor) -> Tensor:
    return rotate(x, positions[..., None, None] * frequencies(device=x.device))


class InABuffer(torch.nn.Module):
    inv_freq: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", frequencies())

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return rotate(x, positions[..., None, None] * self.inv_freq)


class InAnAttribute(torch.nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inv_freq = frequencies()

    forward = InABuffer.forward


class Plain:
    def __init__(self, dim: int) -> None:
        self.inv_freq = frequencies()

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        return rotate(x, positions[..., None, None] * self.inv_freq)


@pytest.mark.parametrize("target", [right, InABuffer, InABuffer(64), Plain])
def test_right(target: Any) -> None:
    seen.clear()
    with FakeCuda():
        report = conformance.check(target, device="cuda")
    assert report.codes == [], str(report)
    assert seen == {OnCuda}
    assert not isinstance(target, torch.nn.Module) or type(target.inv_freq) is Tensor


def test_what_is_wrong_there_is_named() -> None:
    with FakeCuda():
        report = conformance.check(lambda x, positions: right(x, -positions), device="cuda")
    assert report.codes == ["rotates-backwards"]


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (lambda x, positions: rotate(x, positions[..., None, None] * frequencies()), "found at least two devices"),
        (lambda x, positions: right(x, positions).to("cpu"), "a result is on the cpu"),
        (InAnAttribute, "found at least two devices"),
    ],
)
def test_a_tensor_that_stays_on_the_cpu_is_named(target: Any, says: str) -> None:
    assert conformance.check(target).verdict == "right"
    with FakeCuda():
        report = conformance.check(target, device="cuda")
    assert report.codes == ["wrong-device"]
    assert report.findings[0].says.startswith("On cuda: ")
    assert says in report.findings[0].says


def test_what_fails_on_both_devices_is_no_finding() -> None:
    def fails(x: Tensor, positions: Tensor) -> Tensor:
        raise RuntimeError("not today")

    with FakeCuda(), pytest.raises(RopeError, match="not today"):
        conformance.check(fails, device="cuda")


@pytest.mark.parametrize("device", ["cuda:7", "meta", "gpu"])
def test_a_device_that_is_missing(tmp_path: Path, device: str) -> None:
    """Nothing of the target runs before the device is known to work."""
    (tmp_path / "mine.py").write_text("raise KeyError('ran')")
    with pytest.raises(RopeError, match=f"device '{device}' cannot be used: .*Pass a device that torch finds"):
        conformance.check(f"{tmp_path / 'mine.py'}:f", device=device)


class OnAGpu:
    """As in trainers, which name the GPU of their rank."""

    def __init__(self, dim: int) -> None:
        inv_freq = 10_000.0 ** (-torch.arange(0, dim, 2).cuda() / dim)
        positions = torch.arange(128, device=torch.device("cuda", torch.cuda.current_device()))
        self.angles = (positions[:, None] * inv_freq.to(device="cuda:0"))[:, None]

    def __call__(self, x: Tensor) -> Tensor:
        return rotate(x, self.angles[: x.shape[1]].to("cuda"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU is used, if there is one")
def test_code_that_names_a_gpu_runs_without_one() -> None:
    report = conformance.check(OnAGpu, base=10_000.0)
    assert (report.verdict, report.codes) == ("right", [])
    assert report.found["device"] == "the CPU, in place of the GPU that the code names"
