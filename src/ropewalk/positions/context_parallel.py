"""Positions of the tokens that one rank holds, where a sequence is cut over the ranks of a process group."""

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
    """Where the tokens of one rank stand in a sequence that is cut over size ranks (context parallel).

    For those who cut the tokens by hand: `tokens[:, context_parallel(seq, rank, size, order)]` are those of the rank,
    in the order in which it holds them. Where a framework cuts the tokens, let it cut the positions by the same call.

    Args:
        seq: tokens of the whole sequence, at least 0; a multiple of size, and of 2 · size for "head-tail".
        rank: this rank within the group, 0 ≤ rank < size.
        size: ranks that share the sequence, at least 1.
        order: "contiguous": rank r has the r-th of size equal runs. "head-tail": of 2 · size equal runs it has the r-th
            and the r-th from the end, so that under a causal mask all ranks have the same work. "striped": it has the
            tokens r, r + size, r + 2 · size and so on.
        cu_seqlens: of a sequence that consists of packed documents, as in `positions.packed`: positions start again at
            0 in each document. The sequence is still cut as a whole. Where each document is cut by itself
            (TransformerEngine), call this for each and join the results.
        device: where the result is made, PyTorch's default device when None; only without cu_seqlens.

    Returns:
        int64 `[seq / size]`, on the device of cu_seqlens where that is given.

    Raises:
        RopeError: a number is no such integer, order is unknown, the order does not cut seq into equal parts,
            cu_seqlens is no such tensor, or device comes with cu_seqlens.

    Source:
        `_HeadTailLoadBalancer` of PyTorch 2.13 for "head-tail"; Striped Attention (2311.09431) for "striped".

    Example:
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
        fix = "Leave device out: the result is on the device of cu_seqlens."
        raise _checks.error(_WHO, "device must be None with cu_seqlens", _checks.shown(device), fix)
    runs = 2 * size if order == "head-tail" else size
    if seq % runs:
        must = f"seq must be a multiple of {runs} to be cut over {size} ranks in the order {order!r}"
        raise _checks.error(_WHO, must, str(seq), f"Pad the sequence to {-(-seq // runs) * runs} tokens.")
    place = torch.arange(seq, device=device) if cu_seqlens is None else packed(cu_seqlens, seq)
    if order == "striped":
        return place.view(-1, size)[:, rank].contiguous()
    rows = place.view(runs, -1)
    return rows[rank].clone() if order == "contiguous" else torch.cat([rows[rank], rows[-1 - rank]])
