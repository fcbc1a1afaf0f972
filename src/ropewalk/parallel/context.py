"""Context parallelism: attention of one rank's queries over the keys of all ranks, on PyTorch's ring attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel._cp_custom_ops import flex_cp_allgather
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from ropewalk import _checks
from ropewalk.attention.attend import attend, rotate
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
        self._seq, self._ends = seq, torch.tensor(ends, device="cpu")
        rank, size = self._group.rank(), self._group.size()
        self._chunks = partial(chunks, seq, size=size, order=order, ends=ends)
        own = self._held_by(rank)
        self._visible = torch.cat([_visible(i, own, self._held_by((rank - i) % size), self._ends) for i in range(size)])
        self.places = own.to(torch.get_default_device() if device is None else device)
        starts = self._ends[torch.searchsorted(self._ends, own, right=True) - 1]
        self.positions = (own - starts).to(self.places.device)

    def _held_by(self, rank: int) -> Tensor:
        """Return the indices of a rank's tokens in the whole sequence, on the CPU."""
        begin, end = torch.tensor(self._chunks(rank=rank), device="cpu").unbind(1)
        shift = begin - torch.nn.functional.pad((end - begin).cumsum(0), (1, -1))
        return torch.arange(self._seq // self._group.size(), device="cpu") + shift.repeat_interleave(end - begin)

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
        keys = torch.cat([self._held_by(rank) for rank in range(self._group.size())]).to(device)
        document = torch.searchsorted(self._ends, torch.arange(self._seq, device="cpu"), right=True).to(device)

        def attends(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            query, key = queries[query], keys[key]
            visible = (key <= query) & (document[key] == document[query])
            return visible & mask_mod(row, head, query, key)

        # Without compilation, PyTorch builds a dense mask first.
        build: Any = create_block_mask
        if device.type == "cuda":
            build = torch.compile(build, dynamic=False, fullgraph=True)
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
        q, k = rotate(q, k, rotation, norm)
        k, v = flex_cp_allgather(k, v, seq_dim=1, pg_name=name)
        return attend(q, k, v, mask=mask, scale=scale)


def _visible(step: int, queries: Tensor, keys: Tensor, ends: Tensor) -> Tensor:
    """Return the rectangles of `ring_attention` for the keys of one rank: at most one for each document.

    Every rank holds its tokens in the order of the sequence. In each of the orders, all queries of a rank that see a
    key of a document on another rank see the same keys of it.
    """
    of_queries, of_keys = torch.searchsorted(queries, ends), torch.searchsorted(keys, ends)  # where documents begin
    q_end, k_begin = of_queries[1:], of_keys[:-1]
    q_begin = torch.searchsorted(queries, keys[k_begin.clamp(max=len(keys) - 1)])  # from the first key on
    k_end = torch.searchsorted(keys, queries[q_end - 1], right=True)  # up to the last query
    on_both = (of_queries[:-1] < q_end) & (k_begin < of_keys[1:])
    of_step, is_causal = torch.full_like(q_end, step), torch.full_like(q_end, step == 0)
    found = torch.stack((of_step, q_begin, q_end, k_begin, k_end, is_causal), dim=1)
    return found[on_both & (q_begin < q_end) & (k_begin < k_end)]


def _resolve_group(group: object) -> dist.ProcessGroup:
    """Return the group, or the default group for None; raise unless this process belongs to it."""
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        must = "group must be a process group of this process, or None if there is a default group"
        fix = "Call torch.distributed.init_process_group, or pass mesh['cp'].get_group()."
        raise _checks.error(_WHO, must, _checks.shown(group), fix)
    return group
