"""The door for DTensors: rotate them shard by shard.

Rotating a token needs only the row of cos and sin for that token. A rank that has the rows of its own tokens therefore
need not communicate. So a table is sharded like q along the axes that both have. Along the other axes of q, every rank
has the whole table. Each rank then rotates its shards as plain tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ropewalk._checks import error
from ropewalk._layout import AXES, Layout, Options
from ropewalk.kernels.backend import PLAIN
from ropewalk.kernels.observed import must_trace
from ropewalk.rotation import checks, ops, writable
from ropewalk.rotation.placements import from_local, is_dtensor, is_shard, replicate

Rotation = Any  # `api`, which defines it, imports this module
_WHO = "Rotation"


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
    return is_shard(placement) and bool(placement.dim != channels)


def _place(rotation: Rotation, tensors: list[Any], layout: Layout) -> list[tuple[list[Any], _Placed]]:
    """Return q and k, together or each alone, with cos and sin whose shards have the rows of each rank's tokens.

    Only tables that must be resharded require communication. Plain tables have rows for all tokens. The `Rotation`
    keeps the result for the following layers.

    Raises:
        RopeError: one of q and k is a DTensor and the other is not, or the tensors do not match the tables.
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
        return replicate(cos, q.device_mesh), replicate(sin, q.device_mesh)
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


def _redistribute(cos: Any, sin: Any, x: Any, layout: Layout) -> tuple[Any, Any]:
    """Redistribute DTensor tables to match the placements of x, which requires communication if they differ."""
    from torch.distributed.tensor import Replicate, Shard

    axis_map = _map_axes(layout, cos.shape, per_head=cos.ndim == 4)

    def table_placement(placement: Any) -> Any:
        return Shard(axis_map[placement.dim]) if is_shard(placement) and placement.dim in axis_map else Replicate()

    placements = tuple(table_placement(placement) for placement in x.placements)
    cos, sin = (t if t.placements == placements else t.redistribute(placements=placements) for t in (cos, sin))
    return cos, sin


def _describe(x: object) -> str:
    return "a DTensor" if is_dtensor(x) else "a plain tensor"
