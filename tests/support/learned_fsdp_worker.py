"""The process of test_learned.test_fsdp2_mixed_precision: `python learned_fsdp_worker.py 1 FOLDER`."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import processes
from ropewalk import LearnedRope, Rope, RopeError

ROPE, POSITIONS = Rope(16, 5e5, "half"), torch.tensor([0, 9, 1_000_003])
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=True)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.learned = nn.Linear(16, 16, bias=False), LearnedRope.from_rope(ROPE, heads=4)

    def forward(self, x: Tensor) -> Tensor:
        return self.learned(POSITIONS)(self.project(x), layout="bshd")


def main(*_: int) -> None:
    mesh, x = init_device_mesh("cpu", (1,)), torch.randn(2, 3, 4, 16)
    layer = Layer()
    fully_shard(layer, mesh=mesh, mp_policy=HALF)
    try:
        layer(x)
    except RopeError as e:
        said = str(e)

    layer = Layer()
    wanted = layer.learned(POSITIONS).cos.detach().clone()
    fully_shard(layer.learned, mesh=mesh)  # its own policy, which does not cast
    fully_shard(layer, mesh=mesh, mp_policy=HALF)
    rotated = layer(x)
    assert rotated.dtype == torch.bfloat16
    rotated.float().square().mul(torch.randn(rotated.shape)).sum().backward()
    assert torch.equal(layer.learned(POSITIONS).cos, wanted)
    grad = layer.learned.inv_freq.grad.full_tensor()
    assert grad.dtype == torch.float32
    assert grad.any()
    sys.stdout.write(f"{said}\nwith a policy of its own: float32\n")


if __name__ == "__main__":
    processes.main(main)
