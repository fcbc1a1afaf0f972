"""Tensor parallelism of `RotaryAttention`: shard its heads over the ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from ropewalk import _checks
from ropewalk.attention.layer import RotaryAttention
from ropewalk.rotation.api import Rotation
from ropewalk.rotation.placements import is_dtensor, sum_gradient

_WHO = "HeadwiseParallel"


class HeadwiseParallel(ParallelStyle):
    """A `ParallelStyle` that shards a `RotaryAttention` by its heads, for a plan of PyTorch's `parallelize_module`.

    Each rank of the mesh computes some of the query heads, with the key heads that these use. Inside the module q,
    k and v are plain tensors, so rotation, masks, caches and kernels work as on one device. Outputs and gradients equal
    those of one device up to rounding.

    q_proj, k_proj and v_proj are sharded by rows and o_proj by columns, as in `ColwiseParallel` and `RowwiseParallel`.
    q_norm and k_norm are replicated on every rank. If there are fewer key heads than ranks, k_proj and v_proj are
    replicated as well. The gradients of replicated weights are summed over the ranks.

    Learned tables, such as those of a `LearnedRope`, must be equal on every rank. Their gradients are summed over the
    ranks too, so the frequencies get the gradient of all heads on every rank. Do not sum this gradient again. If each
    head of the model has its own table, each rank selects the tables of its heads. The model must then have as many key
    heads as query heads.

    Each layer needs one all-reduce of the output in the forward pass, and one all-reduce of the gradient of x in the
    backward pass, with smaller ones for the gradients of replicated weights and of learned tables.

    A cache holds the key heads of one rank: build it with `num_kv_heads=max(1, attention.num_kv_heads // ranks)`.

    Args:
        sequence_parallel: whether x and the output hold only this rank's contiguous part of the sequence, `[batch,
            seq / ranks, hidden_size]`. An all-gather of x and a reduce-scatter of the output then replace the
            all-reduce of the output. The rotation and the mask remain those of the whole sequence.

    Raises:
        RopeError: when the plan is applied, if the module is not a RotaryAttention, the mesh has several axes, or the
            heads cannot be divided among its ranks; when the module is called, if cos and sin are DTensors.

    Examples:
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
        self.sequence_parallel = _checks.boolean(_WHO, "sequence_parallel", sequence_parallel)

    def __repr__(self) -> str:
        return f"{_WHO}(sequence_parallel={self.sequence_parallel})"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Shard the module. `parallelize_module` calls this."""
        attention = _check_shardable(module, device_mesh)
        x_placement = Shard(1) if self.sequence_parallel else Replicate()
        shares_keys = attention.num_kv_heads < device_mesh.size()
        key_style = _SharedKeyHeads(attention.num_kv_heads, attention.head_dim) if shares_keys else ColwiseParallel()
        plan: dict[str, ParallelStyle] = {
            "q_proj": ColwiseParallel(),
            "k_proj": key_style,
            "v_proj": key_style,
            "o_proj": RowwiseParallel(output_layouts=x_placement),
        }
        if attention.q_norm is not None:
            plan |= {"q_norm": _Replicated(), "k_norm": _Replicated()}
        parallelize_module(attention, device_mesh, plan, src_data_rank=self.src_data_rank)

        gather = partial(_replicate_input, mesh=device_mesh, placement=x_placement)
        select_heads = partial(_select_own_heads, attention=attention, mesh=device_mesh)

        def prepare(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            """Gather x once for the three projections, and select the rotation of this rank's heads.

            The gradients of x from the three projections are then added before they are reduced over the ranks.
            """
            prepared, named = list(args), dict(kwargs)
            for i, (name, convert) in enumerate((("x", gather), ("rotation", select_heads))):
                if i < len(prepared):
                    prepared[i] = convert(prepared[i])
                elif name in named:
                    named[name] = convert(named[name])
            return tuple(prepared), named

        attention.register_forward_pre_hook(prepare, with_kwargs=True)
        return attention


def attention_plan(model: nn.Module, *, sequence_parallel: bool = False) -> dict[str, ParallelStyle]:
    """Build the plan that shards every `RotaryAttention` of a model by its heads.

    Args:
        model: the model, or a part of it such as a block.
        sequence_parallel: as in `HeadwiseParallel`.

    Returns:
        A dict from the name of each `RotaryAttention` in the model to a `HeadwiseParallel`. Add the entries of the
        other layers, and pass the dict to `parallelize_module(model, mesh, plan)`.

    Raises:
        RopeError: model is not a module, is itself a `RotaryAttention`, or does not contain a `RotaryAttention`.

    Examples:
        >>> block = nn.ModuleDict({"attention": RotaryAttention(64, 4), "up": nn.Linear(64, 256)})
        >>> attention_plan(block)
        {'attention': HeadwiseParallel(sequence_parallel=False)}
    """
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    names = [name for name, module in modules if isinstance(module, RotaryAttention)]
    if not all(names) or not names:  # the name of the model itself is empty
        must = "model must be a module that contains RotaryAttention layers"
        fix = "Pass the model, or for a single layer pass HeadwiseParallel() to parallelize_module instead of a plan."
        raise _checks.error("attention_plan", must, type(model).__name__, fix)
    return {name: HeadwiseParallel(sequence_parallel=sequence_parallel) for name in names}


def _replicate_input(x: Tensor, mesh: DeviceMesh, placement: Replicate | Shard) -> DTensor:
    """Replicate x on every rank. If x is a plain tensor, it is this rank's part of x under `placement`."""
    sharded = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [placement], run_check=False)
    return sharded.redistribute(placements=[Replicate()])


def _select_own_heads(rotation: Any, attention: RotaryAttention, mesh: DeviceMesh) -> Any:
    """Return the rotation of this rank's heads. The backward pass sums gradients of learned tables over the ranks."""
    if not isinstance(rotation, Rotation):
        return rotation
    cos, sin = rotation.cos, rotation.sin
    if is_dtensor(cos):
        fix = "Pass plain positions to rope.at: those of all tokens, on every rank."
        raise _checks.error(_WHO, "cos and sin must be plain tensors, as q and k are inside", "DTensors", fix)
    ranks, heads = mesh.size(), attention.num_heads
    if rotation.per_head and cos.shape[-3] * ranks == heads:
        return rotation  # these are already the tables of this rank's heads
    if cos.requires_grad or sin.requires_grad:
        cos, sin = sum_gradient(torch.stack((cos, sin)), mesh).unbind()  # one all-reduce for both
    if rotation.per_head and cos.shape[-3] == heads == attention.num_kv_heads:
        begin = mesh.get_local_rank() * (heads // ranks)
        cos, sin = (table.narrow(-3, begin, heads // ranks) for table in (cos, sin))
    return rotation if cos is rotation.cos else rotation._replace_tables(cos, sin)


def _check_shardable(module: nn.Module, mesh: DeviceMesh) -> RotaryAttention:
    """Return the module; raise unless it is a RotaryAttention whose heads the mesh can divide."""
    if not isinstance(module, RotaryAttention):
        fix = "Name the attention in the plan, e.g. 'layers.*.self_attn'."
        raise _checks.error(_WHO, "the module must be a RotaryAttention", type(module).__name__, fix)
    if mesh.ndim != 1:
        fix = "Pass a single axis, e.g. mesh['tensor']."
        raise _checks.error(_WHO, "the mesh must have one axis", f"{mesh.ndim} axes", fix)
    ranks, heads, kv_heads = mesh.size(), module.num_heads, module.num_kv_heads
    fits = [n for n in range(1, heads + 1) if not heads % n and (not kv_heads % n or not n % kv_heads)]
    fix = f"Numbers of ranks that fit this attention: {', '.join(map(str, fits))}."
    if heads % ranks:
        must = "the number of ranks must divide num_heads"
        raise _checks.error(_WHO, must, f"{ranks} ranks for {heads} heads", fix)
    if kv_heads % ranks and ranks % kv_heads:
        must = "the number of ranks must divide num_kv_heads or be a multiple of it"
        got = f"{ranks} ranks for {kv_heads} key heads"
        raise _checks.error(_WHO, must, got, fix)
    return module


class _Replicated(ParallelStyle):
    """A `ParallelStyle` that replicates the parameters of a module on every rank, as DTensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._replicate)

    def _replicate(self, _: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            whole = distribute_tensor(parameter.data, mesh, [Replicate()], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))


class _SharedKeyHeads(_Replicated):
    """A `ParallelStyle` for k_proj and v_proj if there are fewer key heads than ranks: it replicates their parameters.

    From the output, each rank keeps only the key head that its query heads use.
    """

    def __init__(self, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self._kv_heads, self._head_dim = kv_heads, head_dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        begin = device_mesh.get_local_rank() * self._kv_heads // device_mesh.size() * self._head_dim

        def own_head(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return sum_gradient(output, mesh).narrow(-1, begin, self._head_dim)

        return distribute_module(module, device_mesh, self._replicate, output_fn=own_head)
