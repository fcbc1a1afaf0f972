"""Slots of a cache: which of them takes which token, and which token each of them holds.

Everything here goes by the order of tokens: a token's number in its row, from 0. Where a token is rotated to is another
number, which several tokens may share and which `KVCache.shift` changes. It has no say in who sees whom.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ropewalk.attention import cache_checks

EMPTY = 2**62
"""The order, and the position, of a slot that holds no key: after every query, so causality hides it."""


class Slots:
    """The slots of one row, alike in every row and layer.

    The first tokens of a row stay in the sinks. The others take the slots of the ring one after the other. In a cache
    with a window they begin again at the first of them, which evicts the oldest token. In a cache with a capacity
    what does not fit is not kept.

    Args:
        capacity: slots of a cache that keeps every token; None with a window.
        window: slots of the ring of a cache with a window; None with a capacity.
        sinks: with window: slots in front of the ring.

    Attributes:
        ring: slots of the ring.
        count: slots that hold a token. The slot of this number, one more, takes what is not kept.
    """

    def __init__(self, capacity: int | None, window: int | None, sinks: int) -> None:
        self.sinks = sinks
        self.evicts = window is not None
        self.ring = capacity or window or 0
        self.count = sinks + self.ring

    def of(self, order: Tensor, real: Tensor, total: Tensor) -> Tensor:
        """Where new tokens are stored, int64 `[batch, seq]`: `count` for those that are not kept. No other comes twice.

        Args:
            order: of each new token, int64 `[batch, seq]`.
            real: which of them are no padding, bool `[batch, seq]`.
            total: tokens of each row with the new ones, int64 `[batch]`.
        """
        if not self.evicts:
            return torch.where(real & (order < self.count), order, self.count)
        kept = real & ((order < self.sinks) | (order >= total[:, None] - self.ring))
        slot = torch.where(order < self.sinks, order, self.sinks + (order - self.sinks) % self.ring)
        return torch.where(kept, slot, self.count)

    def order(self, length: Tensor) -> Tensor:
        """Of the token in each slot, int64 `[batch, count]`, for rows of length tokens; `EMPTY` where there is none.

        Args:
            length: int64 `[batch]`.
        """
        slot, last = torch.arange(self.count, device=length.device), length[:, None] - 1
        if not self.evicts:
            return torch.where(slot <= last, slot, EMPTY)
        in_ring = last - (last - slot) % self.ring  # the newest token whose slot it is
        in_ring = torch.where(in_ring >= self.sinks, in_ring, EMPTY)
        if not self.sinks:
            return in_ring
        return torch.where(slot < self.sinks, torch.where(slot <= last, slot, EMPTY), in_ring)

    def filled(self, held: tuple[int, int] | None, *, beside: bool) -> slice:
        """The keys of a forward pass that some row can see, as far as that is known.

        Args:
            held: the smallest and the largest number of tokens in a row; None where they are not known.
            beside: whether new keys stand behind all slots, and held is without them. Then cached keys are all or none.
        """
        if held is None or (beside and held[1] > 0):
            return slice(None)
        return slice(self.count, None) if beside else slice(min(self.count, max(held[1], 1)))

    def causal(self, seq: int, held: tuple[int, int] | None, *, beside: bool) -> bool:
        """Whether plain causality over the filled slots is all that holds, where no new token is padding.

        So it is for one token in rows of equal length, which see all keys, and for the first tokens of every row.

        Args:
            seq: new tokens of each row.
            held, beside: as in `filled`.
        """
        if held is None or held[0] != held[1]:
            return False
        return held[1] == 0 and seq <= self.ring if beside else seq in (1, held[1])


def clear(tensors: Sequence[Tensor], begin: Tensor, end: Tensor) -> None:
    """Zero the slots that a row forgets, from begin up to end: a mask does not keep out a nan, since 0 · nan is nan.

    Args:
        tensors: keys and values of all layers, `[batch, slots, kv_heads, head_dim]`.
        begin, end: of each row, int64 `[batch]`.
    """
    if cache_checks.known(begin) is None:
        slot = torch.arange(tensors[0].shape[1], device=begin.device)
        forgotten = (slot >= begin[:, None]) & (slot < end[:, None])
        for tensor in tensors:
            tensor.masked_fill_(forgotten[:, :, None, None], 0)
        return
    for row, (first, last) in enumerate(zip(begin.tolist(), end.tolist(), strict=True)):
        for tensor in tensors if first < last else ():
            tensor[row, first:last].zero_()
