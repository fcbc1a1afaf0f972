"""FSDP, DDP, checkpoints and meta initialisation around `RotaryAttention`: the same numbers as in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import attention_oracle as written_out
import oracle
from ropewalk import Rope, RotaryAttention, RotaryEmbedding
from ropewalk.parallel import HeadwiseParallel

CHECKS: dict[str, Callable[[int], None]] = {}
ROPE, FAR = Rope(8, 5e5, "half"), torch.tensor([0, 9, 1_000_003])


def check(function: Callable[[int], None]) -> Callable[[int], None]:
    CHECKS[function.__name__] = function
    return function


class Model(nn.Module):
    def __init__(self, kv_heads: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RotaryAttention(32, 4, num_kv_heads=kv_heads, qk_norm=1e-6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        rotation = ROPE.at(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = x + block(x, rotation)
        return x


@dataclass
class Tables:
    """A Rotation as a dataclass, as other code may define it."""

    cos: Tensor
    sin: Tensor


class RecordsDtype(nn.Module):
    """Records the dtype of the tables that it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8, bias=False)
        self.embed = RotaryEmbedding(ROPE, layout="bshd")
        self.seen: torch.dtype | None = None

    def forward(self, x: Tensor, rotation: Any, positions: Tensor) -> Any:
        self.seen = rotation.cos.dtype
        return self.embed(self.project(x), None, positions)


def losses(model: nn.Module, batches: list[Tensor], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Train one step for each batch. Return the losses."""
    found = []
    for x in batches:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return found


def compare(parallel: nn.Module, alone: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Each rank of the group processes its rows of a batch. The mean of the losses over ranks is that of the batch."""
    batches, size = [torch.randn(4, 5, 32) for _ in range(3)], dist.get_world_size(group)
    rows = [x.chunk(size)[dist.get_rank(group)] for x in batches]
    ours, right = (
        torch.stack(losses(model, of_model, torch.optim.SGD(model.parameters(), lr=0.1)))
        for model, of_model in ((parallel, rows), (alone, batches))
    )
    dist.all_reduce(ours, group=group)
    torch.testing.assert_close(ours / size, right, rtol=1e-5, atol=1e-6)


@check
def fsdp2(world: int) -> None:
    alone = Model()
    model = copy.deepcopy(alone)
    for block in model.blocks:
        fully_shard(block, mesh=init_device_mesh("cpu", (world,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    compare(model, alone)


@check
def fsdp2_from_meta(world: int) -> None:
    """Only the weights need values after `to_empty`."""
    alone = Model()
    with torch.device("meta"):
        model = Model()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    model.to_empty(device="cpu")
    assert not list(model.buffers())
    for name, parameter in model.named_parameters():
        whole = alone.get_parameter(name).detach()
        with torch.no_grad():
            parameter.copy_(
                torch.distributed.tensor.distribute_tensor(whole, parameter.device_mesh, parameter.placements)
            )
    compare(model, alone)


@check
def ddp(world: int) -> None:
    alone = Model()
    compare(DistributedDataParallel(copy.deepcopy(alone)), alone)


@check
def fsdp1(world: int) -> None:
    alone = Model()
    model = FullyShardedDataParallel(copy.deepcopy(alone), device_id=torch.device("cpu"), use_orig_params=True)
    compare(model, alone)


@check
def fsdp2_with_tensor_parallel(world: int) -> None:
    """Batches over one axis of the mesh and heads over the other, also if ranks share a key head."""
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "heads"))
    for kv_heads in (1, 2):
        alone = Model(kv_heads)
        model = copy.deepcopy(alone)
        parallelize_module(model, mesh["heads"], {"blocks.*": HeadwiseParallel()})
        for block in model.blocks:
            fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
        compare(model, alone, mesh["data"].get_group())


@check
def fsdp2_in_bfloat16(world: int) -> None:
    """FSDP casts parameters and inputs, and also a dataclass of cos and sin, but not a Rotation."""
    layer = RecordsDtype()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=True)
    fully_shard(layer, mesh=init_device_mesh("cpu", (world,)), mp_policy=policy)
    rotation, x = ROPE.at(FAR), torch.randn(2, 3, 4, 8)
    for tables, dtype in ((Tables(rotation.cos, rotation.sin), torch.bfloat16), (rotation, torch.float32)):
        out = layer(x, tables, FAR)
        out.float().square().sum().backward()
        assert layer.seen == dtype
    # Angles that are computed inside the layer are exact as well: q is bfloat16, and its rotation is rounded once.
    q = x.bfloat16() @ layer.project.weight.full_tensor().bfloat16().T
    assert torch.equal(out, rotation(q, layout="bshd"))
    assert layer.project.weight.grad is not None


@check
def positions_as_a_buffer_of_pytorchs_context_parallel(world: int) -> None:
    """PyTorch shards tokens and positions alike for context parallelism. Its attention needs CUDA and is not called."""
    positions, q = torch.arange(4 * world), torch.randn(2, 4 * world, 3, 8)
    whole = written_out.Rotary(oracle.inv_freq(5e5, 8), "half")(q.double(), positions)
    local = q.clone()
    with context_parallel(init_device_mesh("cpu", (world,)), buffers=[local, positions], buffer_seq_dims=[1, 0]):
        assert positions.shape == (4,)
        rotated, held = ROPE.at(positions)(local, layout="bshd"), positions.clone()
    torch.testing.assert_close(rotated.double(), whole[:, held], rtol=1e-6, atol=1e-6)
    assert positions.tolist() == list(range(4 * world))
