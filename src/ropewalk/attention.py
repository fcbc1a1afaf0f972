"""Attention over turned queries and keys: PyTorch's kernels, or in two passes where pairs differ in rotation."""

from __future__ import annotations

import math

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
        near: turns the new queries and keys. A cache holds keys that are turned so.
        far_queries: turns the new queries for far keys.
        far_keys: moves all keys, already turned by near, for the far pass; None where they stay.
        far: bool, broadcastable to `[batch, heads, seq, keys]`: True for the pairs of the far pass.
    """

    __slots__ = ("far", "far_keys", "far_queries", "near")

    def __init__(self, near: Rotation, far_queries: Rotation, far_keys: Rotation | None, far: Tensor) -> None:
        self.near, self.far_queries, self.far_keys, self.far = near, far_queries, far_keys, far

    def attend(self, q: Tensor, q_far: Tensor, k: Tensor, v: Tensor, *, mask: Tensor, scale: float) -> Tensor:
        """Softmax over the merged scores, times v.

        Args:
            q, q_far: queries turned by near and by far_queries, `[batch, seq, heads, head_dim]`.
            k, v: all keys, turned by near, and values, `[batch, keys, kv_heads, head_dim]`.
            mask: bool or additive, broadcastable to `[batch, heads, seq, keys]`.
            scale: of the scores.

        Returns:
            `[batch, seq, heads, head_dim]`. Softmax in float32, or float64 for float64 tensors. 0 for a query that
            sees nothing, as PyTorch's attention has it.
        """
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


def attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | BlockMask | None, scale: float) -> Tensor:
    """PyTorch's attention: FlexAttention for a BlockMask, scaled_dot_product_attention for the rest.

    Args:
        q: turned queries, `[batch, seq, heads, head_dim]`.
        k, v: turned keys, and values, `[batch, keys, kv_heads, head_dim]`.
        mask: who sees whom; None is causal, for as many keys as queries.
        scale: of the scores.

    Returns:
        `[batch, seq, heads, head_dim]`.
    """
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
    """bool `[seq, seq]`: each token sees those before it and itself."""
    return torch.ones(seq, seq, dtype=torch.bool, device=device).tril()


def joined(mask: Tensor | None, seen: Tensor) -> Tensor:
    """The user's mask, bool or additive, where `seen` allows it."""
    if mask is None:
        return seen
    return mask & seen if mask.dtype == torch.bool else torch.where(seen, mask, -math.inf)


def check_mask(who: str, mask: Tensor, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Raise unless mask is bool or of the dtype of the scores, and fits `[batch, heads, seq, keys]`."""
    if mask.dtype not in (torch.bool, dtype):
        raise _checks.error(
            who,
            f"mask must be bool (True: seen) or {dtype} (added to the scores)",
            str(mask.dtype),
            "Make a mask of 0 and 1 bool; give an additive one the dtype of q and k.",
        )
    fits = 2 <= mask.ndim <= 4 and all(
        have in (1, want) for have, want in zip(reversed(mask.shape), reversed(shape), strict=False)
    )
    if not fits:
        raise _checks.error(
            who,
            f"mask must have two to four axes and fit [batch, heads, seq, keys] = {list(shape)}",
            f"shape {tuple(mask.shape)}",
            "A mask [batch, keys] of real tokens needs axes for heads and queries: mask[:, None, None, :].",
        )
