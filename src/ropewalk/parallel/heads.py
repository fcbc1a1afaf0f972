"""Tensor parallelism of `RotaryAttention`: each rank has some of its heads."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from ropewalk import _checks
from ropewalk.nn import RotaryAttention

_WHO = "HeadwiseParallel"


class HeadwiseParallel(ParallelStyle):
    """Shard a `RotaryAttention` by its heads: an entry of a plan for PyTorch's `parallelize_module`.

    Each rank of the mesh computes some of the query heads, and the key heads that serve them. Inside, q, k and v are
    plain tensors, so that rotation, masks, caches and kernels work as on one device. Outputs and gradients are those
    of one device, up to rounding.

    q_proj, k_proj and v_proj are sharded by rows and o_proj by columns, as `ColwiseParallel` and `RowwiseParallel` do
    it. q_norm and k_norm are on every rank, and so are k_proj and v_proj where there are fewer key heads than ranks.
    The gradients of these are summed over the ranks.

    For each layer one all-reduce sums the output forward, and one the gradient of x backward. The replicated weights
    add one small all-reduce each, backward.

    A cache holds the key heads of one rank: build it with `num_kv_heads=max(1, attention.num_kv_heads // ranks)`.

    Args:
        sequence_parallel: whether x and the output hold only this rank's part of the sequence, in equal runs: `[batch,
            seq / ranks, hidden_size]`. An all-gather and a reduce-scatter take the place of the all-reduce. The
            rotation and the mask remain those of the whole sequence.

    Raises:
        RopeError: when it is applied: the module is no RotaryAttention, the mesh has several axes, or the heads cannot
            be divided among its ranks.

    Example:
        >>> def shard(model, mesh):  # mesh of one axis; model.layers[i] has self_attn and mlp
        ...     plan = {
        ...         "layers.*.self_attn": ropewalk.parallel.HeadwiseParallel(),
        ...         "layers.*.mlp.up_proj": ColwiseParallel(),
        ...         "layers.*.mlp.down_proj": RowwiseParallel(),
        ...     }
        ...     return parallelize_module(model, mesh, plan)
    """

    def __init__(self, *, sequence_parallel: bool = False) -> None:
        super().__init__()
        if not isinstance(sequence_parallel, bool):
            came = _checks.shown(sequence_parallel)
            raise _checks.error(_WHO, "sequence_parallel must be True or False", came, "Pass one of them.")
        self.sequence_parallel = sequence_parallel

    def __repr__(self) -> str:
        return f"{_WHO}(sequence_parallel={self.sequence_parallel})"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Shard the module; `parallelize_module` calls this."""
        attention = _checked(module, device_mesh)
        of_x = Shard(1) if self.sequence_parallel else Replicate()
        shares_keys = attention.num_kv_heads < device_mesh.size()
        of_keys = _SharedKeyHeads(attention.num_kv_heads, attention.head_dim) if shares_keys else ColwiseParallel()
        plan: dict[str, ParallelStyle] = {
            "q_proj": ColwiseParallel(),
            "k_proj": of_keys,
            "v_proj": of_keys,
            "o_proj": RowwiseParallel(output_layouts=of_x),
        }
        if attention.q_norm is not None:
            plan |= {"q_norm": _OnEveryRank(), "k_norm": _OnEveryRank()}
        parallelize_module(attention, device_mesh, plan, src_data_rank=self.src_data_rank)

        def share_x(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            """x as one DTensor for the three projections: their gradients are then added before they are reduced."""
            if args:
                return (_whole(args[0], device_mesh, of_x), *args[1:]), kwargs
            if "x" in kwargs:
                return args, {**kwargs, "x": _whole(kwargs["x"], device_mesh, of_x)}
            return args, kwargs

        attention.register_forward_pre_hook(share_x, with_kwargs=True)
        return attention


def attention_plan(model: nn.Module, *, sequence_parallel: bool = False) -> dict[str, ParallelStyle]:
    """Build the plan that shards every `RotaryAttention` of a model by its heads.

    Args:
        model: the model, or a part of it such as a block.
        sequence_parallel: see `HeadwiseParallel`.

    Returns:
        Name of each `RotaryAttention` in the model → `HeadwiseParallel`. Add the entries of the other layers, and pass
        the result to `parallelize_module(model, mesh, plan)`.

    Raises:
        RopeError: model is no module, it is a `RotaryAttention` itself, or it contains none.

    Example:
        >>> block = nn.ModuleDict({"attention": RotaryAttention(64, 4), "up": nn.Linear(64, 256)})
        >>> attention_plan(block)
        {'attention': HeadwiseParallel(sequence_parallel=False)}
    """
    who, must = "attention_plan", "model must be a module that contains RotaryAttention layers"
    fix = "Pass the model that parallelize_module will get."
    if not isinstance(model, nn.Module):
        raise _checks.error(who, must, _checks.shown(model), fix)
    if isinstance(model, RotaryAttention):
        fix = "Pass HeadwiseParallel() to parallelize_module instead of a plan."
        raise _checks.error(who, must, "a RotaryAttention", fix)
    names = [name for name, module in model.named_modules() if isinstance(module, RotaryAttention)]
    if not names:
        raise _checks.error(who, must, f"{type(model).__name__} without any", fix)
    return {name: HeadwiseParallel(sequence_parallel=sequence_parallel) for name in names}


def _whole(x: Tensor, mesh: DeviceMesh, placement: Replicate | Shard) -> DTensor:
    """x on every rank, of which a plain tensor is the part that the placement says."""
    spread = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [placement], run_check=False)
    return spread.redistribute(placements=[Replicate()])


def _checked(module: nn.Module, mesh: DeviceMesh) -> RotaryAttention:
    """The module, if it is one that the ranks of the mesh can divide among them."""
    if not isinstance(module, RotaryAttention):
        fix = "Name the attention in the plan, e.g. 'layers.*.self_attn'."
        raise _checks.error(_WHO, "the module must be a RotaryAttention", type(module).__name__, fix)
    if mesh.ndim != 1:
        fix = "Pass one of them, e.g. mesh['tensor']."
        raise _checks.error(_WHO, "the mesh must have one axis", f"{mesh.ndim} axes", fix)
    ranks, heads, kv_heads = mesh.size(), module.num_heads, module.num_kv_heads
    if heads % ranks:
        must = "the number of ranks must divide num_heads"
        raise _checks.error(_WHO, must, f"{ranks} ranks for {heads} heads", "Make the axis of the mesh shorter.")
    if kv_heads % ranks and ranks % kv_heads:
        must = "the number of ranks must divide num_kv_heads or be a multiple of it"
        came = f"{ranks} ranks for {kv_heads} key heads"
        raise _checks.error(_WHO, must, came, f"Use {math.gcd(ranks, kv_heads)} ranks.")
    return module


class _OnEveryRank(ParallelStyle):
    """Parameters that every rank has, as DTensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._replicate)

    def _replicate(self, _: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            whole = distribute_tensor(parameter.data, mesh, [Replicate()], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))


class _SharedKeyHeads(_OnEveryRank):
    """A projection to fewer key heads than ranks: each rank computes all and keeps that of its queries."""

    def __init__(self, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self._kv_heads, self._head_dim = kv_heads, head_dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        begin = device_mesh.get_local_rank() * self._kv_heads // device_mesh.size() * self._head_dim

        def own_head(_: nn.Module, output: Any, __: DeviceMesh) -> Any:
            shared = output.redistribute(placements=[Replicate()])  # nothing to do now; backwards it sums
            heads = shared.to_local(grad_placements=[Partial()])  # each rank has the gradient of its own queries
            return heads.narrow(-1, begin, self._head_dim)

        return distribute_module(module, device_mesh, self._replicate, output_fn=own_head)
