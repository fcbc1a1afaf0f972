"""Rotate DTensors: distribute the tables like q and k, and register the sharding rules of the operators.

Rotating a token needs only the row of cos and sin for that token. A rank that has the rows of its own tokens therefore
need not communicate. So a table is sharded like q along the axes that both have. Along the other axes of q, every rank
has the whole table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ropewalk import _dtensor
from ropewalk._checks import RopeError, error
from ropewalk._dtensor import is_dtensor
from ropewalk._layout import AXES, Layout
from ropewalk.kernels import backend, cpu
from ropewalk.kernels.backend import PLAIN

DTensor = Any  # torch.distributed.tensor is imported only when a DTensor exists
_WHO = "Rotation"
NUMBERS: dict[Layout, int] = {layout: number for number, layout in enumerate(AXES)}
"""Maps each layout to the number that the operators take instead of its name. PyTorch caches the result of a sharding
rule by shapes, placements and numbers, and ignores strings before the first number. If the operators took names, two
layouts would share one cached result."""
_LAYOUTS = tuple(AXES)


def layout_of(number: int) -> Layout:
    """Return the layout that has this number in `NUMBERS`.

    Raises:
        RopeError: no layout has this number.
    """
    if not 0 <= number < len(_LAYOUTS):
        numbers = ", ".join(f"{i} for {layout!r}" for layout, i in NUMBERS.items())
        raise error("torch.ops.ropewalk", f"layout must be one of {numbers}", str(number), "Use a Rotation.")
    return _LAYOUTS[number]


_AxisMap = dict[int, int]
"""Maps an axis of q or k to the corresponding axis of a table."""


_Tables = tuple[Tensor, Tensor]
_Cache = tuple[object, _Tables, _Tables | None] | None
"""A key, the DTensor tables for this key, and the local shards of the tables. The shards are None if this rank cannot
rotate without communication."""


def tables_for(
    tensors: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    layout: Layout,
    per_head: bool,
    cache: _Cache,
    check: Callable[[Tensor, Tensor], _Tables],
) -> tuple[_Cache, _Tables]:
    """Return cos and sin as DTensors whose shards have the rows of each rank's tokens.

    Only tables that must be resharded require communication. Plain tables have rows for all tokens or for the tokens of
    this rank, which is inferred from their sizes.

    Args:
        tensors: q, or q and k, as DTensors.
        cache: the cache that the previous call for these tables returned.
        check: function that raises if the tables do not match, and returns them with the axes that the operators need.

    Returns:
        The cache for the next call, and the tables.

    Raises:
        RopeError: one of q and k is a DTensor and the other is not; plain tables have neither the size of all tokens
            nor that of this rank's tokens, or ambiguously both; or as raised by `check`.
    """
    key = _cache_key(tensors, cos, sin, layout)
    if cache is not None and cache[0] == key:
        return cache, cache[1]
    tables = check(*_as_dtensors(tensors, cos, sin, layout, per_head=per_head))
    if key is not None and all(map(_can_be_cached, tables, (cos, sin))):
        is_local = can_share_tables(tensors[0], tensors[-1]) and all(rotates_locally(x, layout) for x in tensors)
        cache = key, tables, (_local_part(tables[0]), _local_part(tables[1])) if is_local else None
    return cache, tables


def fast_path(cache: Any, q: Any, k: Any, cos: Tensor, sin: Tensor, layout: Layout, *options: Any) -> Any:
    """Rotate DTensors entirely in compiled code on the CPU, if the cached tables fit them.

    As with the operators of `ops`, each rank rotates its own shard, and the results keep the placements. This path
    saves the 20 µs that PyTorch needs to look up the sharding rule and its cached result. Rotating one token takes only
    4 µs.

    Args:
        cache: the cache that `tables_for` returned.
        options: the remaining arguments of `cpu.rotate_plain`. The last of them is in_place.

    Returns:
        The rotated tensors, or True if they were rotated in place. None if nothing was done.
    """
    tensors = [q] if k is None else [q, k]
    key, _, parts = cache
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if parts is None or recorded or key != _cache_key(tensors, cos, sin, layout):
        return None
    k_part = None if k is None else k._local_tensor
    rotated: Any = cpu.rotate_plain(q._local_tensor, k_part, parts[0], parts[1], layout, *options)
    if rotated is None:
        return None
    if options[-1]:
        torch.autograd.graph.increment_version([x for x in tensors if not x.is_inference()])
        return True
    return _dtensor_like(rotated, q) if k is None else (_dtensor_like(rotated[0], q), _dtensor_like(rotated[1], k))


def _dtensor_like(part: Tensor, x: Any) -> Tensor:
    """Wrap a local part in a DTensor like x. The part is contiguous or has the strides of the local part of x."""
    if part.stride() == x._local_tensor.stride():
        wrapped: Tensor = type(x)(part, x._spec, requires_grad=False)
        return wrapped
    return _dtensor.from_local(part, x.device_mesh, x.placements, x.shape)


def _local_part(table: Any) -> Tensor:
    part: Tensor = table._local_tensor
    return part


def _as_dtensors(tensors: list[Tensor], cos: Tensor, sin: Tensor, layout: Layout, *, per_head: bool) -> _Tables:
    q = tensors[0]
    if not is_dtensor(q) or not all(is_dtensor(x) and x.device_mesh == q.device_mesh for x in tensors):
        kinds = ", ".join(_describe(x) for x in tensors)
        raise error(
            _WHO,
            "if one tensor is a DTensor, q and k must both be DTensors of the same mesh",
            f"{kinds} with cos and sin: {_describe(cos)}" if is_dtensor(cos) else kinds,
            "Convert all of them with DTensor.from_local, or none of them (.to_local()).",
        )
    if layout not in AXES or q.ndim != AXES[layout][-1] or not isinstance(cos, Tensor) or cos.shape != sin.shape:
        return cos, sin  # `check` raises for these
    axis_map = _map_axes(layout, cos.shape, per_head=per_head)
    if not is_dtensor(cos) and not is_dtensor(sin):
        at_batch = AXES[layout][0] if cos.ndim - per_head == 3 else None
        learned = cos.requires_grad or sin.requires_grad
        placements, shape = _infer_placements(tensors, cos, axis_map, at_batch, learned=learned)
        cos, sin = (_dtensor.from_local(table, q.device_mesh, placements, shape) for table in (cos, sin))
    return _redistribute(cos, sin, q, axis_map) if can_share_tables(q, tensors[-1]) else (cos, sin)


def _cache_key(tensors: list[Tensor], cos: Tensor, sin: Tensor, layout: Layout) -> tuple[object, ...] | None:
    """Return everything that the DTensor tables for q and k depend on, or None if they must not be cached."""
    if backend.needs_tracing() or cos.requires_grad or sin.requires_grad:
        return None
    versions = [_versions(table) for table in (cos, sin)]
    specs = [(x.device_mesh, x.placements, x.shape, x.dtype) for x in tensors if is_dtensor(x)]
    return layout, torch.is_inference_mode_enabled(), len(tensors), *versions, *specs


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


def redistribute_tables(cos: Tensor, sin: Tensor, x: DTensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Redistribute DTensor tables like x, so that each rank has the rows of its tokens."""
    return _redistribute(cos, sin, x, _map_axes(layout, cos.shape, per_head=cos.ndim == 4))


def convert_for_lookup(rows: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Convert rows, cos and sin to DTensors of one mesh. Replicate cos and sin, so that ranks look up rows locally."""
    meshes = {x.device_mesh for x in (rows, cos, sin) if is_dtensor(x)}
    if len(meshes) > 1:
        fix = "Distribute rows over that mesh."
        raise error("Rotation[rows]", "rows must be on the mesh of the table", "DTensors of different meshes", fix)
    (mesh,) = meshes
    if not is_dtensor(rows):
        rows = _dtensor.replicate(rows, mesh)
    return rows, _dtensor.replicate(cos, mesh), _dtensor.replicate(sin, mesh)


def can_share_tables(q: DTensor, k: DTensor) -> bool:
    """Return whether the shards of q and k need the same tables."""
    return bool(q.placements == k.placements)


def rotates_locally(x: DTensor, layout: Layout) -> bool:
    """Return whether x can be rotated without communication.

    This is the case if its channels are not sharded, and if every pending reduction is a sum or a mean.
    """
    channels = AXES[layout][-1] - 1
    return all(_is_local(p, channels) for p in x.placements)


def _is_local(placement: Any, channels: int) -> bool:
    if placement.is_replicate():
        return True
    if placement.is_partial():
        return bool(placement.reduce_op in ("sum", "avg"))  # a rotation is linear
    return _is_shard(placement) and bool(placement.dim != channels)


def has_rule(x: DTensor) -> bool:
    """Return whether the sharding rules can keep the shards of x, for which every rank must have elements."""
    mesh, ranks = x.device_mesh, [1] * x.ndim
    for i, placement in enumerate(x.placements):
        if placement.is_shard():
            ranks[placement.dim] *= mesh.size(i)
    return all(size >= over for size, over in zip(x.shape, ranks, strict=True))


def reshard_gradient(grad: Tensor, forward: tuple[Any, ...]) -> Tensor:
    """Shard a gradient along mesh axes on which it is replicated, although the rotated tensor (`forward`) was not."""
    if not is_dtensor(grad) or grad.placements == forward:
        return grad
    placements = [f if g.is_replicate() and f.is_shard() else g for g, f in zip(grad.placements, forward, strict=True)]
    return grad.redistribute(placements=placements)


def map_shards(tensors: list[DTensor], compute: Callable[[list[Tensor]], list[Tensor]]) -> list[Tensor]:
    """Apply a function to the local parts of DTensors, and wrap its results like them. Record no gradient."""
    with torch.no_grad():
        parts = compute([x.to_local() for x in tensors])
        return [_dtensor_like(part, x) for part, x in zip(parts, tensors, strict=True)]


@functools.cache
def register_rules() -> None:
    """Register the sharding rules of the operators, once, at the first call with DTensors."""
    from torch.distributed.tensor.experimental import register_sharding

    for name, count in (("rotate_one", 1), ("rotate_pair", 2), ("rotate_one_", 1)):
        register_sharding(getattr(torch.ops.ropewalk, name).default)(functools.partial(_sharding_rule, count))


def _sharding_rule(count: int, *arguments: Any) -> list[tuple[list[Any], list[Any]]]:
    """Return the accepted combinations of placements for one axis of a mesh, each as (outputs, inputs).

    Args:
        count: number of tensors to rotate, which are the first arguments.
        arguments: the arguments of the operator.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    cos, layout = arguments[count], _LAYOUTS[arguments[count + 2]]
    axis_map = _map_axes(layout, cos.shape, per_head=cos.ndim == 4)
    no_tensors = [None] * (len(arguments) - count - 2)
    placements: list[tuple[Any, Any]] = [(p, Replicate()) for p in (Replicate(), Partial("sum"), Partial("avg"))]
    for axis in range(AXES[layout][-1] - 1):
        placements.append((Shard(axis), Shard(axis_map[axis]) if axis in axis_map else Replicate()))
    return [([x] * count, [x] * count + [table] * 2 + no_tensors) for x, table in placements]


def _map_axes(layout: Layout, shape: tuple[int, ...], *, per_head: bool) -> _AxisMap:
    """Map each batch, token or head axis of q to the corresponding axis of a table of this shape, if there is one."""
    at_batch, at_tokens, at_heads, _ = AXES[layout]
    axis_map: _AxisMap = {}
    if len(shape) > 1:
        axis_map[at_tokens] = len(shape) - 2
    if per_head:
        axis_map[at_heads] = len(shape) - 3
    if len(shape) - per_head > 2 and at_batch is not None and shape[0] != 1:
        axis_map[at_batch] = 0
    return axis_map


def _infer_placements(
    tensors: list[DTensor], cos: Tensor, axis_map: _AxisMap, at_batch: int | None, *, learned: bool
) -> tuple[list[Any], tuple[int, ...]]:
    """Infer the placements and the global shape of plain tables from the sizes of the tables, of q and of its shard."""
    from torch.distributed.tensor import Replicate, Shard

    q = tensors[0]
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
        if table_axis is not None and rows == part[axis] and (ranks == 1 or rows != whole[axis]):
            placements[-1] = Shard(table_axis)
            shape[table_axis] = whole[axis]
        elif rows is not None and rows != whole[axis]:
            raise error(
                _WHO,
                f"along axis {axis} of q, cos and sin must have rows for all {whole[axis]} or this rank's {part[axis]}",
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


def _redistribute(cos: Any, sin: Any, x: DTensor, axis_map: _AxisMap) -> tuple[Tensor, Tensor]:
    """Redistribute DTensor tables to match the placements of x, which requires communication if they differ."""
    from torch.distributed.tensor import Replicate, Shard

    def table_placement(placement: Any) -> Any:
        return Shard(axis_map[placement.dim]) if _is_shard(placement) and placement.dim in axis_map else Replicate()

    placements = tuple(table_placement(placement) for placement in x.placements)
    cos, sin = (t if t.placements == placements else t.redistribute(placements=placements) for t in (cos, sin))
    return cos, sin


def _is_shard(placement: Any) -> bool:
    """Return whether the placement is exactly a Shard. In subclasses of Shard, a rank's rows are not contiguous."""
    from torch.distributed.tensor import Shard

    return type(placement) is Shard


def _describe(x: object) -> str:
    return "a DTensor" if is_dtensor(x) else "a plain tensor"
