"""Helpers for DTensors: detect them, compute tables from each rank's positions, and convert replicated weights.

This module does not import torch.distributed.tensor until it is needed: DTensors exist only once it was imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard

from ropewalk._checks import error

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def is_dtensor(x: object) -> TypeGuard[DTensor]:
    """Whether x is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def tables_of_shards(
    positions: DTensor,
    device: torch.device | str | None,
    compute: Callable[[Tensor], tuple[Tensor, Tensor]],
    *,
    several: bool,
) -> tuple[Tensor, Tensor]:
    """cos and sin as DTensors that are sharded like the positions: each rank computes those of its own positions.

    Args:
        device: None, or the device type of the mesh.
        compute: maps positions `[..., tokens]` to two tensors `[..., tokens, pairs]`. If positions have a leading axis
            of axes, the results do not.
        several: whether positions have such a leading axis.
    """
    import torch
    from torch.distributed.tensor import Replicate, Shard

    mesh = positions.device_mesh
    if device is not None and torch.device(device).type != mesh.device_type:
        raise error(
            "Rope.at",
            "cos and sin of DTensor positions must be on the device of the mesh",
            f"device {str(device)!r} for a mesh of {mesh.device_type!r}",
            "Omit device.",
        )
    keep = [p if p.is_replicate() or _is_shard(p, several) else Replicate() for p in positions.placements]
    positions = positions.redistribute(placements=keep)
    tables = compute(positions.to_local())
    placements = [Shard(p.dim - several) if isinstance(p, Shard) else p for p in keep]
    shape = (*positions.shape[several:], tables[0].shape[-1])
    cos, sin = (from_local(table, mesh, placements, shape) for table in tables)
    return cos, sin


def _is_shard(placement: Any, several: bool) -> bool:
    from torch.distributed.tensor import Shard

    return type(placement) is Shard and placement.dim >= several


def from_local(local: Tensor, mesh: Any, placements: Any, shape: tuple[int, ...]) -> DTensor:
    """Create a DTensor of this shape from each rank's part, without communication between the ranks."""
    import torch
    from torch.distributed.tensor import DTensor

    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides)


def replicated(x: Tensor, mesh: DeviceMesh) -> DTensor:
    """A DTensor with all of x on every rank, where a plain x is the same on every rank. Sums gradients if they differ.

    Communicates only if x is a sharded DTensor.
    """
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = [Replicate()] * mesh.ndim
    if not is_dtensor(x):
        return DTensor.from_local(x, mesh, everywhere, run_check=False)
    return x.redistribute(placements=everywhere)


def local_weight(weight: Tensor, x: Tensor) -> Tensor:
    """Convert a replicated DTensor weight to a plain tensor if x is plain. Otherwise, return the weight unchanged.

    x then holds the heads of this rank, so the backward pass sums the gradients of the weight over the ranks.
    """
    if not is_dtensor(weight) or is_dtensor(x) or not all(p.is_replicate() for p in weight.placements):
        return weight
    import torch

    return sum_gradient(weight, weight.device_mesh) if torch.is_grad_enabled() else weight.to_local()


def sum_gradient(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return x, the same on every rank, as a plain tensor. The backward pass sums its gradients over the ranks.

    x is a plain tensor or a DTensor. Nothing is sent in the forward pass if it is plain or replicated.
    """
    from torch.distributed.tensor import Partial

    summed: Tensor = replicated(x, mesh).to_local(grad_placements=[Partial()] * mesh.ndim)
    return summed
