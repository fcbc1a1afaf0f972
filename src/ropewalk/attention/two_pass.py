"""Attention in two passes, where pairs of query and key differ in rotation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ropewalk.attention.mask_tensors import check_mask
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

    def only(self, keys: slice) -> TwoPass:
        """The same for some of the keys."""
        far_keys = self.far_keys
        if far_keys is not None:
            far_keys = far_keys._replace_tables(far_keys.cos[..., keys, :], far_keys.sin[..., keys, :])
        return TwoPass(self.near, self.far_queries, far_keys, self.far[..., keys])

    def attend(
        self, q: Tensor, q_far: Tensor, k: Tensor, v: Tensor, *, mask: Tensor, scale: float, dropout: float = 0.0
    ) -> Tensor:
        """Softmax over the merged scores, times v.

        Args:
            q, q_far: queries rotated by near and by far_queries, `[batch, seq, heads, head_dim]`.
            k, v: all keys, rotated by near, and values, `[batch, keys, kv_heads, head_dim]`.
            mask: bool (True: seen) or additive in the dtype of q: `[batch, heads, seq, keys]`, each axis full or 1.
            scale: of the scores.
            dropout: probability with which each weight is set to 0.

        Returns:
            `[batch, seq, heads, head_dim]`. Softmax in float32, or float64 for float64 tensors. 0 for a query that
            sees nothing, as PyTorch's attention has it.

        Raises:
            RopeError: mask has another dtype or shape.
        """
        check_mask("TwoPass.attend", mask, q, k.shape[1])
        if self.far_keys is None:  # the same keys in both passes are read once
            near_scores, far_scores = _scores(torch.cat([q, q_far], dim=1), k).chunk(2, dim=2)
        else:
            near_scores, far_scores = _scores(q, k), _scores(q_far, self.far_keys(k, layout="bshd"))
        scores = torch.where(self.far, far_scores, near_scores) * scale
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        blind = scores.amax(-1, keepdim=True) == -math.inf
        weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0).to(v.dtype)
        if dropout:
            weights = torch.nn.functional.dropout(weights, dropout)
        batch, heads, seq, keys = weights.shape
        rows = weights.reshape(batch, v.shape[2], -1, keys)
        return _matmul(rows, v.transpose(1, 2)).view(batch, heads, seq, -1).transpose(1, 2)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """`[batch, heads, seq, keys]`; head i of q meets head i // (heads / kv_heads) of k."""
    batch, seq, heads, head_dim = q.shape
    rows = q.transpose(1, 2).reshape(batch, k.shape[2], -1, head_dim)  # the queries of a group
    if q.dtype in (torch.bfloat16, torch.float16):  # on the CPU 3 times faster than rows · keysᵀ, which float32 wants
        scores = _matmul(k.transpose(1, 2), rows.transpose(2, 3)).transpose(2, 3)
    else:
        scores = _matmul(rows, k.permute(0, 2, 3, 1))
    return scores.reshape(batch, heads, seq, -1)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, row by row: a batched product copies the keys of a cache, whose rows are not one behind another.

    With 8 rows of 1,024 keys, 8 heads of 128, one query on 2 cores, that is 3 (float32) and 31 ms.
    """
    if a.shape[0] == 1 or torch.compiler.is_compiling():
        return a @ b
    return torch.stack([one @ other for one, other in zip(a, b, strict=True)])
