"""Map tokens to the slots of a cache, and slots to the tokens that they hold.

Everything here depends on the order of a token: its index in its row, from 0. The position to which a token is rotated
is another number. Several tokens may share it, `KVCache.shift` changes it, and it does not affect masks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ropewalk.attention import cache_checks

EMPTY = 2**62
"""Order and position of an empty slot. It is larger than that of every query, so the causal mask hides the slot."""


class Slots:
    """The slots of a row, which are the same in every row and layer.

    The first tokens of a row stay in the sink slots. The others fill the ring, slot after slot. With a window, the ring
    wraps around, and each new token evicts the oldest one. With a capacity, tokens that do not fit are discarded.

    Args:
        capacity: number of slots in a cache that keeps every token. None with a window.
        window: number of slots in the ring of a cache with a window. None with a capacity.
        sinks: with window, number of slots in front of the ring.

    Attributes:
        ring: number of slots in the ring.
        count: number of slots for tokens. One extra slot, with index count, receives discarded tokens.
    """

    def __init__(self, capacity: int | None, window: int | None, sinks: int) -> None:
        self.sinks = sinks
        self.evicts = window is not None
        self.ring = capacity or window or 0
        self.count = sinks + self.ring

    def of(self, order: Tensor, real: Tensor, total: Tensor) -> Tensor:
        """Return the slots of new tokens, int64 `[batch, seq]`, and `count` for discarded ones. Others are distinct.

        Args:
            order: order of the new tokens, int64 `[batch, seq]`.
            real: False for padding, bool `[batch, seq]`.
            total: number of tokens in each row, including the new ones, int64 `[batch]`.
        """
        if not self.evicts:
            return torch.where(real & (order < self.count), order, self.count)
        kept = real & ((order < self.sinks) | (order >= total[:, None] - self.ring))
        slot = torch.where(order < self.sinks, order, self.sinks + (order - self.sinks) % self.ring)
        return torch.where(kept, slot, self.count)

    def order(self, length: Tensor) -> Tensor:
        """Return the order of the token in each slot, int64 `[batch, count]`, and `EMPTY` for empty slots.

        Args:
            length: number of tokens in each row, int64 `[batch]`.
        """
        slot, last = torch.arange(self.count, device=length.device), length[:, None] - 1
        if not self.evicts:
            return torch.where(slot <= last, slot, EMPTY)
        in_ring = last - (last - slot) % self.ring  # the newest token that maps to this slot
        in_ring = torch.where(in_ring >= self.sinks, in_ring, EMPTY)
        if not self.sinks:
            return in_ring
        return torch.where(slot < self.sinks, torch.where(slot <= last, slot, EMPTY), in_ring)

    def filled(self, held: tuple[int, int] | None, *, concatenates: bool) -> slice:
        """Return the slice of keys that are visible to some row, or all keys if this is not known.

        Args:
            held: smallest and largest number of tokens in a row, None if unknown.
            concatenates: whether the new keys are concatenated to all slots. held then excludes the new tokens, and the
                slice has either all cached keys or none.
        """
        if held is None or (concatenates and held[1] > 0):
            return slice(None)
        return slice(self.count, None) if concatenates else slice(min(self.count, max(held[1], 1)))

    def causal(self, seq: int, held: tuple[int, int] | None, *, concatenates: bool) -> bool:
        """Whether the mask is a plain causal mask over the filled slots, provided that no new token is padding.

        This is so for a single token if rows have equal lengths, and for the first tokens of every row.

        Args:
            seq: number of new tokens in each row.
            held, concatenates: as in `filled`.
        """
        if held is None or held[0] != held[1]:
            return False
        return held[1] == 0 and seq <= self.ring if concatenates else seq in (1, held[1])


def clear(tensors: Sequence[Tensor], begin: Tensor, end: Tensor) -> None:
    """Zero the dropped slots of each row, from begin up to end. A mask would not hide NaN there, since 0 · NaN is NaN.

    Args:
        tensors: keys and values of all layers, `[batch, slots, kv_heads, head_dim]`.
        begin, end: range of slots in each row, int64 `[batch]`.
    """
    if cache_checks.read_range(begin) is None:
        slot = torch.arange(tensors[0].shape[1], device=begin.device)
        dropped = (slot >= begin[:, None]) & (slot < end[:, None])
        for tensor in tensors:
            tensor.masked_fill_(dropped[:, :, None, None], 0)
        return
    for row, (first, last) in enumerate(zip(begin.tolist(), end.tolist(), strict=True)):
        for tensor in tensors if first < last else ():
            tensor[row, first:last].zero_()
