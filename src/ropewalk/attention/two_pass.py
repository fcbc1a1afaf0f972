"""Attention in two passes, for two different rotations of near and far pairs of query and key."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ropewalk._layout import Layout
from ropewalk.attention.mask_tensors import restrict, select
from ropewalk.positions.sizes import can_read
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
        far: bool, broadcastable to `[batch, heads, seq, keys]`: True for far pairs. Or, without memory for all pairs,
            two tensors, int64 `[batch, seq]` or `[seq]`, and `[batch, keys]` or `[keys]`: a number of each query, and
            one of each key, which is far if its number is not larger.
        sinks: if positive, far is True for the first `sinks` tokens of a row and for no others, and far_keys is None.
    """

    __slots__ = ("_far", "far_keys", "far_queries", "keys", "near", "sinks")

    passes: ClassVar[Literal[2]] = 2
    """How often attention scores a pair of query and key; 1 for a `Rotation`."""

    def __init__(
        self,
        near: Rotation,
        far_queries: Rotation,
        far_keys: Rotation | None,
        far: Tensor | tuple[Tensor, Tensor],
        sinks: int = 0,
    ) -> None:
        self.near, self.far_queries, self.far_keys, self._far, self.sinks = near, far_queries, far_keys, far, sinks
        self.keys: int = (far if isinstance(far, Tensor) else far[1]).shape[-1]

    @property
    def far(self) -> Tensor:
        if isinstance(self._far, Tensor):
            return self._far
        of_queries, of_keys = self._far
        far = of_keys.unsqueeze(-2) <= of_queries.unsqueeze(-1)
        return far.unsqueeze(1) if far.ndim == 3 else far

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

    def select(self, queries: slice, keys: slice | Tensor) -> TwoPass:
        """Return a copy for attention of rotated queries over rotated keys, with some of each."""
        far_keys, far = self.far_keys, self._far
        if far_keys is not None:
            far_keys = far_keys._replace_tables(far_keys.cos[..., keys, :], far_keys.sin[..., keys, :])
        if isinstance(far, Tensor):
            far = select(far[(None,) * (4 - far.ndim)], queries, keys)
        else:
            far = far[0][..., queries], far[1][..., keys]
        return TwoPass(self.near, self.far_queries, far_keys, far, self.sinks)

    def join(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return queries, keys, values and mask of one attention that computes both passes, exactly.

        The product of `[near(q), far_queries(q)]` with `[k, 0]` is the near score, and with `[0, far_keys(k)]` the far
        one. So a key that is in one pass for all queries stays one key, with twice the channels. Any other becomes two
        keys, and the mask hides one of them from each query.

        Args:
            q: queries, as the call of this object rotates them, `[batch, 2 · seq, heads, head_dim]`.
            k, v: all keys, rotated by `near`, and all values, `[batch, keys, kv_heads, head_dim]`.
            mask: `[batch, heads, seq, keys]`, each axis of full size or 1: bool (True: the query attends to the key) or
                additive. None attends to every key.

        Returns:
            Queries `[batch, seq, heads, 2 · head_dim]`; keys and values, which end in zeros, of the same width; and
            their mask.
        """
        far = self.far[(None,) * (4 - self.far.ndim)]
        far_k = k if self.far_keys is None else self.far_keys(k, layout="bshd")
        always_far = far.all(2).all(1)  # [batch, keys]
        is_far = always_far[:, :, None, None]
        q, v = torch.cat(q.chunk(2, dim=1), dim=-1), torch.cat([v, torch.zeros_like(v)], dim=-1)
        joined = torch.cat([k.masked_fill(is_far, 0), far_k.masked_fill(~is_far, 0)], dim=-1)
        both = torch.arange(k.shape[1], device=k.device)  # the keys that are near for a query and far for another
        if far.shape[1] == far.shape[2] == 1:
            both = both[:0]
        elif can_read(far):
            both = both[(far.any(2).any(1) & ~always_far).any(0)]
        if not len(both):
            return q, joined, v, mask
        again = torch.cat([torch.zeros_like(k[:, both]), far_k[:, both]], dim=-1)
        first = ~far | always_far[:, None, None]
        passes = torch.cat([first, ~first[..., both]], dim=-1)
        if mask is not None:
            mask = mask.expand(*mask.shape[:-1], far.shape[-1])
            passes = restrict(torch.cat([mask, mask[..., both]], dim=-1), passes)
        return q, torch.cat([joined, again], dim=1), torch.cat([v, v[:, both]], dim=1), passes

    def attend_few(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, scale: float, dropout: float
    ) -> Tensor:
        """Attend with few tokens: it keeps all scores in memory, and copies no keys, unlike `join`.

        The arguments are those of `join`, and the scale. The softmax is computed in float32, or for float64 tensors in
        float64.
        """
        near, far = q.chunk(2, dim=1)
        seq = near.shape[1]
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
