"""q and k as DTensors: the tables that stand beside their shards, and the sharding rules of the operators.

A rotation needs of each token its own row of cos and sin, and of no other token anything. So no rank needs to send
anything, as long as each has the rows of its own tokens: a table is replicated along the axes of q that it does not
have, and sharded as q is along those that it has.
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

DTensor = Any  # which is imported where somebody has one
_WHO = "Rotation"
NUMBERS: dict[Layout, int] = {layout: number for number, layout in enumerate(AXES)}
"""A layout as the operators take it. PyTorch keeps what a rule said for the next call with the same shapes, placements
and numbers, and looks at no string that stands before the first number: two layouts would get the same rule."""
_LAYOUTS = tuple(AXES)


def name_of(number: int) -> Layout:
    """The layout that an operator was given.

    Raises:
        RopeError: there is none of this number.
    """
    if not 0 <= number < len(_LAYOUTS):
        numbers = ", ".join(f"{i} for {layout!r}" for layout, i in NUMBERS.items())
        raise error("torch.ops.ropewalk", f"layout must be one of {numbers}", str(number), "Use a Rotation.")
    return _LAYOUTS[number]


_Columns = dict[int, int]
"""Axis of q or k → the axis of a table that has a row for each of it."""


_Tables = tuple[Tensor, Tensor]
_Kept = tuple[object, _Tables, _Tables | None] | None
"""What decided which tables stand beside q and k; these; and their parts here, if a rank can rotate by itself."""


def beside(
    tensors: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    layout: Layout,
    per_head: bool,
    kept: _Kept,
    checked: Callable[[Tensor, Tensor], _Tables],
) -> tuple[_Kept, _Tables]:
    """cos and sin as DTensors with the rows of each rank's tokens. Nothing is sent unless the tables are sharded.

    Plain tables are of all tokens or of those of this rank, which their sizes tell.

    Args:
        kept: what the last call for these tables returned first.
        checked: refuses tables that do not fit, and gives them the axes of the operators.

    Returns:
        What to keep for the next call, and the tables.

    Raises:
        RopeError: DTensors beside plain tensors of q and k; the sizes of plain tables are neither the one nor the
            other, or both and it matters; what `checked` raises.
    """
    state = _state(tensors, cos, sin, layout)
    if kept is not None and kept[0] == state:
        return kept, kept[1]
    made = checked(*_made(tensors, cos, sin, layout, per_head=per_head))
    if state is not None and all(map(_may_be_kept, made, (cos, sin))):
        alone = alike(tensors[0], tensors[-1]) and all(stays(x, layout) for x in tensors)
        kept = state, made, (_part(made[0]), _part(made[1])) if alone else None
    return kept, made


def at_once(kept: Any, q: Any, k: Any, cos: Tensor, sin: Tensor, layout: Layout, *how: Any) -> Any:
    """The usual call on the CPU for DTensors like those of the last one: each rank's part, as a whole in compiled code.

    PyTorch takes 20 µs to find the rule of an operator and what it said, and the rotation of one token 4. So this does
    what an operator on DTensors comes to: the parts are rotated, and have the placements that they had.

    Args:
        kept: as `beside` returned it.
        how: the rest of what `cpu.rotate_plain` takes; in_place is the last.

    Returns:
        What was made, or True in place; None where it was not done.
    """
    tensors = [q] if k is None else [q, k]
    state, _, parts = kept
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if parts is None or recorded or state != _state(tensors, cos, sin, layout):
        return None
    of_k = None if k is None else k._local_tensor
    made: Any = cpu.rotate_plain(q._local_tensor, of_k, parts[0], parts[1], layout, *how)
    if made is None:
        return None
    if how[-1]:
        torch.autograd.graph.increment_version([x for x in tensors if not x.is_inference()])
        return True
    return _like(made, q) if k is None else (_like(made[0], q), _like(made[1], k))


def _like(part: Tensor, x: Any) -> Tensor:
    """A DTensor with the placements and shape of x, of a part that has the strides of that of x, or is dense."""
    if part.stride() == x._local_tensor.stride():
        made: Tensor = type(x)(part, x._spec, requires_grad=False)
        return made
    return _dtensor.from_local(part, x.device_mesh, x.placements, x.shape)


def _part(table: Any) -> Tensor:
    part: Tensor = table._local_tensor
    return part


def _made(tensors: list[Tensor], cos: Tensor, sin: Tensor, layout: Layout, *, per_head: bool) -> _Tables:
    q = tensors[0]
    if not is_dtensor(q) or not all(is_dtensor(x) and x.device_mesh == q.device_mesh for x in tensors):
        came = ", ".join(_named(x) for x in tensors)
        raise error(
            _WHO,
            "beside a DTensor, q and k must be DTensors of the same mesh",
            f"{came} beside cos, sin: {_named(cos)}" if is_dtensor(cos) else came,
            "Make DTensors of all of them, or none: DTensor.from_local, .to_local().",
        )
    if layout not in AXES or q.ndim != AXES[layout][-1] or not isinstance(cos, Tensor) or cos.shape != sin.shape:
        return cos, sin  # what is wrong with these, `checked` says
    columns = _columns(layout, cos.shape, per_head=per_head)
    if not is_dtensor(cos) and not is_dtensor(sin):
        at_batch = AXES[layout][0] if cos.ndim - per_head == 3 else None
        learned = cos.requires_grad or sin.requires_grad
        placements, shape = _read(tensors, cos, columns, at_batch, learned=learned)
        cos, sin = (_dtensor.from_local(table, q.device_mesh, placements, shape) for table in (cos, sin))
    return _placed(cos, sin, q, columns) if alike(q, tensors[-1]) else (cos, sin)


def _state(tensors: list[Tensor], cos: Tensor, sin: Tensor, layout: Layout) -> tuple[object, ...] | None:
    """All that decides which tables stand beside q and k; None where they must be made anew at each call."""
    if backend.must_be_seen() or cos.requires_grad or sin.requires_grad:
        return None
    changes = [_changes(table) for table in (cos, sin)]
    of_tensors = [(x.device_mesh, x.placements, x.shape, x.dtype) for x in tensors if is_dtensor(x)]
    return layout, torch.is_inference_mode_enabled(), len(tensors), *changes, *of_tensors


def _may_be_kept(made: Tensor, cos: Any) -> bool:
    """Whether DTensors made of a table will show later changes of it, or `_state` will."""
    part = made._local_tensor if is_dtensor(made) else made
    if type(part) not in PLAIN:  # a mode around us may have made it something else
        return False
    given = cos._local_tensor if is_dtensor(cos) else cos
    return part.data_ptr() == given.data_ptr() or not given.is_inference()


def _changes(table: Any) -> tuple[int, ...]:
    """How often PyTorch has seen a tensor, or a part of it, change in place; it does not look in inference mode."""
    parts = (table, table._local_tensor) if is_dtensor(table) else (table,)
    return tuple(0 if part.is_inference() else part._version for part in parts)


def along(cos: Tensor, sin: Tensor, x: DTensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """DTensor tables, in the axes of the operators, with the rows of each rank's tokens of x."""
    return _placed(cos, sin, x, _columns(layout, cos.shape, per_head=cos.ndim == 4))


def alike(q: DTensor, k: DTensor) -> bool:
    """Whether the same tables stand beside the shards of both."""
    return bool(q.placements == k.placements)


def stays(x: DTensor, layout: Layout) -> bool:
    """Whether each rank can rotate its part of x by itself: no channels are sharded, and sums only are pending."""
    channels = AXES[layout][-1] - 1
    return all(_stays(p, channels) for p in x.placements)


def _stays(placement: Any, channels: int) -> bool:
    if placement.is_replicate():
        return True
    if placement.is_partial():
        return bool(placement.reduce_op in ("sum", "avg"))  # a rotation is linear
    return _is_shard(placement) and bool(placement.dim != channels)


def has_rule(x: DTensor) -> bool:
    """Whether PyTorch lets the rule of an operator keep the shards: it does not where some rank would have nothing."""
    mesh, ranks = x.device_mesh, [1] * x.ndim
    for i, placement in enumerate(x.placements):
        if placement.is_shard():
            ranks[placement.dim] *= mesh.size(i)
    return all(size >= over for size, over in zip(x.shape, ranks, strict=True))


def back_to(grad: Tensor, forward: tuple[Any, ...]) -> Tensor:
    """A gradient with each rank's part only, where x was sharded and the gradient is whole on every rank."""
    if not is_dtensor(grad) or grad.placements == forward:
        return grad
    placements = [f if g.is_replicate() and f.is_shard() else g for g, f in zip(grad.placements, forward, strict=True)]
    return grad.redistribute(placements=placements)


def of_each(tensors: list[DTensor], compute: Callable[[list[Tensor]], list[Tensor]]) -> list[Tensor]:
    """What each rank computes of its parts, sharded as they are. No gradient is recorded."""
    with torch.no_grad():
        made = compute([x.to_local() for x in tensors])
        return [_like(part, x) for part, x in zip(made, tensors, strict=True)]


@functools.cache
def register() -> None:
    """Give the operators their sharding rules, once, when the first DTensor comes."""
    from torch.distributed.tensor.experimental import register_sharding

    for name, count in (("rotate_one", 1), ("rotate_pair", 2), ("rotate_one_", 1)):
        register_sharding(getattr(torch.ops.ropewalk, name).default)(functools.partial(_rule, count))


def _rule(count: int, *arguments: Any) -> list[tuple[list[Any], list[Any]]]:
    """Along one axis of a mesh: what may come in together, and what comes out then.

    Args:
        count: how many tensors are rotated, the first of the arguments.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    cos, layout = arguments[count], _LAYOUTS[arguments[count + 2]]
    columns = _columns(layout, cos.shape, per_head=cos.ndim == 4)
    others = [None] * (len(arguments) - count - 2)
    placements: list[tuple[Any, Any]] = [(p, Replicate()) for p in (Replicate(), Partial("sum"), Partial("avg"))]
    for axis in range(AXES[layout][-1] - 1):
        placements.append((Shard(axis), Shard(columns[axis]) if axis in columns else Replicate()))
    return [([x] * count, [x] * count + [table] * 2 + others) for x, table in placements]


def _columns(layout: Layout, shape: tuple[int, ...], *, per_head: bool) -> _Columns:
    """Which axis of tables of this shape has a row for each batch, token and head, where they have one."""
    at_batch, at_tokens, at_heads, _ = AXES[layout]
    columns: _Columns = {}
    if len(shape) > 1:
        columns[at_tokens] = len(shape) - 2
    if per_head:
        columns[at_heads] = len(shape) - 3
    if len(shape) - per_head > 2 and at_batch is not None and shape[0] != 1:
        columns[at_batch] = 0
    return columns


def _read(
    tensors: list[DTensor], cos: Tensor, columns: _Columns, at_batch: int | None, *, learned: bool
) -> tuple[list[Any], tuple[int, ...]]:
    """How plain tables lie on the ranks, and the shape of the whole: by their sizes, those of q and of its shard."""
    from torch.distributed.tensor import Replicate, Shard

    q = tensors[0]
    part, whole, shape = q.to_local().shape, q.shape, list(cos.shape)
    placements: list[Any] = []
    for i, placement in enumerate(q.placements):
        placements.append(Replicate())
        if not _is_shard(placement):
            continue
        axis, column = placement.dim, columns.get(placement.dim)
        rows, alone = None if column is None else cos.shape[column], q.device_mesh.size(i) == 1
        shared = column is None and axis == at_batch and part[axis] == 1  # for all, or of this rank's only sequence
        if not alone and (shared or rows == part[axis] == whole[axis]):
            # The numbers are the same either way. The gradients of the tables are not, nor are keys placed otherwise.
            if learned or any(x.placements[i] != placement for x in tensors):
                raise _ambiguous(whole[axis])
        elif column is not None and rows == part[axis]:
            placements[-1] = Shard(column)
            shape[column] = whole[axis]
        elif column is not None and rows != whole[axis]:
            raise error(
                _WHO,
                f"along axis {axis} of q, cos and sin must have rows for all {whole[axis]} or this rank's {part[axis]}",
                f"{rows} in shape {tuple(cos.shape)}",
                "Pass the positions of these tokens, or DTensor positions: rope.at(positions) keeps their placements.",
            )
    return placements, tuple(shape)


def _ambiguous(size: int) -> RopeError:
    return error(
        _WHO,
        "it must be clear whether plain cos and sin are of all tokens or of this rank's",
        f"tables with 1 row beside an axis of {size} that is sharded",
        "Pass DTensor positions to rope.at, or tables [seq, pairs], which all sequences share.",
    )


def _placed(cos: Any, sin: Any, x: DTensor, columns: _Columns) -> tuple[Tensor, Tensor]:
    """The DTensor tables with the placements that those of x ask for; sent only where they are sharded otherwise."""
    from torch.distributed.tensor import Replicate, Shard

    def along_mesh(placement: Any) -> Any:
        return Shard(columns[placement.dim]) if _is_shard(placement) and placement.dim in columns else Replicate()

    wanted = tuple(along_mesh(placement) for placement in x.placements)
    cos, sin = (t if t.placements == wanted else t.redistribute(placements=wanted) for t in (cos, sin))
    return cos, sin


def _is_shard(placement: Any) -> bool:
    """Whether it is an ordinary Shard: of other kinds, a rank's rows are not next to each other."""
    from torch.distributed.tensor import Shard

    return type(placement) is Shard


def _named(x: object) -> str:
    return "a DTensor" if is_dtensor(x) else "a plain tensor"
