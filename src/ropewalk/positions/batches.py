"""Add tokens without a position of their own: tokens that do not rotate, and the padding of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.positions.sizes import check_size

_WITH_UNROTATED, _PADDED = "positions.with_unrotated", "positions.padded"


def with_unrotated(positions: Tensor, *, before: int = 0, after: int = 0) -> Tensor:
    """Add positions for tokens that do not rotate, such as CLS, registers, a prefix or object pointers.

    Such tokens are at 0 on every axis, where the angle of each pair is 0. The attention factor of a rope (YaRN,
    LongRoPE) still applies at position 0. If the rope has one, or to save the work, do not pass these tokens to the
    rotation at all.

    Args:
        positions: positions of the rotated tokens, `[..., tokens]`, e.g. `[axes, tokens]`.
        before, after: number of tokens to add before and after, at least 0.

    Returns:
        `[..., before + tokens + after]`, with the dtype and device of positions.

    Raises:
        RopeError: positions is not a tensor with an axis of tokens, or a number is not an integer of at least 0.

    Examples:
        >>> with_unrotated(torch.tensor([[1, 1], [1, 2]]), before=1)
        tensor([[0, 1, 1],
                [0, 1, 2]])
    """
    if not isinstance(positions, Tensor) or positions.ndim == 0:
        must, fix = "positions must be a tensor [..., tokens]", "Pass the result of positions.grid."
        raise _checks.error(_WITH_UNROTATED, must, _checks.describe(positions), fix)
    check_size(_WITH_UNROTATED, "before", before)
    check_size(_WITH_UNROTATED, "after", after)
    return torch.nn.functional.pad(positions, (before, after))


def padded(rows: Sequence[Tensor], side: Literal["left", "right"], *, length: int | None = None) -> Tensor:
    """Combine rows of different lengths into a batch. Padding is at position 0.

    Args:
        rows: positions of each row, `[axes, seq]` or `[seq]`. There is at least one row. All have the same dtype,
            device and number of axes; seq may differ.
        side: the side on which padding is added.
        length: number of tokens in each row of the result. None means the length of the longest row.

    Returns:
        `[axes, batch, length]` or `[batch, length]`, with the dtype and device of the rows.

    Raises:
        RopeError: the rows are not such tensors, side is unknown, or length is less than that of the longest row.

    Examples:
        >>> padded([torch.tensor([0, 1, 2]), torch.tensor([0])], "left")
        tensor([[0, 1, 2],
                [0, 0, 0]])
    """
    _checks.choice(_PADDED, "side", side, ("left", "right"))
    if not isinstance(rows, Sequence) or not rows:
        raise _checks.error(_PADDED, "rows must be a non-empty list of tensors", _checks.describe(rows), _FIX)
    for row in rows:
        if not isinstance(row, Tensor) or row.ndim not in (1, 2):
            must = "each row must be a tensor [axes, seq] or [seq]"
            raise _checks.error(_PADDED, must, _checks.describe(row), _FIX)
        if row.shape[:-1] != rows[0].shape[:-1] or row.dtype != rows[0].dtype:
            must = f"all rows must match the first, {_checks.describe(rows[0])}, except in seq"
            raise _checks.error(_PADDED, must, _checks.describe(row), "Pass rows of one dtype and number of axes.")
    longest = max(row.shape[-1] for row in rows)
    if length is None:
        length = longest
    elif not isinstance(length, torch.SymInt):
        _checks.integer(_PADDED, "length", length, at_least=longest)
    equal = [with_unrotated(row, **{"before" if side == "left" else "after": length - row.shape[-1]}) for row in rows]
    return torch.stack(equal, dim=-2)


_FIX = "Pass the positions of each row."
