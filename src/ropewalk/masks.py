"""Who sees whom? Masks for attention that more than causality decides, made once for each forward pass."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from ropewalk import positions


def packed(cu_seqlens: Tensor, total: int) -> Tensor:
    """Documents behind one another in one row: each token sees those before it in its own document, and itself.

    The block-diagonal causal mask as a dense tensor, for PyTorch's scaled_dot_product_attention. It takes total² bytes:
    for long rows see `packed_blocks`.

    Args:
        cu_seqlens, total: as in `positions.packed`, which gives the positions for the same row. As there, values are
            not read back: they must begin at 0, must not decrease and must not pass total.

    Returns:
        bool `[total, total]`, query by key, True where it is seen; on the device of cu_seqlens. Tokens after the last
        document (padding) are a document of their own.

    Raises:
        RopeError: cu_seqlens is no such tensor, or total is no such integer.

    Example:
        >>> packed(torch.tensor([0, 2, 3]), 3).int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [0, 0, 1]], dtype=torch.int32)
    """
    token, start = _starts(cu_seqlens, total)
    return (start[:, None] == start) & (token[:, None] >= token)


def packed_blocks(cu_seqlens: Tensor, total: int) -> BlockMask:
    """The same mask for FlexAttention: it knows which blocks of 128 by 128 tokens are empty, and skips them.

    Fused under torch.compile only, which FlexAttention itself warns of. On the CPU it has no gradients (PyTorch 2.13).

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


def _starts(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Each token, and where its document starts: tokens of one document have the same start."""
    place = positions.packed(cu_seqlens, total)
    token = torch.arange(total, device=cu_seqlens.device)
    return token, token - place
