"""Positions of the tokens that one rank holds when a sequence is sharded over a process group."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.positions.sizes import check_size
from ropewalk.positions.tokens import packed

Order = Literal["contiguous", "head-tail", "striped"]

_WHO = "positions.context_parallel"


def context_parallel(
    seq: int,
    rank: int,
    size: int,
    order: Order,
    cu_seqlens: Tensor | None = None,
    *,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the positions of one rank's tokens, in a sequence that is sharded over size ranks (context parallelism).

    If you shard the tokens yourself, `tokens[:, context_parallel(seq, rank, size, order)]` selects the tokens of the
    rank, in the order in which the rank holds them. If a framework shards the tokens, let it shard the positions in the
    same call.

    Args:
        seq: number of tokens of the whole sequence, at least 0; a multiple of size, and of 2 · size for "head-tail".
        rank: the number of this rank in the group, 0 ≤ rank < size.
        size: number of ranks that share the sequence, at least 1.
        order: "contiguous": rank r holds the r-th of size equal chunks.
            "head-tail": of 2 · size equal chunks, rank r holds the r-th and the r-th from the end, so that all ranks
            have the same work under a causal mask.
            "striped": rank r holds the tokens r, r + size, r + 2 · size and so on.
        cu_seqlens: document boundaries of a packed sequence, as in `positions.packed`. Positions restart at 0 in each
            document, while the sequence is sharded as a whole. If each document is sharded separately, as in
            TransformerEngine, call this function for each document and concatenate the results.
        device: device of the result. None means PyTorch's default device. It must be None with cu_seqlens.

    Returns:
        int64 `[seq / size]`, on the device of cu_seqlens if that is passed.

    Raises:
        RopeError: a number is out of range, order is unknown, seq cannot be divided into equal chunks, cu_seqlens is
            not such a tensor, or device is passed with cu_seqlens.

    Source:
        `_HeadTailLoadBalancer` of PyTorch 2.13 for "head-tail"; Striped Attention (2311.09431) for "striped".

    Examples:
        >>> context_parallel(8, 0, 2, "head-tail")
        tensor([0, 1, 6, 7])
        >>> context_parallel(8, 1, 2, "striped")
        tensor([1, 3, 5, 7])
        >>> context_parallel(8, 1, 2, "contiguous", torch.tensor([0, 5, 8]))
        tensor([4, 0, 1, 2])
    """
    _checks.choice(_WHO, "order", order, get_args(Order))
    size = _checks.integer(_WHO, "size", size, at_least=1)
    rank = _checks.integer(_WHO, "rank", rank, at_least=0, at_most=size - 1)
    check_size(_WHO, "seq", seq)
    if cu_seqlens is not None and device is not None:
        fix = "Omit device: the result is on the device of cu_seqlens."
        raise _checks.error(_WHO, "device must be None with cu_seqlens", _checks.shown(device), fix)
    count = 2 * size if order == "head-tail" else size
    if seq % count:
        must = f"seq must be a multiple of {count} to be sharded over {size} ranks in the order {order!r}"
        raise _checks.error(_WHO, must, str(seq), f"Pad the sequence to {-(-seq // count) * count} tokens.")
    positions = torch.arange(seq, device=device) if cu_seqlens is None else packed(cu_seqlens, seq)
    if order == "striped":
        return positions.view(-1, size)[:, rank].contiguous()
    chunks = positions.view(count, -1)
    return chunks[rank].clone() if order == "contiguous" else torch.cat([chunks[rank], chunks[-1 - rank]])
