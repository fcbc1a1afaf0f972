"""Placements of DTensors: make them, recognize them, and compute cos and sin of DTensor positions.

torch.distributed.tensor is imported only when a DTensor exists or must be made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from ropewalk._checks import error

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard


def is_dtensor(x: object) -> TypeGuard[DTensor]:
    """Return whether x is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def is_shard(placement: Any) -> TypeGuard[Shard]:
    """Return whether the placement is exactly a Shard. In subclasses of Shard, a rank's rows are not contiguous."""
    from torch.distributed.tensor import Shard

    return type(placement) is Shard


def tables_of_shards(
    positions: DTensor,
    device: torch.device | str | None,
    compute: Callable[[Tensor], tuple[Tensor, Tensor]],
    *,
    has_axes: bool,
) -> tuple[Tensor, Tensor]:
    """Return cos and sin as DTensors that are sharded like the positions. Each rank computes those of its positions.

    Args:
        positions: `[..., tokens]`, or `[axes, ..., tokens]` if each token has several positions.
        device: None, or a device of the same type as those of the mesh.
        compute: function that maps the positions of a rank to two tensors `[..., tokens, pairs]`.
        has_axes: whether each token has several positions.
    """
    from torch.distributed.tensor import Replicate, Shard

    mesh = positions.device_mesh
    if device is not None and torch.device(device).type != mesh.device_type:
        raise error(
            "Rope.at",
            "cos and sin of DTensor positions must be on the device of the mesh",
            f"device {str(device)!r} for a mesh of {mesh.device_type!r}",
            "Omit device.",
        )
    keep = [p if p.is_replicate() or (is_shard(p) and p.dim >= has_axes) else Replicate() for p in positions.placements]
    positions = positions.redistribute(placements=keep)
    tables = compute(positions.to_local())
    placements = [Shard(p.dim - has_axes) if isinstance(p, Shard) else p for p in keep]
    shape = (*positions.shape[has_axes:], tables[0].shape[-1])
    cos, sin = (from_local(table, mesh, placements, shape) for table in tables)
    return cos, sin


def from_local(local: Tensor, mesh: Any, placements: Any, shape: tuple[int, ...]) -> DTensor:
    """Create a DTensor with this global shape from the local part of each rank, without communication."""
    from torch.distributed.tensor import DTensor

    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides)


def replicate(x: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return x as a DTensor that is replicated over the mesh. The ranks communicate only if x is a sharded DTensor.

    If each rank computes only a part of the gradient, the backward pass sums the parts.

    Args:
        x: a DTensor, or a plain tensor that is equal on every rank.
        mesh: the mesh of the result.
    """
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = [Replicate()] * mesh.ndim
    if not is_dtensor(x):
        return DTensor.from_local(x, mesh, everywhere, run_check=False)
    return x.redistribute(placements=everywhere)


def local_weight(weight: Tensor, x: Tensor) -> Tensor:
    """Convert a replicated DTensor weight to a plain tensor if x is plain. Otherwise, return the weight unchanged.

    A plain x holds the heads of this rank only, so the backward pass sums the gradients of the weight over the ranks.
    """
    if not is_dtensor(weight) or is_dtensor(x) or not all(p.is_replicate() for p in weight.placements):
        return weight
    return sum_gradient(weight, weight.device_mesh) if torch.is_grad_enabled() else weight.to_local()


def sum_gradient(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return x as a plain tensor. The backward pass sums its gradients over the ranks.

    The forward pass communicates only if x is a sharded DTensor.

    Args:
        x: a DTensor, or a plain tensor that is equal on every rank.
        mesh: the ranks over which the gradients are summed.
    """
    from torch.distributed.tensor import Partial

    summed: Tensor = replicate(x, mesh).to_local(grad_placements=[Partial()] * mesh.ndim)
    return summed
