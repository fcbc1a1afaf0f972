"""Which keys each query sees, beyond plain causality: packed documents, sliding windows, padding.

Make a mask once for each forward pass and hand it to every layer. A dense mask is a bool tensor, True where a query
sees a key, whose four axes `[batch, heads, seq, keys]` are each of full size or 1, so masks combine with `&`:

    masks.packed(cu_seqlens, seq) & masks.sliding_window(seq, 4096)

The functions ending in `_blocks` make the same mask for PyTorch's FlexAttention, which skips blocks of 128 by 128
tokens in which nothing is seen. It is fused under torch.compile only, and warns of that itself; on the CPU it has no
gradients (PyTorch 2.13).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from ropewalk import _checks, positions


def packed(cu_seqlens: Tensor, total: int) -> Tensor:
    """Documents behind one another in one row: each token sees those before it in its own document, and itself.

    The block-diagonal causal mask as a dense tensor, for PyTorch's scaled_dot_product_attention. It takes total² bytes:
    for long rows see `packed_blocks`.

    Args:
        cu_seqlens, total: as in `positions.packed`, which gives the positions for the same row. As there, values are
            not read back: they must begin at 0, must not decrease and must not pass total.

    Returns:
        bool `[1, 1, total, total]`, query by key, True where it is seen; on the device of cu_seqlens. Tokens after the
        last document (padding) are a document of their own.

    Raises:
        RopeError: cu_seqlens is no such tensor, or total is no such integer.

    Example:
        >>> packed(torch.tensor([0, 2, 3]), 3)[0, 0].int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [0, 0, 1]], dtype=torch.int32)
    """
    token, start = _starts(cu_seqlens, total)
    return ((start[:, None] == start) & (token[:, None] >= token))[None, None]


def packed_blocks(cu_seqlens: Tensor, total: int) -> BlockMask:
    """The mask of `packed` for FlexAttention.

    Args:
        cu_seqlens, total: as in `packed`.

    Returns:
        A `BlockMask` of PyTorch for every batch row and head, on the device of cu_seqlens.

    Raises:
        RopeError: cu_seqlens is no such tensor, or total is no such integer.
    """
    _, start = _starts(cu_seqlens, total)

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (start[query] == start[key]) & (query >= key)

    return create_block_mask(seen, None, None, total, total, device=str(cu_seqlens.device))


def sliding_window(seq: int, window: int, *, device: torch.device | str | None = None) -> Tensor:
    """Each token sees itself and the window − 1 tokens before it, and none after it.

    For a forward pass without a cache. With one, use `KVCache(window=...)`, which counts alike and stores no more
    than it needs.

    Args:
        seq: tokens in each row, at least 0.
        window: tokens that each token sees, itself included, at least 1: `sliding_window` in Hugging Face's configs.
        device: where the mask is made; PyTorch's default device when None.

    Returns:
        bool `[1, 1, seq, seq]`, query by key, True where it is seen.

    Raises:
        RopeError: seq or window is no such integer.

    Example:
        >>> sliding_window(4, 2)[0, 0].int()
        tensor([[1, 0, 0, 0],
                [1, 1, 0, 0],
                [0, 1, 1, 0],
                [0, 0, 1, 1]], dtype=torch.int32)
    """
    _check_window("masks.sliding_window", seq, window)
    token = torch.arange(seq, device=device)
    distance = token[:, None] - token
    return ((distance >= 0) & (distance < window))[None, None]


def sliding_window_blocks(seq: int, window: int, *, device: torch.device | str | None = None) -> BlockMask:
    """The mask of `sliding_window` for FlexAttention.

    Args:
        seq, window, device: as in `sliding_window`.

    Returns:
        A `BlockMask` of PyTorch for every batch row and head.

    Raises:
        RopeError: seq or window is no such integer.
    """
    _check_window("masks.sliding_window_blocks", seq, window)

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key < window)

    device = torch.empty(0, device=device).device  # the default device where None was given
    return create_block_mask(seen, None, None, seq, seq, device=str(device))


def padding(attention_mask: Tensor, keys: int | None = None) -> Tensor:
    """Padding is not seen by any token. Causality is not included; `RotaryAttention` adds it.

    A query that sees no key at all, such as padding at the start of a row, gets 0 from attention.

    Args:
        attention_mask: True or non-zero for real tokens: bool or integer `[batch, keys]`, padding anywhere. Or the
            lengths of rows padded at the end: int32 or int64 `[batch]`. Values are not read back.
        keys: with lengths, and only then: tokens in each row, padding included.

    Returns:
        bool `[batch, 1, 1, keys]`, True for real tokens, on the device of attention_mask.

    Raises:
        RopeError: attention_mask is no such tensor, or keys is missing, not wanted or no such integer.

    Example:
        >>> padding(torch.tensor([[0, 1, 1], [1, 1, 0]])).tolist()
        [[[[False, True, True]]], [[[True, True, False]]]]
        >>> padding(torch.tensor([3, 2]), 3).tolist()
        [[[[True, True, True]]], [[[True, True, False]]]]
    """
    return _real("masks.padding", attention_mask, keys)[:, None, None, :]


def padding_blocks(attention_mask: Tensor, keys: int | None = None) -> BlockMask:
    """The mask of `padding`, joined with causality, for FlexAttention.

    Args:
        attention_mask, keys: as in `padding`.

    Returns:
        A `BlockMask` of PyTorch for every head, on the device of attention_mask.

    Raises:
        RopeError: as in `padding`.
    """
    real = _real("masks.padding_blocks", attention_mask, keys)
    batch, seq = real.shape

    def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return real[row, key] & (query >= key)

    return create_block_mask(seen, batch, None, seq, seq, device=str(real.device))


def _starts(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Each token, and where its document starts: tokens of one document have the same start."""
    place = positions.packed(cu_seqlens, total)
    token = torch.arange(total, device=cu_seqlens.device)
    return token, token - place


def _check_window(who: str, seq: int, window: int) -> None:
    _check_count(who, "seq", seq)
    _checks.length(who, "window", window)


def _check_count(who: str, name: str, value: int) -> None:
    if not isinstance(value, torch.SymInt):  # the length of a tensor while torch.compile or torch.export traces
        _checks.integer(who, name, value, at_least=0)


def _real(who: str, attention_mask: Tensor, keys: int | None) -> Tensor:
    """bool `[batch, keys]`, True for real tokens."""
    must = "attention_mask must be a bool or integer tensor [batch, keys], or integer lengths [batch]"
    fix = "Pass the mask of real tokens, not the additive or four-dimensional one that attention gets."
    if not isinstance(attention_mask, Tensor):
        raise _checks.error(who, must, _checks.shown(attention_mask), fix)
    lengths = attention_mask.ndim == 1 and attention_mask.dtype in (torch.int32, torch.int64)
    if (not lengths and attention_mask.ndim != 2) or attention_mask.is_floating_point() or attention_mask.is_complex():
        raise _checks.error(who, must, f"{attention_mask.dtype} of shape {tuple(attention_mask.shape)}", fix)
    if lengths != (keys is not None):
        must = "keys must be given with lengths, and only then"
        fix = "Pass lengths [batch] and keys, or a mask [batch, keys] alone."
        raise _checks.error(who, must, _checks.shown(keys), fix)
    if keys is None:
        return attention_mask != 0
    _check_count(who, "keys", keys)
    return torch.arange(keys, device=attention_mask.device) < attention_mask[:, None]
