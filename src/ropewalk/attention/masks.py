"""Build attention masks for packed documents, sliding windows and padding.

Build a mask once for each forward pass and pass it to every layer. A dense mask is a bool tensor, True where a query
attends to a key. Its four axes `[batch, heads, seq, keys]` each have the full size or 1, so masks combine with `&`:

    masks.packed(cu_seqlens, seq) & masks.sliding_window(seq, 4096)

`packed_blocks` builds the mask of `packed` for FlexAttention, which is fused only under torch.compile.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from ropewalk import _checks, positions
from ropewalk.positions.sizes import check_mask, real_tokens
from ropewalk.rotation.writable import check_memory

__all__ = ["packed", "packed_blocks", "padding", "sliding_window"]
__dir__ = __all__.copy


def packed(cu_seqlens: Tensor, total: int) -> Tensor:
    """Build the mask of packed documents: each token attends to itself and the earlier tokens of its own document.

    The result is the block-diagonal causal mask as a dense tensor, for PyTorch's scaled_dot_product_attention. It takes
    total² bytes; for long rows use `packed_blocks`.

    Args:
        cu_seqlens, total: as in `positions.packed`, which returns the positions of the same row. The values of
            cu_seqlens are checked only on the CPU outside of torch.compile.

    Returns:
        bool `[1, 1, total, total]`, query by key, True where the query attends to the key, on the device of cu_seqlens.
        Tokens after the last document (padding) form a separate document.

    Raises:
        RopeError: as raised by `positions.packed`.

    Examples:
        >>> packed(torch.tensor([0, 2, 3]), 3)[0, 0].int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [0, 0, 1]], dtype=torch.int32)
    """
    token, start = _starts(cu_seqlens, total)
    return ((start[:, None] == start) & (token[:, None] >= token))[None, None]


def packed_blocks(cu_seqlens: Tensor, total: int) -> BlockMask:
    """Build the mask of `packed` for FlexAttention.

    Args:
        cu_seqlens, total: as in `packed`.

    Returns:
        A PyTorch `BlockMask` for every batch row and head, on the device of cu_seqlens.

    Raises:
        RopeError: as raised by `positions.packed`.
    """
    _, start = _starts(cu_seqlens, total)

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (start[query] == start[key]) & (query >= key)

    return create_block_mask(attends, None, None, total, total, device=str(cu_seqlens.device))


def sliding_window(seq: int, window: int, *, device: torch.device | str | None = None) -> Tensor:
    """Build the mask of a sliding window: each token attends to itself and the window − 1 tokens before it.

    It is for a forward pass without a cache. With a cache, use `KVCache(window=...)`, which counts in the same way and
    stores only the tokens in the window.

    Args:
        seq: tokens in each row, at least 0.
        window: number of tokens that each token attends to, itself included, at least 1: `sliding_window` in Hugging
            Face's configs.
        device: device of the mask. None means PyTorch's default device.

    Returns:
        bool `[1, 1, seq, seq]`, query by key, True where the query attends to the key.

    Raises:
        RopeError: seq or window is not an integer in its range.

    Examples:
        >>> sliding_window(4, 2)[0, 0].int()
        tensor([[1, 0, 0, 0],
                [1, 1, 0, 0],
                [0, 1, 1, 0],
                [0, 0, 1, 1]], dtype=torch.int32)
    """
    _check_count("masks.sliding_window", "seq", seq)
    _checks.length("masks.sliding_window", "window", window)
    token = torch.arange(seq, device=device)
    distance = token[:, None] - token
    return ((distance >= 0) & (distance < window))[None, None]


def padding(attention_mask: Tensor, keys: int | None = None) -> Tensor:
    """Build the mask that hides padding from every token. It is not causal; `RotaryAttention` adds the causal mask.

    If every key of a query is masked, as for padding at the start of a row, attention returns 0 for it.

    Args:
        attention_mask: True or 1 for real tokens, bool or integer `[batch, keys]`, with padding anywhere. Or the
            lengths of rows that are padded at the end, int32 or int64 `[batch]`. Values are read only if that is free.
        keys: tokens in each row, padding included. Required with lengths, and allowed only with them.

    Returns:
        bool `[batch, 1, 1, keys]`, True for real tokens, on the device of attention_mask.

    Raises:
        RopeError: attention_mask has a wrong type or shape; or keys is missing, not allowed or not an integer ≥ 0.

    Examples:
        >>> padding(torch.tensor([[0, 1, 1], [1, 1, 0]])).tolist()
        [[[[False, True, True]]], [[[True, True, False]]]]
        >>> padding(torch.tensor([3, 2]), 3).tolist()
        [[[[True, True, True]]], [[[True, True, False]]]]
    """
    who = "masks.padding"
    lengths = getattr(attention_mask, "ndim", 0) == 1 and attention_mask.dtype in (torch.int32, torch.int64)
    if not lengths:
        check_mask(who, attention_mask, "[batch, keys], or integer lengths [batch]")
    if lengths != (keys is not None):
        must = "keys must be passed with lengths, and only then"
        fix = "Pass lengths [batch] and keys, or a mask [batch, keys] alone."
        raise _checks.error(who, must, _checks.shown(keys), fix)
    check_memory(who, attention_mask)
    if keys is None:
        packed = "For numbered documents, pass the mask m[:, None, :, None] == m[:, None, None, :] instead."
        return real_tokens(who, attention_mask, packed)[:, None, None, :]
    _check_count(who, "keys", keys)
    return (torch.arange(keys, device=attention_mask.device) < attention_mask[:, None])[:, None, None, :]


def _starts(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return the index of each token, and the index of the first token of its document."""
    position = positions.packed(cu_seqlens, total)
    token = torch.arange(total, device=cu_seqlens.device)
    return token, token - position


def _check_count(who: str, name: str, value: int) -> None:
    if not isinstance(value, torch.SymInt):  # the length of a tensor while torch.compile or torch.export traces
        _checks.integer(who, name, value, at_least=0)
