"""Attention over rotated queries and keys by PyTorch's kernels, and what `RotaryAttention` asks of a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ropewalk import _checks
from ropewalk.attention.mask_tensors import causal as causal_mask
from ropewalk.attention.mask_tensors import check_mask
from ropewalk.attention.two_pass import TwoPass
from ropewalk.rotation.api import Rotation
from ropewalk.rotation.qk_norm import QKNorm


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
    causal: bool = True,
    dropout: float = 0.0,
    norm: QKNorm | None = None,
) -> Tensor:
    """Attention over dense keys, in one pass or two, as the rotation wants it.

    Args:
        q, k, v: of the new tokens, `[batch, seq, heads or kv_heads, head_dim]`, q and k not rotated yet.
        rotation: of the new tokens; None: q and k are used as they are.
        mask: as in `attend`; a tensor where rotation has two passes.
        scale: of the scores.
        append: stores the rotated keys and the values and returns all keys and values; None: these are all.
        causal, dropout: as in `attend`.
        norm: of q and k before rotation, or None where there is no norm.

    Returns:
        `[batch, seq, heads, head_dim]`.
    """
    near = rotation.near if isinstance(rotation, TwoPass) else rotation
    if norm is not None and isinstance(rotation, Rotation):
        q_near, k = norm.rotate(rotation, q, k, layout="bshd")
    else:
        q, k = (q, k) if norm is None else norm(q, k)
        q_near, k = (q, k) if near is None else near(q, k, layout="bshd")
    if append is not None:
        k, v = append(k, v)
    if isinstance(rotation, TwoPass):
        q_far = rotation.far_queries(q, layout="bshd")
        return rotation.attend(q_near, q_far, k, v, mask=cast(Tensor, mask), scale=scale, dropout=dropout)
    return attend(q_near, k, v, mask=mask, scale=scale, causal=causal, dropout=dropout)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | BlockMask | None,
    scale: float,
    causal: bool = True,
    dropout: float = 0.0,
) -> Tensor:
    """PyTorch's attention: FlexAttention for a BlockMask, scaled_dot_product_attention for the rest.

    Args:
        q: rotated queries, `[batch, seq, heads, head_dim]`.
        k, v: rotated keys, and values, `[batch, keys, kv_heads, head_dim]`.
        mask: bool (True: seen) or additive in the dtype of q, `[batch, heads, seq, keys]`, each axis full or 1; or a
            BlockMask. It says everything, causality included.
        scale: of the scores.
        causal: without a mask, each query sees the keys up to its own, where the last query is that of the last key.
            False: every query sees every key.
        dropout: probability with which each weight is set to 0; not with a BlockMask.

    Returns:
        `[batch, seq, heads, head_dim]`.

    Raises:
        RopeError: mask is a tensor that has not four axes, or a BlockMask with dropout. What else does not fit, PyTorch
            refuses.
    """
    if isinstance(mask, Tensor) and mask.ndim != 4:
        check_mask("attend", mask, q, k.shape[1])
    seq, keys, heads, kv_heads = q.shape[1], k.shape[1], q.shape[2], k.shape[2]
    if mask is not None and not isinstance(mask, Tensor):
        if dropout:
            must, fix = "dropout must be 0 with a BlockMask", "FlexAttention has none. Pass a dense mask."
            raise _checks.error("attend", must, str(dropout), fix)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=heads != kv_heads).transpose(1, 2)
    triangle = mask is None and causal and not _few(seq, 1)
    if triangle and seq != keys:
        mask, triangle = causal_mask(seq, keys, q.device), False
    if not triangle and _as_rows(q, kv_heads):
        return _attend_rows(q, k, v, mask=mask, scale=scale, dropout=dropout)
    return torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=triangle,
        dropout_p=dropout,
        scale=scale,
        enable_gqa=heads != kv_heads,  # said only where it is so: some kernels refuse it
    ).transpose(1, 2)


def _as_rows(q: Tensor, kv_heads: int) -> bool:
    """Whether few queries go into PyTorch's kernel as rows of their key head.

    PyTorch's kernel for CPUs reads the keys again for each head of queries, and takes a single row the slow way in
    bfloat16. Measured on 2 cores over 1,024 keys, 8 key heads of 128 channels, PyTorch 2.13, milliseconds as heads and
    as rows:

        heads, queries, batch    float32        bfloat16       float16
        32, 1, 1                 1.0   1.1       7.0   0.8      6.5   2.0
        32, 1, 8                21    16        56     7.3
        32, 4, 8                68    53        14     9.3
        32, 16, 8               99    86        28    23
        16, 1, 1                 0.65  0.59      3.4   0.66     3.2   1.6
        8 to 1 key head, 1, 8    1.6   0.58      7.3   0.64
        8, 1, 1 (no groups)      0.32  1.0       1.7   0.8      2.1   1.9

    Beyond 16 queries the gain is lost in the noise, and a mask would have to be repeated for each head of the group.
    """
    seq, heads = q.shape[1], q.shape[2]
    if heads != kv_heads:
        return _few(seq, 16)
    return _few(seq, 1) and q.dtype == torch.bfloat16 and q.device.type == "cpu"


def _few(seq: int, most: int) -> bool:
    """Whether there are at most so many queries; not while a graph for any number of them is traced."""
    return not isinstance(seq, torch.SymInt) and seq <= most


def _attend_rows(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, scale: float, dropout: float) -> Tensor:
    """`attend` with the queries of a group as rows of their key head; without groups, each query twice."""
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
    return attended.reshape(batch, heads, seq, head_dim).transpose(1, 2)


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
