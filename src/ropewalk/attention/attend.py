"""Attention over rotated queries and keys: PyTorch's kernels, or in two passes where pairs differ in rotation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ropewalk import _checks
from ropewalk.rotation.api import Rotation


class TwoPass:
    """Two rotations of the same tokens; each pair of query and key has the scores of one of them.

    For distances that no single rotation gives: Self-Extend, and attention sinks. Made once for each forward pass by
    `SelfExtend.at` or `CacheStep.rotation`, and handed to every layer in the place of a `Rotation`.

        score = far_queries(q) · far_keys(near(k))   where far
                near(q) · near(k)                    elsewhere

    Args:
        near: rotates the new queries and keys. A cache holds keys that are rotated so.
        far_queries: rotates the new queries for far keys.
        far_keys: moves all keys, already rotated by near, for the far pass; None where they stay.
        far: bool, broadcastable to `[batch, heads, seq, keys]`: True for the pairs of the far pass.
    """

    __slots__ = ("far", "far_keys", "far_queries", "near")

    def __init__(self, near: Rotation, far_queries: Rotation, far_keys: Rotation | None, far: Tensor) -> None:
        self.near, self.far_queries, self.far_keys, self.far = near, far_queries, far_keys, far

    def attend(self, q: Tensor, q_far: Tensor, k: Tensor, v: Tensor, *, mask: Tensor, scale: float) -> Tensor:
        """Softmax over the merged scores, times v.

        Args:
            q, q_far: queries rotated by near and by far_queries, `[batch, seq, heads, head_dim]`.
            k, v: all keys, rotated by near, and values, `[batch, keys, kv_heads, head_dim]`.
            mask: bool (True: seen) or additive in the dtype of q: `[batch, heads, seq, keys]`, each axis full or 1.
            scale: of the scores.

        Returns:
            `[batch, seq, heads, head_dim]`. Softmax in float32, or float64 for float64 tensors. 0 for a query that
            sees nothing, as PyTorch's attention has it.

        Raises:
            RopeError: mask has another dtype or shape.
        """
        check_mask("TwoPass.attend", mask, q, k.shape[1])
        k_far = k if self.far_keys is None else self.far_keys(k, layout="bshd")
        scores = torch.where(self.far, _scores(q_far, k_far), _scores(q, k)) * scale
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        blind = scores.amax(-1, keepdim=True) == -math.inf
        weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0).to(v.dtype)
        batch, _, seq, keys = weights.shape
        return torch.einsum("bhgqk,bkhd->bqhgd", weights.view(batch, v.shape[2], -1, seq, keys), v).flatten(2, 3)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """`[batch, heads, seq, keys]`; head i of q meets head i // (heads / kv_heads) of k."""
    batch, seq, _, head_dim = q.shape
    return torch.einsum("bqhgd,bkhd->bhgqk", q.reshape(batch, seq, k.shape[2], -1, head_dim), k).flatten(1, 2)


class AttendingCache(Protocol):
    """What `RotaryAttention` needs of a cache: the part of one layer in one forward pass.

    `LayerCache` is one. Another may store keys and values as it likes, in pages or in other types: nothing here asks
    for them as one tensor.

    For type checkers: `isinstance` with it raises a TypeError, since at run time only the name of the method could be
    seen, which `TwoPass` has too.
    """

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        rotation: Rotation | TwoPass | None,
        mask: Tensor | BlockMask | None,
        scale: float,
    ) -> Tensor:
        """Rotate the new queries and keys, store the new keys and values, and attend over all that are stored.

        Causality is the cache's to know: a token sees those before it in its row and itself, by order.

        Args:
            q: queries that are not rotated yet, `[batch, seq, heads, head_dim]`.
            k, v: keys that are not rotated yet, and values, `[batch, seq, kv_heads, head_dim]`; kv_heads divides heads.
            rotation: of the new tokens, layout "bshd"; None where the layer does not rotate. A cache that cannot
                attend in two passes refuses a `TwoPass`.
            mask: the user's, which narrows causality; None, or whatever the cache understands.
            scale: of the scores, in place of head_dim^(−1/2).

        Returns:
            `[batch, seq, heads, head_dim]`, in the dtype of v.
        """


def rotate_and_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rotation: Rotation | TwoPass | None,
    mask: Tensor | BlockMask | None,
    scale: float,
    append: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
) -> Tensor:
    """Attention over dense keys, in one pass or two, as the rotation wants it.

    Args:
        q, k, v: of the new tokens, `[batch, seq, heads or kv_heads, head_dim]`, q and k not rotated yet.
        rotation: of the new tokens; None: q and k are used as they are.
        mask: as in `attend`; a tensor where rotation has two passes.
        scale: of the scores.
        append: stores the rotated keys and the values and returns all keys and values; None: these are all.

    Returns:
        `[batch, seq, heads, head_dim]`.
    """
    near = rotation.near if isinstance(rotation, TwoPass) else rotation
    q_near, k = (q, k) if near is None else near(q, k, layout="bshd")
    if append is not None:
        k, v = append(k, v)
    if isinstance(rotation, TwoPass):
        q_far = rotation.far_queries(q, layout="bshd")
        return rotation.attend(q_near, q_far, k, v, mask=cast(Tensor, mask), scale=scale)
    return attend(q_near, k, v, mask=mask, scale=scale)


def attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | BlockMask | None, scale: float) -> Tensor:
    """PyTorch's attention: FlexAttention for a BlockMask, scaled_dot_product_attention for the rest.

    Args:
        q: rotated queries, `[batch, seq, heads, head_dim]`.
        k, v: rotated keys, and values, `[batch, keys, kv_heads, head_dim]`.
        mask: bool (True: seen) or additive in the dtype of q, `[batch, heads, seq, keys]`, each axis full or 1; or a
            BlockMask. None is causal, for as many keys as queries.
        scale: of the scores.

    Returns:
        `[batch, seq, heads, head_dim]`.

    Raises:
        RopeError: mask is a tensor that has not four axes. What else does not fit, PyTorch refuses.
    """
    if isinstance(mask, Tensor) and mask.ndim != 4:
        check_mask("attend", mask, q, k.shape[1])
    grouped = q.shape[2] != k.shape[2]  # said only where it is so: some kernels refuse it
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if mask is None or isinstance(mask, Tensor):
        attended = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )
    else:
        attended = flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=grouped)
    return attended.transpose(1, 2)


def causal(seq: int, device: torch.device) -> Tensor:
    """bool `[1, 1, seq, seq]`: each token sees those before it and itself."""
    return torch.ones(1, 1, seq, seq, dtype=torch.bool, device=device).tril()


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


def check_rotation(who: str, rotation: object) -> None:
    """Raise unless attention can rotate by it: a `Rotation` or a `TwoPass`."""
    if not isinstance(rotation, (Rotation, TwoPass)):
        raise _checks.error(
            who,
            "rotation must be a Rotation, what SelfExtend.at returns, or None",
            _checks.shown(rotation),
            "Make it once for each forward pass: rope.at(positions).",
        )


def check_attended(who: str, cache: object, attended: object, q: Tensor, v: Tensor) -> None:
    """Raise unless a cache has returned what an `AttendingCache` returns: the shape of q, the dtype of v."""
    if not isinstance(attended, Tensor) or attended.shape != q.shape or attended.dtype != v.dtype:
        shape = f"[batch, seq, heads, head_dim] = {list(q.shape)}"
        raise _checks.error(
            who,
            f"attend of {type(cache).__name__} must return {shape} in {v.dtype}",
            _checks.described(attended),
            "AttendingCache says what a cache must do.",
        )


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
