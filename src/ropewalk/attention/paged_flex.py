"""Let FlexAttention read the blocks of a paged cache directly: check the pools, flatten them, and build the mask."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ropewalk import _checks

_QUERIES = 128  # new tokens in a block of FlexAttention


def check_flex(who: str, flex: bool, pools: Sequence[Tensor]) -> bool:
    """Return flex after checking that it is a bool and that FlexAttention can address the pools."""
    _checks.boolean(who, "flex", flex)
    for pool in pools if flex else ():
        if pool.shape[0] > 1 and pool.stride(0) != pool.stride(1) * pool.shape[1]:
            raise _checks.error(
                who,
                "with flex, the tokens of all blocks must be evenly spaced in memory",
                f"strides {pool.stride()} for blocks of {pool.shape[1]} tokens",
                "Use separate tensors for each layer with tokens before heads (NHD), or pass flex=False.",
            )
    return flex


def flatten_blocks(pool: Tensor) -> Tensor:
    """Return a view of all tokens of a pool, `[1, tokens, kv_heads, head_dim]`."""
    blocks, size, heads, channels = pool.shape
    shape, strides = (1, blocks * size, heads, channels), (0, *pool.stride()[1:])
    return pool.as_strided(shape, strides)


def block_mask(
    tables: list[list[int]],
    pool: Tensor,
    *,
    order: Tensor,
    real: Tensor,
    skipped: Tensor,
    window: int | None,
) -> BlockMask:
    """Build the mask between the new tokens of one forward pass and all tokens of a pool.

    Args:
        tables: the blocks of each row.
        pool: keys of a layer, `[blocks, block_size, kv_heads, head_dim]`.
        order: indices of the new tokens in their rows, int64 `[batch, seq]`.
        real: False for padding, bool `[batch, seq]`. Padding attends to every token of its row.
        skipped: number of tokens before the first block of each row, int64 `[batch, 1]`.
        window: number of tokens that each token attends to. None means no limit.
    """
    blocks, size = pool.shape[:2]
    (batch, seq), device = order.shape, order.device
    block_numbers = torch.zeros(batch, blocks, dtype=torch.int32)  # FlexAttention requires the width of the pool
    number = torch.full((batch, blocks), -1)  # index of a block in its row, from 0
    for row, table in enumerate(tables):
        block_numbers[row, : len(table)] = torch.tensor(table, dtype=torch.int32)
        number[row, table] = torch.arange(len(table))
    count = torch.tensor([len(table) for table in tables], dtype=torch.int32)
    tiles = -(-seq // _QUERIES)
    number, first = number.to(device), skipped[:, 0]

    def attends(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block = number[row, key // size]
        distance = order[row, query] - (first[row] + block * size + key % size)
        in_window = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        return (block >= 0) & (in_window | ~real[row, query])

    return BlockMask.from_kv_blocks(
        count[:, None, None].expand(-1, 1, tiles).to(device),
        block_numbers[:, None, None].expand(-1, 1, tiles, -1).to(device),
        BLOCK_SIZE=(_QUERIES, size),
        mask_mod=attends,
        seq_lengths=(seq, blocks * size),
        compute_q_blocks=False,
    )
