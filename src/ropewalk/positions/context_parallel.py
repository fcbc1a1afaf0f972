"""The tokens that one rank holds when a sequence is sharded over a process group, and their positions."""

from __future__ import annotations

import itertools
from typing import Literal, get_args

import torch
from torch import Tensor

from ropewalk import _checks
from ropewalk.positions.sizes import check_size
from ropewalk.positions.tokens import boundaries, packed

Order = Literal["contiguous", "head-tail", "per-document", "striped"]

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
            For "per-document" each document, and the padding after the last one, is such a multiple of 2 · size.
        rank: the number of this rank in the group, 0 ≤ rank < size.
        size: number of ranks that share the sequence, at least 1.
        order: "contiguous": rank r holds the r-th of size equal chunks.
            "head-tail": of 2 · size equal chunks, rank r holds the r-th and the r-th from the end, so that all ranks
            have the same work under a causal mask.
            "per-document": each document is sharded separately, in the order "head-tail", as in TransformerEngine with
            layout "thd", so that packed documents are balanced as well. The values of cu_seqlens are read.
            "striped": rank r holds the tokens r, r + size, r + 2 · size and so on.
        cu_seqlens: document boundaries of a packed sequence, as in `positions.packed`. Positions restart at 0 in each
            document. In the other orders the sequence is sharded as a whole. Required for "per-document".
        device: device of the result. None means PyTorch's default device. It must be None with cu_seqlens.

    Returns:
        int64 `[seq / size]`, on the device of cu_seqlens if that is passed.

    Raises:
        RopeError: a number is out of range, order is unknown, seq or a document cannot be divided into equal chunks,
            cu_seqlens is not such a tensor or missing, or device is passed with cu_seqlens.

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
    ends = boundaries(_WHO, cu_seqlens, seq) if order == "per-document" else None
    check_chunks(_WHO, seq, size, order, ends)
    positions = torch.arange(seq, device=device) if cu_seqlens is None else packed(cu_seqlens, seq)
    if order == "striped":
        return positions[rank::size].contiguous()
    return torch.cat([positions[begin:end] for begin, end in chunks(seq, rank, size, order, ends)])


def check_chunks(who: str, seq: int, size: int, order: Order, ends: list[int] | None) -> None:
    """Raise unless the sequence, or each document for "per-document", can be divided into equal chunks."""
    count = size if order in ("contiguous", "striped") else 2 * size
    for begin, end in ((0, seq),) if ends is None or order != "per-document" else itertools.pairwise(ends):
        if (end - begin) % count:
            whole, name = order != "per-document", "seq" if order != "per-document" else "each document"
            must = f"{name} must be a multiple of {count} to be sharded over {size} ranks in the order {order!r}"
            got = str(seq) if whole else f"{end - begin} tokens from {begin} to {end}"
            fix = f"Pad the {'sequence' if whole else 'document'} to {-(-(end - begin) // count) * count} tokens."
            raise _checks.error(who, must, got, fix)


def chunks(seq: int, rank: int, size: int, order: Order, ends: list[int] | None) -> list[tuple[int, int]]:
    """Return the begin and the end of each chunk of the sequence that a rank holds, in the order in which it does.

    Args:
        seq, rank, size, order: as in `context_parallel`, but not "striped".
        ends: the first token of each document, and seq. Used for "per-document" only.
    """
    if order == "contiguous":
        return [(rank * (seq // size), (rank + 1) * (seq // size))]
    found = []
    for begin, end in ((0, seq),) if ends is None or order != "per-document" else itertools.pairwise(ends):
        length = (end - begin) // (2 * size)
        found += [(begin + i * length, begin + (i + 1) * length) for i in (rank, 2 * size - 1 - rank)]
    return found
