"""FSDP2, DDP and meta initialisation around `RotaryAttention`: the same numbers as in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ropewalk import Rope, RotaryAttention

CHECKS: dict[str, Callable[[int], None]] = {}
ROPE = Rope(8, 1e4, "half")


def check(function: Callable[[int], None]) -> Callable[[int], None]:
    CHECKS[function.__name__] = function
    return function


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RotaryAttention(32, 4, num_kv_heads=2, qk_norm=1e-6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        rotation = ROPE.at(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = x + block(x, rotation)
        return x


def losses(model: nn.Module, batches: list[Tensor]) -> list[float]:
    """Of three steps of SGD, each on a batch of its own."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for x in batches:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return found


def compare(parallel: nn.Module, alone: nn.Module, world: int) -> None:
    """Each rank takes its rows of a batch; the losses' mean over ranks is that of the batch."""
    batches = [torch.randn(4, 5, 32) for _ in range(3)]
    rank = torch.distributed.get_rank()
    mine = torch.stack(losses(parallel, [x.chunk(world)[rank] for x in batches]))
    torch.distributed.all_reduce(mine)
    torch.testing.assert_close(mine / world, torch.stack(losses(alone, batches)), rtol=1e-5, atol=1e-6)


@check
def fsdp2(world: int) -> None:
    alone = Model()
    model = copy.deepcopy(alone)
    for block in model.blocks:
        fully_shard(block, mesh=init_device_mesh("cpu", (world,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    compare(model, alone, world)


@check
def fsdp2_from_meta(world: int) -> None:
    """There is nothing in it that `to_empty` would leave without a value, but the weights."""
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
    compare(model, alone, world)


@check
def ddp(world: int) -> None:
    alone = Model()
    compare(DistributedDataParallel(copy.deepcopy(alone)), alone, world)
