"""Dense mask tensors inside attention: check them, select pieces of them, and combine them with other masks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.rotation.writable import check_memory


def select(pairs: Tensor, queries: slice, keys: slice | Tensor) -> Tensor:
    """Return some queries and keys of a tensor `[batch, heads, seq, keys]`, each axis of full size or 1."""
    pairs = pairs if pairs.shape[2] == 1 else pairs[:, :, queries]
    return pairs if pairs.shape[3] == 1 else pairs[..., keys]


def restrict(mask: Tensor | None, visible: Tensor) -> Tensor:
    """Combine the user's mask, bool or additive, with `visible`, a bool mask that is False for keys to hide."""
    if mask is None:
        return visible
    return mask & visible if mask.dtype == torch.bool else torch.where(visible, mask, -math.inf)


# Fixes for masks with fewer axes. If batch, heads and seq are equal, the shape does not determine the meaning.
_FIXES = {
    2: "Write mask[None, None] if its axes are [seq, keys]; masks.padding(mask) or mask[:, None, None, :] if they are "
    "[batch, keys].",
    3: "Write mask[None] if its axes are [heads, seq, keys]; mask[:, None] if they are [batch, seq, keys].",
}


def check_mask(who: str, mask: Tensor, q: Tensor, keys: int) -> None:
    """Raise unless mask is bool or as q, in dtype and device, with axes `[batch, heads, seq, keys]` of full size or 1.

    Args:
        who: name of the caller in the message.
        mask: attention mask.
        q: queries `[batch, seq, heads, head_dim]`.
        keys: number of keys.
    """
    shape = (q.shape[0], q.shape[2], q.shape[1], keys)
    if mask.device != q.device:
        fix = "Move the mask to the device of q."
        raise _checks.error(who, f"mask must be on {q.device}", str(mask.device), fix)
    if mask.ndim != 4:
        raise _checks.error(
            who,
            f"mask must have four axes [batch, heads, seq, keys] = {list(shape)}, each of that size or 1",
            f"shape {tuple(mask.shape)}",
            _FIXES.get(mask.ndim, "Add the missing axes with size 1."),
        )
    if mask.dtype not in (torch.bool, q.dtype):
        raise _checks.error(
            who,
            f"mask must be bool (True: attend) or {q.dtype} (added to the scores)",
            str(mask.dtype),
            "Convert a mask of 0 and 1 to bool, and an additive mask to the dtype of q and k.",
        )
    check_memory(who, mask)
    # Not `have in (1, want)`: with a dynamic `want`, Dynamo evaluates that to False even if they are equal.
    if not all(have == 1 or have == want for have, want in zip(mask.shape, shape, strict=True)):
        raise _checks.error(
            who,
            f"mask must be broadcastable to [batch, heads, seq, keys] = {list(shape)}",
            f"shape {tuple(mask.shape)}",
            "Give each axis that size, or 1 to broadcast.",
        )
