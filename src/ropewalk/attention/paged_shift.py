"""Shift the keys of some rows of a paged cache, with copies of the blocks that other rows share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk.attention import paged_checks
from ropewalk.attention.paged_rows import Rows
from ropewalk.rope.rope import Rope
from ropewalk.rotation.api import Rotation


@dataclass
class Move:
    """A block whose keys move by `delta` positions for `rows`, in a copy if `copied` is True, otherwise in place."""

    block: int
    delta: int
    rows: list[int]
    copied: bool


def shift(
    rows: Rows,
    numbers: list[int],
    deltas: list[int],
    keys: list[Tensor],
    ropes: Sequence[Rope | None],
    *,
    uniform: bool,
) -> None:
    """Move the keys and the next positions of some rows. The newest step is dropped.

    Args:
        rows: all rows of the cache.
        numbers: numbers of the rows that move.
        deltas: distance of each of these rows.
        keys: keys of each layer, `[blocks, block_size, kv_heads, head_dim]`.
        ropes: rope of each layer, None if it does not rotate.
        uniform: whether all deltas are equal.

    Raises:
        RopeError: there are not enough free blocks for the copies. Nothing has changed then.
    """
    moves = _plan_moves(rows, numbers, deltas)
    copied = [move for move in moves if move.copied]
    paged_checks.check_free_blocks("PagedKVCache.shift", len(copied), rows.available())
    distinct = {rope for rope in ropes if rope is not None} if moves else set()
    # All rotations are computed before any key changes.
    rotations = {rope: _rotation(rope, moves, keys[0], uniform=uniform) for rope in distinct}
    copies = rows.move(dict(zip(numbers, deltas, strict=True)), [(move.block, move.rows) for move in copied])
    for move, block in zip(copied, copies, strict=True):
        move.block = block
    if not moves:
        return
    blocks_moved = torch.tensor([move.block for move in moves])
    rows.key_positions[blocks_moved] += torch.tensor([[move.delta] for move in moves])
    for pool, rope in zip(keys, ropes, strict=True):
        if rope is not None:
            blocks = blocks_moved.to(pool.device)
            rotated = pool.index_select(0, blocks)
            rotations[rope].apply_(rotated, layout="bshd")
            pool.index_copy_(0, blocks, rotated)


def _plan_moves(rows: Rows, numbers: list[int], deltas: list[int]) -> list[Move]:
    """Group the moves by block and distance.

    A block is copied if it also belongs to a row that moves by another distance or not at all.
    """
    by_block: dict[int, dict[int, list[int]]] = {}
    for number, delta in zip(numbers, deltas, strict=True):
        for block in rows.by_number[number].blocks:
            by_block.setdefault(block, {}).setdefault(delta, []).append(number)
    moves = []
    for block, by_delta in by_block.items():
        needs_copy = 0 in by_delta or rows.blocks.holders(block) > sum(len(group) for group in by_delta.values())
        for delta, group in by_delta.items():
            if delta:
                moves.append(Move(block, delta, group, copied=needs_copy))
                needs_copy = True
    return moves


def _rotation(rope: Rope, moves: list[Move], keys: Tensor, *, uniform: bool) -> Rotation:
    """Compute the rotation of the blocks of these moves, on the device and in the precision of keys."""
    axes = None if rope.axes is None else rope.axes.count
    if uniform:
        delta = moves[0].delta
        shift_by: int | tuple[int, ...] | Tensor = delta if axes is None else (delta,) * axes
    else:
        each = torch.tensor([move.delta for move in moves])[:, None].expand(-1, keys.shape[1])
        shift_by = each if axes is None else each.expand(axes, -1, -1)
    precise = torch.float64 if keys.dtype == torch.float64 else torch.float32
    return rope.shift(shift_by, device=keys.device, dtype=precise)
