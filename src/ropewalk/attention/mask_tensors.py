"""Masks as dense tensors inside attention: check them, join them with causality."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ropewalk import _checks


def causal(seq: int, keys: int, device: torch.device) -> Tensor:
    """bool `[1, 1, seq, keys]`: the last query is that of the last key."""
    return torch.ones(1, 1, seq, keys, dtype=torch.bool, device=device).tril(keys - seq)


def joined(mask: Tensor | None, seen: Tensor) -> Tensor:
    """The user's mask, bool or additive, where `seen` allows it."""
    if mask is None:
        return seen
    return mask & seen if mask.dtype == torch.bool else torch.where(seen, mask, -math.inf)


# What a mask with fewer axes may mean. Where batch, heads and seq are equal its shape cannot tell.
_FIXES = {
    2: "Write mask[None, None] if its axes are [seq, keys]; masks.padding(mask) or mask[:, None, None, :] if they are "
    "[batch, keys].",
    3: "Write mask[None] if its axes are [heads, seq, keys]; mask[:, None] if they are [batch, seq, keys].",
}


def check_mask(who: str, mask: Tensor, q: Tensor, keys: int) -> None:
    """Raise unless mask is bool or of the dtype of q, with the axes `[batch, heads, seq, keys]`, each full or 1.

    Args:
        who: who speaks in the message.
        mask: of attention.
        q: queries `[batch, seq, heads, head_dim]`.
        keys: how many each query meets.
    """
    shape = (q.shape[0], q.shape[2], q.shape[1], keys)
    if mask.ndim != 4:
        raise _checks.error(
            who,
            f"mask must have four axes [batch, heads, seq, keys] = {list(shape)}, each of that size or 1",
            f"shape {tuple(mask.shape)}",
            _FIXES.get(mask.ndim, "Give it the missing axes, of size 1."),
        )
    if mask.dtype not in (torch.bool, q.dtype):
        raise _checks.error(
            who,
            f"mask must be bool (True: seen) or {q.dtype} (added to the scores)",
            str(mask.dtype),
            "Make a mask of 0 and 1 bool; give an additive one the dtype of q and k.",
        )
    # Not `have in (1, want)`: traced with a dynamic `want`, Dynamo calls that false even where they are equal.
    if not all(have == 1 or have == want for have, want in zip(mask.shape, shape, strict=True)):
        raise _checks.error(
            who,
            f"mask must fit [batch, heads, seq, keys] = {list(shape)}",
            f"shape {tuple(mask.shape)}",
            "Give each axis that size, or 1 where all are alike.",
        )
