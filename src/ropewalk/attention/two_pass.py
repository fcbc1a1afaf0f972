"""Attention in two passes, for two different rotations of near and far pairs of query and key."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ropewalk import _checks
from ropewalk._layout import Layout
from ropewalk.attention.mask_tensors import causal as causal_mask
from ropewalk.attention.mask_tensors import check_mask
from ropewalk.rotation.api import Rotation


class TwoPass:
    """Two rotations of the same tokens. Each pair of query and key is scored with one of them.

    Self-Extend and attention sinks need distances that no single rotation gives. `SelfExtend.at` or
    `CacheStep.rotation` creates a `TwoPass` once for each forward pass; pass it to every layer instead of a `Rotation`.
    It answers the same call: `rotation(q, k, layout="bshd")` rotates the new queries and keys.

        score = far_queries(q) · far_keys(near(k))   for far pairs
                near(q) · near(k)                    for near pairs

    Args:
        near: rotates the new queries and keys. Cached keys have been rotated in the same way.
        far_queries: rotates the new queries for the far pass.
        far_keys: rotates all keys, already rotated by near, again for the far pass. None leaves them unchanged.
        far: bool, broadcastable to `[batch, heads, seq, keys]`: True for far pairs.
        sinks: if positive, far is True for the first `sinks` tokens of a row and for no others, and far_keys is None.
    """

    __slots__ = ("far", "far_keys", "far_queries", "near", "sinks")

    passes: ClassVar[Literal[2]] = 2
    """How often attention scores a pair of query and key; 1 for a `Rotation`."""

    def __init__(
        self, near: Rotation, far_queries: Rotation, far_keys: Rotation | None, far: Tensor, sinks: int = 0
    ) -> None:
        self.near, self.far_queries, self.far_keys, self.far, self.sinks = near, far_queries, far_keys, far, sinks

    def __call__(self, q: Tensor, k: Tensor, *, layout: Layout) -> tuple[Tensor, Tensor]:
        """Rotate the new queries for both passes, and the new keys for the near pass.

        Args:
            q: queries of the new tokens, `[batch, seq, heads, head_dim]`.
            k: keys of the new tokens, `[batch, seq, kv_heads, head_dim]`.
            layout: "bshd", as attention needs it.

        Returns:
            Both rotations of the queries, near first, `[batch, 2 · seq, heads, head_dim]`, for `attend`; and the keys.
        """
        near, k = self.near(q, k, layout=layout)
        return torch.cat([near, self.far_queries(q, layout=layout)], dim=1), k

    def select_keys(self, keys: slice) -> TwoPass:
        """Return a copy that is restricted to a slice of the keys."""
        far_keys = self.far_keys
        if far_keys is not None:
            far_keys = far_keys._replace_tables(far_keys.cos[..., keys, :], far_keys.sin[..., keys, :])
        return TwoPass(self.near, self.far_queries, far_keys, self.far[..., keys], self.sinks)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | BlockMask | None,
        scale: float,
        causal: bool = True,
        dropout: float = 0.0,
    ) -> Tensor:
        """Compute attention: the softmax of the merged near and far scores, times v.

        The softmax is computed in float32, or in float64 for float64 tensors.

        Args:
            q: queries, as the call of this object rotates them, `[batch, 2 · seq, heads, head_dim]`.
            k, v: all keys, rotated by `near`, and all values, `[batch, keys, kv_heads, head_dim]`.
            mask: `[batch, heads, seq, keys]`, each axis of full size or 1: bool (True: the query attends to the key) or
                additive in the dtype of q. It replaces the causal mask.
            scale: factor of the scores.
            causal: whether each query attends only to the key of its own token and to earlier keys. The last query and
                the last key belong to the same token. False attends to every key. Ignored if mask is given.
            dropout: probability of setting an attention weight to 0.

        Returns:
            `[batch, seq, heads, head_dim]`, with 0 for a query whose keys are all masked, as in PyTorch's attention.

        Raises:
            RopeError: mask has a wrong type, dtype or shape.
        """
        near, far = q.chunk(2, dim=1)
        seq = near.shape[1]
        if mask is None and causal and (isinstance(seq, torch.SymInt) or seq > 1):  # one query attends to every key
            mask = causal_mask(seq, k.shape[1], q.device)
        if mask is not None:
            if not isinstance(mask, Tensor):
                must, fix = "mask must be a tensor or None", "Pass a dense mask, e.g. masks.packed(cu_seqlens, total)."
                raise _checks.error("TwoPass.attend", must, "a BlockMask", fix)
            check_mask("TwoPass.attend", mask, near, k.shape[1])
        if self.far_keys is None:  # both passes use the same keys, so read them once
            near_scores, far_scores = _scores(q, k).chunk(2, dim=2)
        else:
            near_scores, far_scores = _scores(near, k), _scores(far, self.far_keys(k, layout="bshd"))
        scores = torch.where(self.far, far_scores, near_scores) * scale
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        masked = scores.amax(-1, keepdim=True) == -math.inf  # queries whose keys are all masked
        weights = scores.masked_fill(masked, 0.0).softmax(-1).masked_fill(masked, 0.0).to(v.dtype)
        if dropout:
            weights = torch.nn.functional.dropout(weights, dropout)
        batch, heads, _, keys = weights.shape
        rows = weights.reshape(batch, v.shape[2], -1, keys)
        return _matmul(rows, v.transpose(1, 2)).view(batch, heads, seq, -1).transpose(1, 2)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """Compute q · k as `[batch, heads, seq, keys]`. Head i of q uses head i // (heads / kv_heads) of k."""
    batch, seq, heads, head_dim = q.shape
    rows = q.transpose(1, 2).reshape(batch, k.shape[2], -1, head_dim)  # the queries of a group
    if q.dtype in (torch.bfloat16, torch.float16):  # on the CPU 3 times faster than rows · keysᵀ; slower in float32
        scores = _matmul(k.transpose(1, 2), rows.transpose(2, 3)).transpose(2, 3)
    else:
        scores = _matmul(rows, k.permute(0, 2, 3, 1))
    return scores.reshape(batch, heads, seq, -1)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """Compute a @ b separately for each row of the batch.

    A batched product would first copy the keys, because those of a cache are not contiguous. For one query, 8 rows of
    1,024 keys and 8 heads of 128 on 2 cores, the separate products take 3 ms instead of 31 ms in float32.
    """
    if a.shape[0] == 1 or torch.compiler.is_compiling():
        return a @ b
    return torch.stack([left @ right for left, right in zip(a, b, strict=True)])
