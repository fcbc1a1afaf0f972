"""The door for DTensors: rotate them shard by shard, and the few helpers that other modules need for them.

Rotating a token needs only the row of cos and sin for that token. A rank that has the rows of its own tokens therefore
need not communicate. So a table is sharded like q along the axes that both have. Along the other axes of q, every rank
has the whole table. Each rank then rotates its shards as plain tensors.

torch.distributed.tensor is imported only when a DTensor exists or must be made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from ropewalk._checks import RopeError, error
from ropewalk._layout import AXES, Layout, Options
from ropewalk.kernels.backend import PLAIN
from ropewalk.kernels.observed import must_trace
from ropewalk.rotation import checks, ops, writable

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

Rotation = Any  # `api`, which defines it, imports this module
_WHO = "Rotation"


def is_dtensor(x: object) -> TypeGuard[DTensor]:
    """Return whether x is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


class _Placed(NamedTuple):
    """cos and sin as DTensors that are sharded like q, k or both, and the rotation of this rank's part of them."""

    cos: Any
    sin: Any
    shards: Rotation  # None while PyTorch traces
    is_local: bool  # whether q and k need not be replicated first


_Cache = tuple[object, list[_Placed]]
"""A key, and the tables for q and k together, or for each of them."""


def rotate(rotation: Rotation, tensors: list[Any], options: Options) -> list[Tensor]:
    """Rotate DTensors into new ones with the same placements, as `Rotation.__call__` specifies.

    Tensors that are sharded along their channels, and those with a pending reduction that is not linear, are replicated
    first.
    """
    rotated: list[Tensor] = []
    layout = options.layout
    for group, placed in _place(rotation, tensors, layout):
        if placed.shards is None or _is_recorded(group, placed.cos, placed.sin):
            rotated += _rotate_alike(group, placed.cos, placed.sin, options)
        else:
            group = group if placed.is_local else [_make_local(x, layout) for x in group]
            parts = placed.shards(*[x._local_tensor for x in group], layout=layout)
            rotated += [_like(part, x) for part, x in zip(parts if len(group) == 2 else [parts], group, strict=True)]
    return rotated


def rotate_(rotation: Rotation, tensors: list[Any], options: Options) -> None:
    """Rotate DTensors in place, as `Rotation.apply_` specifies. Both are checked before either is changed."""
    layout = options.layout
    groups = _place(rotation, tensors, layout)
    recorded = _is_recorded(tensors, rotation.cos, rotation.sin)
    direct = not recorded and not must_trace() and all(placed.is_local for _, placed in groups)
    if not (direct and len(groups) == 1) and not torch.compiler.is_compiling():  # else the call for the shards checks
        for x in tensors:
            _check_reduction(x)
        if recorded:
            writable.check_writable(tensors, recorded=True)
        writable.check_writable([x._local_tensor for x in tensors], recorded=False)
    if not direct:
        # The gradient of learned tables needs the tensors before the rotation.
        learned = rotation.cos.requires_grad or rotation.sin.requires_grad
        inputs = [x.clone() for x in tensors] if learned else tensors
        for x, y in zip(tensors, rotate(rotation, inputs, options), strict=True):
            x.copy_(y)
        return
    for group, placed in groups:
        placed.shards.apply_(*[x._local_tensor for x in group], layout=layout)
    torch.autograd.graph.increment_version([x for x in tensors if not x.is_inference()])


def _is_recorded(tensors: list[Any], cos: Tensor, sin: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in (*tensors, cos, sin))


def _rotate_alike(tensors: list[Any], cos: Any, sin: Any, options: Options) -> list[Tensor]:
    """Rotate DTensors of equal placements, given tables that are sharded like them, differentiably."""
    if must_trace():
        return ops.rotate(tensors, cos, sin, options)  # with PyTorch's operators, which take DTensors
    tensors = [_make_local(x, options.layout) for x in tensors]
    if _is_recorded(tensors, cos, sin):
        if cos.is_inference():
            raise checks.not_saveable_error()
        return list(_RotateShards.apply(cos, sin, options, *tensors))  # type: ignore[no-untyped-call]
    parts = ops.rotate([x._local_tensor for x in tensors], cos._local_tensor, sin._local_tensor, options)
    return [_like(part, x) for part, x in zip(parts, tensors, strict=True)]


class _RotateShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cos: Any, sin: Any, options: Options, *tensors: Any) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.learned = cos.requires_grad or sin.requires_grad
        ctx.save_for_backward(cos, sin, *(tensors if ctx.learned else ()))
        ctx.options, ctx.placements = options, tensors[0].placements
        return tuple(_rotate_alike(list(tensors), cos, sin, options))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        cos, sin, *tensors = ctx.saved_tensors
        options: Options = ctx.options
        given = [i for i, grad in enumerate(grads) if grad is not None]
        defined = [_shard_like(grads[i], ctx.placements) for i in given]
        rotated: list[Tensor] = []
        for group in _alike(defined):
            tables = _redistribute(cos, sin, group[0], options.layout)
            rotated += _rotate_alike(group, *tables, options._replace(inverse=not options.inverse))
        to_tensors: list[Tensor | None] = [None] * len(grads)
        for i, x in zip(given, rotated, strict=True):
            to_tensors[i] = x
        to_tables: tuple[Tensor | None, ...] = (None, None)
        if ctx.learned and given:  # PyTorch's own operators can be differentiated again, and sum over ranks
            to_tables = ops.table_gradient(None, [tensors[i] for i in given], defined, cos, options)
        return (*to_tables, None, *to_tensors)


def _alike(tensors: list[Any]) -> list[list[Any]]:
    """Return the tensors in one group if their shards need the same tables, and else each in its own."""
    q, k = tensors[0], tensors[-1]
    one = q is k or (q.placements == k.placements and q.requires_grad == k.requires_grad)
    return [tensors] if one else [[x] for x in tensors]


def _like(part: Tensor, x: Any) -> Tensor:
    """Wrap a local part in a DTensor like x. The part is contiguous or has the strides of the local part of x."""
    if part.stride() == x._local_tensor.stride():
        wrapped: Tensor = type(x)(part, x._spec, requires_grad=False)
        return wrapped
    return from_local(part, x.device_mesh, x.placements, x.shape)


def _make_local(x: Any, layout: Layout) -> Any:
    """Replicate x along the axes of the mesh where the shards of x cannot be rotated alone."""
    if _is_local(x, layout):
        return x
    from torch.distributed.tensor import Replicate

    channels = AXES[layout][-1] - 1
    return x.redistribute(placements=[p if _rotates_alone(p, channels) else Replicate() for p in x.placements])


def _is_local(x: Any, layout: Layout) -> bool:
    """Return whether x can be rotated without communication.

    This is the case if its channels are not sharded, and if every pending reduction is a sum or a mean.
    """
    channels = AXES[layout][-1] - 1
    return all(_rotates_alone(p, channels) for p in x.placements)


def _rotates_alone(placement: Any, channels: int) -> bool:
    if placement.is_replicate():
        return True
    if placement.is_partial():
        return bool(placement.reduce_op in ("sum", "avg"))  # a rotation is linear
    return _is_shard(placement) and bool(placement.dim != channels)


def _place(rotation: Rotation, tensors: list[Any], layout: Layout) -> list[tuple[list[Any], _Placed]]:
    """Return q and k, together or each alone, with cos and sin whose shards have the rows of each rank's tokens.

    Only tables that must be resharded require communication. Plain tables have rows for all tokens or for the tokens of
    this rank, which is inferred from their sizes. The `Rotation` keeps the result for the following layers.

    Raises:
        RopeError: one of q and k is a DTensor and the other is not; plain tables have neither the size of all tokens
            nor that of this rank's tokens, or ambiguously both; or the tensors do not match the tables.
    """
    key = _cache_key(rotation, tensors, layout)
    cache: _Cache | None = getattr(rotation, "_dtensor_cache", None)
    if cache is not None and cache[0] == key:
        return list(zip([tensors] if len(cache[1]) == 1 else [[x] for x in tensors], cache[1], strict=True))
    cos, sin = _as_dtensors(rotation, tensors, layout)
    numbers = (rotation.head_dim, rotation.rotary_dim, rotation.per_head)
    cos, sin = checks.check_call(tensors, cos, sin, layout, *numbers)
    groups, placed = _alike(tensors), []
    for group in groups:
        tables = _redistribute(cos, sin, group[0], layout)
        parts = [table._local_tensor[0] if table.ndim > rotation.cos.ndim else table._local_tensor for table in tables]
        shards = None if must_trace() else rotation._replace_tables(*parts)
        placed.append(_Placed(*tables, shards, all(_is_local(x, layout) for x in group)))
    if key is not None and all(
        _can_be_cached(x.cos, rotation.cos) and _can_be_cached(x.sin, rotation.sin) for x in placed
    ):
        object.__setattr__(rotation, "_dtensor_cache", (key, placed))
    return list(zip(groups, placed, strict=True))


def _as_dtensors(rotation: Rotation, tensors: list[Any], layout: Layout) -> tuple[Any, Any]:
    """Return cos and sin as DTensors, or unchanged if they cannot match q, which `checks.check_call` then says."""
    q, cos, sin = tensors[0], rotation.cos, rotation.sin
    if not is_dtensor(q) or not all(is_dtensor(x) and x.device_mesh == q.device_mesh for x in tensors):
        kinds = ", ".join(_describe(x) for x in tensors)
        raise error(
            _WHO,
            "if one tensor is a DTensor, q and k must both be DTensors of the same mesh",
            f"{kinds} with cos and sin: {_describe(cos)}" if is_dtensor(cos) else kinds,
            "Convert all of them with DTensor.from_local, or none of them (.to_local()).",
        )
    if layout not in AXES or q.ndim != AXES[layout][-1] or not isinstance(cos, Tensor) or cos.shape != sin.shape:
        return cos, sin
    if not is_dtensor(cos) and not is_dtensor(sin):
        placements, shape = _infer_placements(tensors, rotation, layout)
        return tuple(from_local(table, q.device_mesh, placements, shape) for table in (cos, sin))  # type: ignore[return-value]
    return cos, sin


def _cache_key(rotation: Rotation, tensors: list[Any], layout: Layout) -> tuple[object, ...] | None:
    """Return everything that the DTensor tables for q and k depend on, or None if they must not be cached."""
    cos, sin = rotation.cos, rotation.sin
    if must_trace() or cos.requires_grad or sin.requires_grad:
        return None
    specs = [(x.device_mesh, x.placements, x.shape, x.dtype, x.requires_grad) for x in tensors if is_dtensor(x)]
    return layout, torch.is_inference_mode_enabled(), len(tensors), _versions(cos), _versions(sin), *specs


def _can_be_cached(placed: Tensor, table: Any) -> bool:
    """Return whether a change of the table in place changes the DTensor as well, or else changes `_cache_key`.

    Args:
        placed: the DTensor that would be cached.
        table: the table from which the DTensor was made.
    """
    part = placed._local_tensor if is_dtensor(placed) else placed
    if type(part) not in PLAIN:  # an active mode may have returned a tensor of another type
        return False
    original = table._local_tensor if is_dtensor(table) else table
    return part.data_ptr() == original.data_ptr() or not original.is_inference()


def _versions(table: Any) -> tuple[int, ...]:
    """Return how often a table (and its local part) was changed in place, or 0 for inference tensors."""
    parts = (table, table._local_tensor) if is_dtensor(table) else (table,)
    return tuple(0 if part.is_inference() else part._version for part in parts)


def convert_for_lookup(rows: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Convert rows, cos and sin to DTensors of one mesh. Replicate cos and sin, so that ranks look up rows locally."""
    meshes = {x.device_mesh for x in (rows, cos, sin) if is_dtensor(x)}
    if len(meshes) > 1:
        fix = "Distribute rows over that mesh."
        raise error("Rotation[rows]", "rows must be on the mesh of the table", "DTensors of different meshes", fix)
    (mesh,) = meshes
    if not is_dtensor(rows):
        rows = replicate(rows, mesh)
    return rows, replicate(cos, mesh), replicate(sin, mesh)


def _shard_like(grad: Any, forward: tuple[Any, ...]) -> Any:
    """Shard a gradient along mesh axes on which it is replicated, although the rotated tensor (`forward`) was not."""
    if not is_dtensor(grad) or grad.placements == forward:
        return grad
    placements = [f if g.is_replicate() and f.is_shard() else g for g, f in zip(grad.placements, forward, strict=True)]
    return grad.redistribute(placements=placements)


def _check_reduction(x: Any) -> None:
    """Raise if the DTensor has a pending reduction that must precede the rotation.

    A rotation in place cannot change the placements, so it cannot reduce first.
    """
    for placement in x.placements:
        if placement.is_partial() and placement.reduce_op not in ("sum", "avg"):
            raise error(
                "Rotation.apply_",
                "a pending reduction must be a sum or a mean, because a rotation is linear",
                f"Partial({placement.reduce_op})",
                "Call the rotation, which reduces first and returns a new tensor.",
            )


def _map_axes(layout: Layout, shape: tuple[int, ...], *, per_head: bool) -> dict[int, int]:
    """Map each batch, token or head axis of q to the corresponding axis of a table of this shape, if there is one."""
    at_batch, at_tokens, at_heads, _ = AXES[layout]
    axis_map: dict[int, int] = {}
    if len(shape) > 1:
        axis_map[at_tokens] = len(shape) - 2
    if per_head:
        axis_map[at_heads] = len(shape) - 3
    if len(shape) - per_head > 2 and at_batch is not None and shape[0] != 1:
        axis_map[at_batch] = 0
    return axis_map


def _infer_placements(tensors: list[Any], rotation: Rotation, layout: Layout) -> tuple[list[Any], tuple[int, ...]]:
    """Infer the placements and the global shape of plain tables from the sizes of the tables, of q and of its shard."""
    from torch.distributed.tensor import Replicate, Shard

    q, cos = tensors[0], rotation.cos
    learned = cos.requires_grad or rotation.sin.requires_grad
    axis_map = _map_axes(layout, cos.shape, per_head=rotation.per_head)
    at_batch = AXES[layout][0] if cos.ndim - rotation.per_head == 3 else None
    part, whole, shape = q.to_local().shape, q.shape, list(cos.shape)
    placements: list[Any] = []
    for i, placement in enumerate(q.placements):
        placements.append(Replicate())
        if not _is_shard(placement):
            continue
        axis, table_axis, ranks = placement.dim, axis_map.get(placement.dim), q.device_mesh.size(i)
        rows = None if table_axis is None else cos.shape[table_axis]
        # A single row may belong to all sequences, or to the only sequence of a rank. Both interpretations rotate q in
        # the same way. They differ in the gradients of the tables, and for keys with other placements. The sizes are
        # those of every rank, so that all ranks raise or none.
        most = -(-whole[axis] // ranks)
        one_sequence = axis == at_batch and 1 in (most, whole[axis] % max(most, 1)) and rows in (None, part[axis])
        ambiguous = ranks > 1 and (one_sequence or (rows is not None and whole[axis] == 1))
        if ambiguous and (learned or any(x.placements[i] != placement for x in tensors)):
            raise _ambiguous(whole[axis], ranks)
        # Uneven shards differ, so tables could fit one rank only. Of a single row, a rank has all or none.
        shards = 1
        for j, other in enumerate(q.placements):
            shards *= q.device_mesh.size(j) if other == placement else 1
        own = part[axis] if whole[axis] % shards == 0 or whole[axis] == 1 else None
        if table_axis is not None and rows == own and (ranks == 1 or rows != whole[axis]):
            placements[-1] = Shard(table_axis)
            shape[table_axis] = whole[axis]
        elif rows is not None and rows != whole[axis]:
            or_own = f" or this rank's {own}" if own is not None else f", since {shards} ranks cannot have equal parts"
            raise error(
                _WHO,
                f"along axis {axis} of q, cos and sin must have rows for all {whole[axis]}{or_own}",
                f"{rows} rows in shape {tuple(cos.shape)}",
                "Pass the positions of these tokens, or DTensor positions: rope.at(positions) keeps their placements.",
            )
    return placements, tuple(shape)


def _ambiguous(size: int, ranks: int) -> RopeError:
    return error(
        _WHO,
        "the sizes of plain cos and sin must tell whether they hold all rows or this rank's rows",
        f"an axis of size {size} over {ranks} ranks, so that a rank has 1 row",
        "Pass DTensor positions to the rope, or tables [seq, pairs], which all sequences share.",
    )


def _redistribute(cos: Any, sin: Any, x: Any, layout: Layout) -> tuple[Any, Any]:
    """Redistribute DTensor tables to match the placements of x, which requires communication if they differ."""
    from torch.distributed.tensor import Replicate, Shard

    axis_map = _map_axes(layout, cos.shape, per_head=cos.ndim == 4)

    def table_placement(placement: Any) -> Any:
        return Shard(axis_map[placement.dim]) if _is_shard(placement) and placement.dim in axis_map else Replicate()

    placements = tuple(table_placement(placement) for placement in x.placements)
    cos, sin = (t if t.placements == placements else t.redistribute(placements=placements) for t in (cos, sin))
    return cos, sin


def _is_shard(placement: Any) -> TypeGuard[Shard]:
    """Return whether the placement is exactly a Shard. In subclasses of Shard, a rank's rows are not contiguous."""
    from torch.distributed.tensor import Shard

    return type(placement) is Shard


def _describe(x: object) -> str:
    return "a DTensor" if is_dtensor(x) else "a plain tensor"


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
    keep = [
        p if p.is_replicate() or (_is_shard(p) and p.dim >= has_axes) else Replicate() for p in positions.placements
    ]
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
