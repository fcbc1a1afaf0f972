"""Context parallelism: attention of one rank's queries over the keys of all ranks, on PyTorch's ring attention."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel._cp_custom_ops import flex_cp_allgather
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from ropewalk import _checks
from ropewalk.attention.attend import rotate, rotate_and_attend
from ropewalk.attention.two_pass import TwoPass
from ropewalk.parallel.ring import check_supported, ring_attention
from ropewalk.positions.context_parallel import Order, check_chunks, chunks
from ropewalk.positions.sizes import check_size
from ropewalk.positions.tokens import boundaries
from ropewalk.rotation.api import Rotation
from ropewalk.rotation.qk_norm import QKNorm

_WHO = "ContextParallel"


class ContextParallel:
    """Causal attention over a sequence whose tokens are distributed over the ranks of a group.

    Create one for each forward pass on every rank of the group, and pass it to every `RotaryAttention` as its cache: it
    is an `AttendingCache`. Each rank rotates its own queries and keys. Keys and values then go round the ranks by
    PyTorch's ring attention, and each step computes only what this rank's queries may see of them, with PyTorch's flash
    kernel. Each token attends to itself and to the tokens before it in its document. No rank holds the keys of the
    whole sequence, and no mask exists.

    All arguments describe the whole sequence, and must be the same on every rank. Every rank therefore raises the same
    error, and none waits for the others.

    Args:
        seq: number of tokens of the whole sequence, a multiple of the number of ranks (of twice that for "head-tail").
        group: the ranks that share the sequence, such as `mesh["cp"].get_group()`. None means the default group.
        order: the tokens of each rank: "contiguous", "head-tail" or "per-document", as in
            `positions.context_parallel`. "per-document" needs cu_seqlens.
        cu_seqlens: boundaries of packed documents in the whole sequence, as in `positions.packed`, or a list of
            integers. A token attends only to its own document, and tokens after the last one (padding) form a separate
            document. A tensor on a GPU is read back once. None means a single document.
        device: device of places and positions. None means PyTorch's default device.

    Attributes:
        places: indices of this rank's tokens in the whole sequence, int64 `[seq / ranks]`: `tokens[:, places]`.
        positions: the positions of these tokens for `rope.at`. They restart at 0 in each document, and equal places
            without cu_seqlens. For several axes, pass `positions[..., places]` of the whole sequence to `rope.at`.

    Raises:
        RopeError: seq or a document cannot be divided into equal chunks, order is unknown or "striped", cu_seqlens is
            missing or wrong, or this process does not belong to the group.

    Examples:
        >>> def forward(layers, x, rope, group=None):  # x [batch, seq, hidden]: the whole sequence on every rank
        ...     context = ropewalk.parallel.ContextParallel(x.shape[1], group)
        ...     x, rotation = x[:, context.places], rope.at(context.positions)
        ...     for layer in layers:
        ...         x = x + layer(x, rotation, cache=context)
        ...     return x  # [batch, seq / ranks, hidden]
    """

    takes_norm = True

    def __init__(
        self,
        seq: int,
        group: dist.ProcessGroup | None = None,
        *,
        order: Order = "head-tail",
        cu_seqlens: Tensor | Sequence[int] | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self._group = _resolve_group(group)
        check_size(_WHO, "seq", seq, at_least=1)
        _checks.choice(_WHO, "order", order, get_args(Order))
        if order == "striped":
            must = "order must give each rank runs of tokens, for which ring attention has kernels"
            raise _checks.error(_WHO, must, "'striped'", "Pass 'head-tail', which balances the work as well.")
        if isinstance(cu_seqlens, (list, tuple)) and all(type(end) is int for end in cu_seqlens):
            cu_seqlens = torch.tensor(cu_seqlens, dtype=torch.int64, device="cpu")
        has_documents = cu_seqlens is not None or order == "per-document"
        ends = boundaries(_WHO, cu_seqlens, seq) if has_documents else [0, seq]  # type: ignore[arg-type]
        check_chunks(_WHO, seq, self._group.size(), order, ends)
        self._seq, self._order, self._ends = seq, order, ends
        rank, size = self._group.rank(), self._group.size()
        own = self._runs(rank)
        found = [(0, span[0].local, span[-1].local_end, span[0].local, span[-1].local_end, 1) for span in own.values()]
        for step in range(1, size):
            found += [(step, *rectangle, 0) for rectangle in _visible(own, self._runs((rank - step) % size))]
        self._visible = torch.tensor(found, dtype=torch.int64, device="cpu")
        runs = [run for span in own.values() for run in span]
        self.places = _arange([(run.begin, run.end) for run in runs], device)
        self.positions = _arange(
            [(run.begin - ends[run.document], run.end - ends[run.document]) for run in runs], device
        )

    def _runs(self, rank: int) -> dict[int, list[_Run]]:
        """Return the runs of consecutive tokens of a rank, by document."""
        found: dict[int, list[_Run]] = {}
        local = 0
        for begin, end in chunks(self._seq, rank, self._group.size(), self._order, self._ends):
            document = bisect_right(self._ends, begin) - 1
            while begin < end:
                stop = min(end, self._ends[document + 1])
                found.setdefault(document, []).append(_Run(document, local, begin, stop))
                local, begin, document = local + stop - begin, stop, document + 1
        return found

    def block_mask(self, mask_mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> BlockMask:
        """Build a mask for `attend` that restricts attention further, such as to a sliding window.

        Args:
            mask_mod: function of the row of the batch, the head, the query and the key, as in PyTorch's
                `create_block_mask`. Query and key are indices in the whole sequence. It must not depend on the row or
                the head. The result is combined with causality and documents.

        Returns:
            The BlockMask of this rank's queries and of the keys of all ranks. Build it once for all layers.

        Examples:
            >>> def window(context, tokens):
            ...     return context.block_mask(lambda row, head, query, key: query - key < tokens)
        """
        queries, device = self.places, self.places.device
        runs = [run for rank in range(self._group.size()) for span in self._runs(rank).values() for run in span]
        keys = _arange([(run.begin, run.end) for run in runs], device)
        ends = torch.tensor(self._ends, device=device)
        document = torch.searchsorted(ends, torch.arange(self._seq, device=device), right=True)

        def attends(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            query, key = queries[query], keys[key]
            visible = (key <= query) & (document[key] == document[query])
            return visible & mask_mod(row, head, query, key)

        # Without compilation, PyTorch builds a dense mask first.
        build = (
            torch.compile(create_block_mask, dynamic=False, fullgraph=True)
            if device.type == "cuda"
            else create_block_mask
        )
        mask: BlockMask = build(attends, None, None, len(queries), len(keys), device=str(device))
        return mask

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        rotation: Rotation | TwoPass | None = None,
        mask: BlockMask | None = None,
        scale: float | None = None,
        norm: QKNorm | None = None,
    ) -> Tensor:
        """Rotate this rank's queries and keys, and attend over the keys of all ranks. Every rank must call this method.

        Args:
            q: queries of this rank's tokens, `[batch, seq / ranks, heads, head_dim]`; kv_heads divides heads.
            k, v: keys and values of the same tokens, `[batch, seq / ranks, kv_heads, head_dim]`.
            rotation: rotation of this rank's tokens, such as `rope.at(context.positions)`. None leaves q and k
                unchanged.
            mask: None, or the result of `block_mask`. With a mask, each rank gathers the keys and values of all ranks,
                and calls `flex_attention`.
            scale: factor of the scores. None means head_dim^(−1/2).
            norm: norm of q and k, applied before rotation. None disables it.

        Returns:
            `[batch, seq / ranks, heads, head_dim]`.

        Raises:
            RopeError: the number of tokens differs from that of places, rotation has two passes, mask is no such
                BlockMask, or PyTorch has no flash kernel for q: on a GPU q must be bfloat16 or float16.
        """
        tokens = self.places.shape[0]
        if q.ndim != 4 or q.shape[1] != tokens:
            must = f"q must have shape [batch, seq / ranks = {tokens}, heads, head_dim], a token for each of places"
            fix = "Create a ContextParallel for this forward pass, and pass it tokens[:, context.places]."
            raise _checks.error(_WHO, must, f"shape {tuple(q.shape)}", fix)
        if rotation is not None and rotation.passes == 2:
            fix = "Pass rope.at(positions). Self-Extend needs all tokens on one rank."
            raise _checks.error(_WHO, "rotation must have one pass", "a rotation with two passes", fix)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        name = self._group.group_name
        if mask is None:
            check_supported(_WHO, q)
            q, k = rotate(q, k, rotation, norm)
            out, _ = ring_attention(*(x.transpose(1, 2) for x in (q, k, v)), self._visible, scale, name)
            attended: Tensor = out.transpose(1, 2)
            return attended
        if not isinstance(mask, BlockMask) or mask.seq_lengths != (tokens, self._seq):
            must = f"mask must be None or a BlockMask of {tokens} queries and {self._seq} keys"
            got = f"{mask.seq_lengths[0]} and {mask.seq_lengths[1]}" if isinstance(mask, BlockMask) else "a dense mask"
            raise _checks.error(_WHO, must, got, "Pass context.block_mask(mask_mod).")
        gather = partial(flex_cp_allgather, seq_dim=1, pg_name=name)
        return rotate_and_attend(q, k, v, rotation=rotation, mask=mask, scale=scale, append=gather, norm=norm)


class _Run(NamedTuple):
    """Consecutive tokens of one document on one rank.

    Attributes:
        document: number of the document.
        local: index of the first token among those of the rank.
        begin, end: indices of the first token and of the token after the last in the whole sequence.
    """

    document: int
    local: int
    begin: int
    end: int

    @property
    def local_end(self) -> int:
        return self.local + self.end - self.begin


def _visible(own: dict[int, list[_Run]], others: dict[int, list[_Run]]) -> list[tuple[int, int, int, int]]:
    """Return the visible rectangle of this rank's queries and another rank's keys, for each document that has one.

    A rank holds the tokens of a document in their order and beside each other. In each of the orders, every query that
    sees a key of the other rank sees the same keys.
    """
    found: list[tuple[int, int, int, int]] = []
    for document in own.keys() & others.keys():
        queries = [run for run in own[document] if run.begin > others[document][0].begin]
        keys = [run for run in others[document] if run.begin < own[document][-1].begin]
        if queries and keys:
            found.append((queries[0].local, queries[-1].local_end, keys[0].local, keys[-1].local_end))
    return found


def _arange(runs: list[tuple[int, int]], device: torch.device | str | None) -> Tensor:
    """Concatenate the integers of all runs, int64, in one copy to the device."""
    joined = torch.cat([torch.arange(begin, end, device="cpu") for begin, end in runs])
    return joined.to(torch.get_default_device() if device is None else device)


def _resolve_group(group: object) -> dist.ProcessGroup:
    """Return the group, or the default group for None; raise unless this process belongs to it."""
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        must = "group must be a process group of this process, or None if there is a default group"
        fix = "Call torch.distributed.init_process_group, or pass mesh['cp'].get_group()."
        raise _checks.error(_WHO, must, _checks.shown(group), fix)
    return group
