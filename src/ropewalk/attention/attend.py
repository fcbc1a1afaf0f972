"""Attention over rotated queries and keys with PyTorch's kernels, and the protocol of a cache for `RotaryAttention`."""

from __future__ import annotations

from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ropewalk import _checks
from ropewalk.attention.mask_tensors import check_mask, restrict, select
from ropewalk.attention.pairs import Pairs, cut
from ropewalk.attention.two_pass import TwoPass
from ropewalk.rotation.api import Rotation
from ropewalk.rotation.qk_norm import QKNorm

_FEW = 64
"""Tokens up to which attention in two passes keeps its scores in memory. For more, one attention over joined keys is
faster: for 2,048 tokens over 2,048 keys in a third of the time."""


class AttendingCache(Protocol):
    """The interface of the cache of one layer in one forward pass, which is passed to `RotaryAttention`.

    `LayerCache` implements it. Other caches may store keys and values in any form, such as pages or quantized tensors,
    because no caller reads them as one tensor.

    The protocol is for type checkers. `isinstance` with it raises a TypeError, because at run time it could only look
    for a method named `attend`.

    If a cache has an attribute `takes_window` that is True, a layer with `window` passes it as the argument `window`.
    Other caches apply their window themselves, and their layers have none.

    If a cache has an attribute `takes_norm` that is True, a layer with `qk_norm` may pass q and k before the norm, and
    the `QKNorm` as the argument `norm`: the cache calls `norm.rotate(rotation, q, k, layout="bshd")`, which keeps less
    for the backward pass, or `norm(q, k)` if rotation is None. Other caches get normalized q and k.
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
        """Rotate the new queries and keys, store the new keys and values, and attend over all stored ones.

        The cache applies the causal mask: a token attends to itself and to the tokens before it in its row, in the
        order in which they were stored.

        Args:
            q: unrotated queries, `[batch, seq, heads, head_dim]`.
            k, v: unrotated keys, and values, `[batch, seq, kv_heads, head_dim]`; kv_heads divides heads.
            rotation: rotation of the new tokens, layout "bshd". None if the layer does not rotate. A cache that does
                not support attention in two passes raises an error for a `TwoPass`.
            mask: the user's mask, combined with the causal one. Its form depends on the cache. None means the causal
                mask alone.
            scale: factor of the scores, used instead of head_dim^(−1/2).

        Returns:
            `[batch, seq, heads, head_dim]`, in the dtype of v.
        """


def rotate(q: Tensor, k: Tensor, rotation: Rotation | TwoPass | None, norm: QKNorm | None) -> tuple[Tensor, Tensor]:
    """Normalize and rotate q and k, each if it is not None. Return q, rotated twice for a `TwoPass`, and k."""
    if norm is not None and rotation is not None and rotation.passes == 1:
        return norm.rotate(rotation, q, k, layout="bshd")
    q, k = (q, k) if norm is None else norm(q, k)
    return (q, k) if rotation is None else rotation(q, k, layout="bshd")


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rotation: Rotation | TwoPass | None = None,
    mask: Tensor | BlockMask | None,
    scale: float,
    causal: bool = True,
    dropout: float = 0.0,
    pairs: Pairs | None = None,
) -> Tensor:
    """Attend over dense keys: in two passes if rotation has two, with FlexAttention for a BlockMask, or with SDPA.

    Where causality alone is not enough, queries attend in pieces (`Pairs`). A compiled graph has one piece.

    Args:
        q: queries, as `rotate` returns them, `[batch, seq, heads, head_dim]`, or 2 · seq for a `TwoPass`.
        k, v: rotated keys, and values, `[batch, keys, kv_heads, head_dim]`.
        rotation: the rotation of the new tokens. With a `TwoPass`, mask must be a tensor or None.
        mask: a BlockMask; or a tensor `[batch, heads, seq, keys]`, each axis of full size or 1, that is bool (True:
            the query attends to the key) or additive in the dtype of q. It replaces the causal mask.
        scale: factor of the scores.
        causal: whether each query attends only to the key of its own token and to earlier keys. The last query and the
            last key belong to the same token. False attends to every key. Ignored if mask or pairs is given.
        dropout: probability of setting an attention weight to 0; it must be 0 with a BlockMask.
        pairs: the keys that each query attends to, if mask allows it. None with a BlockMask.

    Returns:
        `[batch, seq, heads, head_dim]`.

    Raises:
        RopeError: mask is a tensor without four axes, or a BlockMask is combined with dropout. PyTorch checks the
            other arguments.
    """
    if isinstance(mask, Tensor) and mask.ndim != 4:
        check_mask("attend", mask, q, k.shape[1])
    two = rotation if rotation is not None and rotation.passes == 2 else None
    seq, keys = q.shape[1] if two is None else q.shape[1] // 2, k.shape[1]
    if two is not None and mask is not None and not isinstance(mask, Tensor):
        must, fix = "mask must be a tensor or None", "Pass a dense mask, e.g. masks.packed(cu_seqlens, total)."
        raise _checks.error("attend", f"with a rotation in two passes, {must}", "a BlockMask", fix)
    dynamic = isinstance(seq, torch.SymInt)  # a graph for any number of tokens must not depend on it
    triangle = pairs is None and mask is None and causal and (dynamic or seq > 1)  # one query attends to every key
    if triangle and (two is not None or seq != keys):
        pairs, triangle = Pairs.aligned(seq, keys, q.device), False
    elif pairs is None and two is not None and not dynamic and len(cut(seq)) > 1:
        pairs = Pairs.aligned(seq, keys, q.device, after=keys)  # mask alone decides
    attend_piece = partial(_attend_piece, triangle=triangle, scale=scale, dropout=dropout)
    if pairs is None or dynamic or torch.compiler.is_compiling():
        mask = mask if pairs is None or isinstance(mask, BlockMask) else restrict(mask, pairs.mask())
        return attend_piece(q, k, v, two, mask=mask)
    attended = []
    for queries, of_keys, seen in pairs.pieces():
        part = select(mask, queries, of_keys) if isinstance(mask, Tensor) else None
        rows, of_piece = q[:, queries], None
        if two is not None:
            rows = torch.cat([rows, q[:, seq + queries.start : seq + queries.stop]], dim=1)
            of_piece = two.select(queries, of_keys)
        attended.append(attend_piece(rows, k[:, of_keys], v[:, of_keys], of_piece, mask=restrict(part, seen)))
    return attended[0] if len(attended) == 1 else torch.cat(attended, dim=1)


def _attend_piece(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotation: TwoPass | None,
    *,
    mask: Tensor | BlockMask | None,
    triangle: bool,
    scale: float,
    dropout: float,
) -> Tensor:
    """Attend with some queries over keys. With `triangle`, each query attends to its own key and those before it."""
    if rotation is not None:
        width, mask = v.shape[-1], cast("Tensor | None", mask)
        if isinstance(q.shape[1], int) and q.shape[1] <= 2 * _FEW:
            return rotation.attend_few(q, k, v, mask=mask, scale=scale, dropout=dropout)
        q, k, v, mask = rotation.join(q, k, v, mask)
        return _attend_piece(q, k, v, None, mask=mask, triangle=False, scale=scale, dropout=dropout)[..., :width]
    heads, kv_heads = q.shape[2], k.shape[2]
    if mask is not None and not isinstance(mask, Tensor):
        if dropout:
            must, fix = "dropout must be 0 with a BlockMask", "FlexAttention has no dropout. Pass a dense mask."
            raise _checks.error("attend", must, str(dropout), fix)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=heads != kv_heads).transpose(1, 2)
    if not triangle and not isinstance(q.shape[1], torch.SymInt) and _should_fold_heads(q, kv_heads):
        return _attend_folded(q, k, v, mask=mask, scale=scale, dropout=dropout)
    return torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=triangle,
        dropout_p=dropout,
        scale=scale,
        enable_gqa=heads != kv_heads,  # only where needed: some kernels do not support it
    ).transpose(1, 2)


def _should_fold_heads(q: Tensor, kv_heads: int) -> bool:
    """Return whether to pass all queries that share a key head as rows of one head, which is faster for few queries.

    PyTorch's CPU kernel reads the keys again for each query head, and has a slow path for a single row in bfloat16:
    32 heads over 8 key heads and 1,024 keys take 7.0 ms with separate heads and 0.8 ms with folded rows, in float32 1.0
    and 1.1 (2 cores, PyTorch 2.13). Beyond 16 queries the gain is smaller than the noise, and a mask would have to be
    repeated for each query head.
    """
    seq, heads = q.shape[1], q.shape[2]
    if heads != kv_heads:
        return seq <= 16
    return seq == 1 and q.dtype == torch.bfloat16 and q.device.type == "cpu"


def _attend_folded(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, scale: float, dropout: float) -> Tensor:
    """Attend with all queries that share a key head as rows of one head.

    If each key head has one query head, each query is passed twice, because PyTorch's CPU kernel is slow for a single
    row in bfloat16.
    """
    batch, seq, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    if heads == kv_heads:
        rows = q.transpose(1, 2).expand(batch, heads, 2, head_dim)
    else:
        rows = q.transpose(1, 2).reshape(batch, kv_heads, group * seq, head_dim)
        if mask is not None and mask.shape[1] != 1:
            mask = mask.expand(-1, -1, seq, -1).reshape(mask.shape[0], kv_heads, group * seq, mask.shape[3])
        elif mask is not None and mask.shape[2] != 1:
            mask = mask.expand(-1, group, -1, -1).reshape(mask.shape[0], 1, group * seq, mask.shape[3])
    attended = torch.nn.functional.scaled_dot_product_attention(
        rows, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, dropout_p=dropout, scale=scale
    )
    if heads == kv_heads:
        return attended[:, :, :1].transpose(1, 2)
    return attended.reshape(batch, heads, seq, v.shape[-1]).transpose(1, 2)


def not_a_rotation(who: str, rotation: object) -> _checks.RopeError:
    """Return the error for a rotation that is neither a `Rotation` nor a `TwoPass`."""
    must, fix = "rotation must be a Rotation, the result of SelfExtend.at, or None", "rope.at(positions)."
    return _checks.error(who, must, _checks.shown(rotation), f"Compute it once for each forward pass: {fix}")
