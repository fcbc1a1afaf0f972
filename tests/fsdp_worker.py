"""One of the two processes of test_nn.test_fsdp2_mixed_precision: `python fsdp_worker.py RANK RENDEZVOUS`."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ropewalk import Rope, RotaryEmbedding

ROPE = Rope(16, 5e5, "half")
POSITIONS = torch.tensor([0, 9, 1_000_003])


@dataclass
class Tables:
    """The naive Rotation."""

    cos: Tensor
    sin: Tensor


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16, bias=False)
        self.embed = RotaryEmbedding(ROPE, layout="bshd")
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, rotation: object, positions: Tensor) -> Tensor:
        self.seen.append(rotation.cos.dtype)  # type: ignore[attr-defined]
        q = self.project(x)
        turned = self.embed(q, None, positions)
        if not isinstance(rotation, Tables):
            assert torch.equal(turned, rotation(q, layout="bshd"))  # type: ignore[operator]
        return turned


def main(rank: int, rendezvous: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    torch.manual_seed(0)
    layer = Layer()
    mesh = init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    fully_shard(layer, mesh=mesh, mp_policy=policy)
    rotation, x = ROPE.at(POSITIONS), torch.randn(2, 3, 4, 16)
    for tables in (Tables(rotation.cos, rotation.sin), rotation):
        out = layer(x, tables, POSITIONS)
        out.float().pow(2).sum().backward()
        print(type(tables).__name__ if tables is rotation else "dataclass", layer.seen[-1])
    # The module makes exact angles inside the wrapped layer: q there is bfloat16, its rotation rounded once.
    weight = layer.project.weight.full_tensor().bfloat16()
    q = x.bfloat16() @ weight.T
    assert torch.equal(out, rotation(q, layout="bshd"))
    assert layer.project.weight.grad is not None
    print("all equal")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
